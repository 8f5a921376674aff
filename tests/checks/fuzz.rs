//! Runs the fuzz targets on a stable toolchain: each on its corpus, and on mutations of the corpus.
//!
//! `cargo test` uses a fixed seed and a fixed number of mutations. `JACKSTAY_FUZZ_SECONDS=30` runs each target
//! for that time with a new seed. An input that fails is written to a file whose path is in the message; reduce
//! it and commit it to `tests/corpus` with its fix. There is no feedback from coverage; `fuzz/README.md` has the
//! form with libFuzzer, which has it.

#[path = "../../fuzz/targets/mod.rs"]
mod targets;

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::{Duration, Instant};

use fastrand::Rng;

/// Mutations of each target in `cargo test`.
const MUTATIONS: u64 = 1_000;
/// Maximum size of a mutated input in bytes.
const MAX_INPUT: usize = 4096;
/// Processor time of the thread for one input: a parser whose cost is not linear exceeds it. Elapsed time would also
/// count how long the thread waits for a processor, which is many seconds at the lowest priority on a busy machine.
const INPUT_LIMIT: Duration = Duration::from_secs(5);
/// Values at the limits of lengths and of text.
const INTERESTING: [&[u8]; 12] = [
    b"\x00",
    b"\xff",
    b"\x7f\xff\xff\xff",
    b"\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\x80",
    b"\r\n",
    b"\n",
    b"%2f",
    b"18446744073709551616",
    b"-1",
    b"{}",
    b"\xc3\xa9",
];

macro_rules! targets {
    ($($name:ident)*) => {
        const NAMES: &[&str] = &[$(stringify!($name)),*];
        $(#[test]
        fn $name() {
            fuzz(stringify!($name));
        })*
    };
}

targets! {
    arguments certificate config endpoint_objects endpoints_file environment features frames gzip hello
    http1_connection http2_connection kubeconfig node_name pem request server_url state_file takeover watch
    watch_events
}

#[test]
fn each_target_has_a_test_and_a_binary() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let names: Vec<&str> = targets::TARGETS.iter().map(|(name, _)| *name).collect();
    assert_eq!(names, NAMES);
    let manifest = fs::read_to_string(root.join("fuzz/Cargo.toml")).unwrap();
    for name in names {
        assert!(manifest.contains(&format!("name = \"{name}\"\n")), "fuzz/Cargo.toml lacks {name}");
        let binary = root.join(format!("fuzz/fuzz_targets/{name}.rs"));
        assert!(fs::read_to_string(binary).unwrap().contains(&format!("run(\"{name}\", bytes)")));
    }
}

/// Runs a target on its corpus and then on mutations.
fn fuzz(target: &str) {
    let corpus = corpus(target);
    for (name, input) in &corpus {
        run(target, input, || format!("tests/corpus/{target}/{name}"));
    }
    let seconds: Option<u64> =
        std::env::var("JACKSTAY_FUZZ_SECONDS").ok().map(|text| text.parse().expect("a number"));
    let (seed, end) = match seconds {
        Some(seconds) => (fastrand::u64(..), Some(Instant::now() + Duration::from_secs(seconds))),
        None => (1, None),
    };
    let mut random = Rng::with_seed(seed);
    let mut runs = 0;
    while end.map_or(runs < MUTATIONS, |end| Instant::now() < end) {
        let input = mutation(&corpus, &mut random);
        run(target, &input, || {
            let name = format!("{target}-{seed:016x}-{runs}");
            let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
            fs::write(&file, &input).unwrap();
            file.display().to_string()
        });
        runs += 1;
    }
    println!("{target}: {runs} mutations with the seed {seed:#x}");
}

/// Runs a target on one input. `describe` says where the input is.
fn run(target: &str, input: &[u8], describe: impl FnOnce() -> String) {
    let start = processor_time();
    let result = catch_unwind(AssertUnwindSafe(|| targets::run(target, input)));
    let is_slow = processor_time().saturating_sub(start) > INPUT_LIMIT;
    if result.is_err() || is_slow {
        let how = if is_slow { "took too long" } else { "failed" };
        panic!("the target {target} {how} with the input {}", describe());
    }
}

/// The processor time that this thread has used.
fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::try_from(time).expect("a time since the start of the thread")
}

fn corpus(target: &str) -> Vec<(String, Vec<u8>)> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus").join(target);
    let entries = fs::read_dir(&directory).expect("each target has a corpus");
    let mut corpus: Vec<(String, Vec<u8>)> = entries
        .map(|entry| entry.unwrap())
        .map(|file| (file.file_name().into_string().unwrap(), fs::read(file.path()).unwrap()))
        .collect();
    corpus.sort_unstable();
    assert!(!corpus.is_empty(), "{target} has no corpus");
    corpus
}

/// One to eight changes of an input of the corpus.
fn mutation(corpus: &[(String, Vec<u8>)], random: &mut Rng) -> Vec<u8> {
    let any = |random: &mut Rng| &corpus[random.usize(..corpus.len())].1;
    let mut input = any(random).clone();
    for _ in 0..=random.usize(..8) {
        let at = random.usize(..=input.len());
        let end = (at + random.usize(..=32)).min(input.len());
        match random.usize(..7) {
            0 if at < input.len() => input[at] ^= 1 << random.u8(..8),
            1 if at < input.len() => input[at] = random.u8(..),
            2 => drop(input.drain(at..end)),
            3 => {
                let repeated = input[at..end].repeat(random.usize(1..=8));
                drop(input.splice(at..at, repeated));
            }
            4 => {
                let value = INTERESTING[random.usize(..INTERESTING.len())];
                drop(input.splice(at..end.min(at + value.len()), value.iter().copied()));
            }
            5 => {
                let other = any(random);
                let from = random.usize(..=other.len());
                let to = (from + random.usize(..=128)).min(other.len());
                drop(input.splice(at..at, other[from..to].iter().copied()));
            }
            _ => input.truncate(at.max(input.len() / 2)),
        }
    }
    input.truncate(MAX_INPUT);
    input
}
