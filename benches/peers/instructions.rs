//! Counts the instructions of one request and of one watch event with callgrind. Unlike times they do not depend on the load
//! or the processor, so a small change of the program's cost is seen.
//!
//! The program runs twice with different amounts of work, and the difference is divided by the difference of the amounts:
//! start and end cancel out. The process with less work is then idle until both have run for the same time, so that the
//! program's timers cancel out, too. What remains is how many frames arrive at once: the smallest of [`PAIRS`] counts.

use std::{collections::BTreeMap, fs, path::Path, process::Command, time::Duration};

use tokio::time::{Instant, sleep_until};

use crate::{
    Result,
    client::{Client, TOKEN},
    origin,
    proxies::{Environment, Layer, Target},
};

/// The counts of the last change that was accepted, by name.
const RECORD: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/instructions.json");
/// Largest count, relative to the recorded one.
const LIMIT: f64 = 1.05;
/// Pairs of processes for each kind of work.
const PAIRS: usize = 2;
/// How long the program may take to end.
const END: Duration = Duration::from_secs(60);

/// What is counted.
#[derive(Clone, Copy)]
enum Work {
    /// A GET of 2 KiB with a token, one after another on one connection.
    Request,
    /// An event of 300 bytes on one watch of a client with a certificate.
    Event,
}

impl Work {
    const ALL: [Self; 2] = [Self::Request, Self::Event];

    fn name(self) -> &'static str {
        match self {
            Self::Request => "request",
            Self::Event => "event",
        }
    }

    /// The smaller and the larger amount.
    fn amounts(self) -> [usize; 2] {
        match self {
            Self::Request => [200, 8_200],
            Self::Event => [500, 12_500],
        }
    }
}

/// Counts, and prints the counts. Returns whether they are within [`LIMIT`] of the recorded ones; `record` replaces those.
pub async fn run(environment: &Environment<'_>, record: bool) -> Result<bool> {
    let recorded: BTreeMap<String, f64> = match fs::read_to_string(RECORD) {
        Ok(text) => serde_json::from_str(&text)?,
        Err(_) => BTreeMap::new(),
    };
    let (mut counts, mut met) = (BTreeMap::new(), true);
    for work in Work::ALL {
        let mut each = f64::INFINITY;
        for _ in 0..PAIRS {
            each = each.min(each_of_pair(environment, work).await?);
        }
        let ratio = recorded.get(work.name()).map(|before| each / before);
        met &= ratio.is_some_and(|ratio| ratio <= LIMIT);
        let ratio = ratio.map_or("not recorded".to_owned(), |ratio| format!("×{ratio:.3}"));
        println!("instructions for each {}: {each} {ratio}, limit ×{LIMIT}", work.name());
        counts.insert(work.name(), each as u64);
    }
    if record {
        fs::write(RECORD, serde_json::to_string_pretty(&counts)? + "\n")?;
    }
    Ok(met || record)
}

/// The instructions for each unit of work, by the difference of two processes.
async fn each_of_pair(environment: &Environment<'_>, work: Work) -> Result<f64> {
    let [few, many] = work.amounts();
    let begin = Instant::now();
    let of_many = count(environment, work, many, begin).await?;
    let time = begin.elapsed();
    let of_few = count(environment, work, few, Instant::now() + time).await?;
    Ok(((of_many - of_few) / (many - few) as f64).round())
}

/// The instructions of a process that does `amount` of the work, and runs until `end` at least.
async fn count(
    environment: &Environment<'_>,
    work: Work,
    amount: usize,
    end: Instant,
) -> Result<f64> {
    let mut proxy = environment.start(Target::Counted, Layer::L7).await?;
    match work {
        Work::Request => {
            let tls = environment.pki.client_config_without_certificate()?;
            let mut client = Client::connect(proxy.address, &tls).await?.with_token(Some(TOKEN));
            for _ in 0..amount {
                client.get(origin::OBJECT).await?;
            }
        }
        Work::Event => {
            let mut client = Client::connect(proxy.address, environment.tls).await?;
            client.event_delays(amount).await?;
        }
    }
    sleep_until(end).await;
    let pid = proxy.process.id();
    Command::new("kill").arg(pid.to_string()).status()?;
    proxy.process.wait(END).await?;
    instructions(&callgrind_file(environment.dir, &pid.to_string()))
}

/// The file in which callgrind writes the counts of a process; `%p` is its pid.
pub fn callgrind_file(dir: &Path, pid: &str) -> std::path::PathBuf {
    dir.join(format!("callgrind.{pid}"))
}

/// The sum of all instructions in a file of callgrind.
fn instructions(file: &Path) -> Result<f64> {
    let text = fs::read_to_string(file)?;
    let total = text.lines().find_map(|line| line.strip_prefix("totals: "));
    Ok(total.ok_or_else(|| format!("no totals in {}", file.display()))?.trim().parse()?)
}
