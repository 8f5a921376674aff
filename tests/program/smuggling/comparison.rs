//! The corpus at `HAProxy`, nginx, Envoy and Go, and at jackstay with each of them as its upstream.
//!
//! The second half is the safety property: whichever of them parses what jackstay sends, the requests behind it are
//! requests that jackstay says it has forwarded. The first half is a table for people, `target/smuggling.md`.

use std::fmt::Write as _;
use std::time::Duration;

use jackstay_testkit::recorder::{Recorded, Recorder, shorten};

use crate::smuggling::client::CorpusClient;
use crate::smuggling::corpus::{self, Entry};
use crate::smuggling::peers::{NAMES, Peer};
use crate::smuggling::rig::{Jackstay, LoggedRequest, START};
use crate::smuggling::{Observation, QUIET, client_address, send_all};
use crate::support::{Certs, wait};

/// What must be the same before and behind a proxy.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Meaning {
    method: String,
    /// With its percent-encoding decoded, because Go encodes some characters anew.
    target: String,
    body: Vec<u8>,
    /// The fields of an identity. Envoy joins several fields of one name.
    identity: Vec<(String, String)>,
}

impl Meaning {
    fn of(request: &Recorded) -> Self {
        let mut identity: Vec<(String, String)> = Vec::new();
        for (name, value) in &request.fields {
            if name != "authorization"
                && !name.starts_with("impersonate-")
                && !name.starts_with("x-remote-")
            {
                continue;
            }
            match identity.iter_mut().find(|(known, _)| known == name) {
                Some((_, list)) => *list = format!("{list},{value}"),
                None => identity.push((name.clone(), value.clone())),
            }
        }
        let target = percent_encoding::percent_decode_str(&request.target);
        Self {
            method: request.method.clone(),
            target: target.decode_utf8_lossy().into_owned(),
            body: request.body.clone(),
            identity,
        }
    }
}

/// The complete requests, sorted.
fn meanings(observation: &Observation) -> Vec<Meaning> {
    let complete = observation.upstream.iter().filter(|request| request.complete);
    let mut all: Vec<_> = complete.map(Meaning::of).collect();
    all.sort();
    all
}

/// The requests behind jackstay and a peer that jackstay has not forwarded. `ours` is what jackstay alone forwards
/// of the same entry, `said` the access log.
fn not_forwarded(behind: &Observation, ours: &Observation, said: &[&LoggedRequest]) -> Vec<String> {
    let (behind, ours) = (meanings(behind), meanings(ours));
    // jackstay resets a request whose body turns out to be malformed. A peer may have taken its head, with a
    // Content-Length of 0, for the whole request.
    let was_reset = |request: &Meaning| {
        let is_failed = |line: &&&LoggedRequest| line.code != 200;
        let mut failed = said.iter().filter(is_failed);
        request.body.is_empty()
            && failed.any(|line| line.method == request.method && line.path == request.target)
    };
    let strangers = behind.iter().filter(|one| !ours.contains(one) && !was_reset(one));
    let mut found: Vec<_> = strangers.map(|one| format!("{one:?} is none of {ours:?}")).collect();
    // A safe request may be sent again.
    let attempts: u64 = said.iter().map(|line| line.attempts).sum();
    if behind.len() as u64 > attempts {
        found.push(format!("{} requests of {attempts} attempts: {behind:?}", behind.len()));
    }
    found
}

/// Sends the corpus to a server, and forgets its requests.
async fn run(client: &CorpusClient, recorder: &Recorder, entries: &[Entry]) -> Vec<Observation> {
    wait::until_ok(START, "the proxy forwards a request", async || {
        let valid = entries.iter().find(|entry| entry.name == "framing/cl-value.1").unwrap();
        match client.send(valid, client_address(60_000), Duration::from_secs(5)).await {
            Ok(text) if text.starts_with("200") => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await;
    let all = entries.iter().enumerate();
    let observed = send_all(client, &recorder.record, all, QUIET).await;
    recorder.record.clear();
    observed
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs HAProxy, nginx and Envoy (benches/setup) and Go (golang-go)"]
async fn each_peer_behind_jackstay_sees_only_requests_that_jackstay_forwarded() {
    let certs = Certs::new();
    let recorder = Recorder::start(&certs.pki).await;
    let entries = corpus::load();

    let jackstay = Jackstay::start(&certs, recorder.tls, "jackstay");
    let client = CorpusClient::new(jackstay.address, &certs);
    let ours = run(&client, &recorder, &entries).await;
    let mut broken = Vec::new();
    let mut columns = vec![("jackstay", ours.clone())];
    for name in NAMES {
        let peer = Peer::start(name, &certs, recorder.plain);
        let direct = CorpusClient::new(peer.address, &certs);
        columns.push((name, run(&direct, &recorder, &entries).await));

        let mut chained = Jackstay::start(&certs, peer.address, name);
        let client = CorpusClient::new(chained.address, &certs);
        let behind = run(&client, &recorder, &entries).await;
        assert!(chained.is_running(), "{}", chained.log());
        let log = chained.forwarded();
        for (number, entry) in entries.iter().enumerate() {
            let of_client = |line: &&LoggedRequest| line.client == client_address(number);
            let said: Vec<_> = log.iter().filter(of_client).collect();
            for problem in not_forwarded(&behind[number], &ours[number], &said) {
                broken.push(format!("{} behind {name}: {problem}", entry.name));
            }
        }
    }
    let summary = write_table(&entries, &columns);
    println!("{summary}");
    assert!(broken.is_empty(), "{} requests:\n{}", broken.len(), broken.join("\n"));
}

/// Writes the table. Returns the number of entries in which each proxy differs from jackstay.
fn write_table(entries: &[Entry], columns: &[(&str, Vec<Observation>)]) -> String {
    let ours = &columns[0].1;
    let mut summary = format!(
        "{} entries. | entries that the proxy treats otherwise than jackstay | with more requests upstream | with \
         fewer |\n|---|---|---|---|\n",
        entries.len()
    );
    for (name, observed) in &columns[1..] {
        let pairs = || observed.iter().map(meanings).zip(ours.iter().map(meanings));
        let _ = writeln!(
            summary,
            "| {name} | {} | {} | {} |",
            pairs().filter(|(theirs, ours)| theirs != ours).count(),
            pairs().filter(|(theirs, ours)| theirs.len() > ours.len()).count(),
            pairs().filter(|(theirs, ours)| theirs.len() < ours.len()).count(),
        );
    }
    let mut table = format!("{summary}\n| entry | template |");
    for (name, _) in columns {
        let _ = write!(table, " {name} |");
    }
    let _ = write!(table, "\n|---|---|{}\n", "---|".repeat(columns.len()));
    let cell = |text: &str| text.replace('|', "\\|").replace('`', "'");
    for (number, entry) in entries.iter().enumerate() {
        let _ = write!(table, "| {} | `{}` |", entry.name, cell(&shorten(&entry.text)));
        for (_, observed) in columns {
            let _ = write!(table, " `{}` |", cell(&observed[number].describe()));
        }
        table.push('\n');
    }
    let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("target/smuggling.md");
    std::fs::write(file, table).unwrap();
    summary
}
