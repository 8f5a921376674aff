//! Request smuggling: a corpus of ambiguous requests is sent to jackstay in front of an upstream that records what it
//! reads. The upstream must see the requests that jackstay says it has forwarded: no other request, other boundary or
//! other identity.
//!
//! `corpus/expected.txt` has the result of each entry; `JACKSTAY_WRITE_EXPECTED=1` writes it anew, for a review.

mod client;
mod comparison;
mod corpus;
mod peers;
mod properties;
mod rig;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::Ipv4Addr;
use std::time::Duration;

use futures_util::{StreamExt as _, stream};
use jackstay_testkit::recorder::{Record, Recorded, Recorder};

use crate::support::{Certs, PATIENCE, wait};
use client::CorpusClient;
use corpus::Entry;
use rig::Jackstay;

/// The time without a byte after which the server is taken to wait for more of an entry.
const QUIET: Duration = Duration::from_millis(1500);
/// [`QUIET`] for an entry that is sent again because its result was not the expected one.
const LONG_QUIET: Duration = Duration::from_secs(6);
/// The number of entries that are sent at the same time.
const CONCURRENCY: usize = 24;

/// What an entry has caused.
#[derive(Debug, Clone)]
struct Observation {
    /// The responses at the client.
    client: String,
    /// The requests at the recorder.
    upstream: Vec<Recorded>,
}

impl Observation {
    /// One line, without incomplete requests: whether their heads arrive before their resets is a matter of time.
    /// The requests are sorted, because those of one HTTP/2 connection arrive in any order.
    fn describe(&self) -> String {
        let complete = self.upstream.iter().filter(|request| request.complete);
        let mut requests: Vec<_> = complete.map(Recorded::describe).collect();
        requests.sort();
        [vec![self.client.clone()], requests].concat().join(" | ")
    }
}

/// The client address of an entry.
fn client_address(number: usize) -> Ipv4Addr {
    Ipv4Addr::new(127, 1, (number / 250) as u8, 1 + (number % 250) as u8)
}

/// Sends the numbered entries to a server.
async fn send_all(
    client: &CorpusClient,
    record: &Record,
    entries: impl Iterator<Item = (usize, &Entry)>,
    quiet: Duration,
) -> Vec<Observation> {
    let sends = entries.map(|(number, entry)| async move {
        let address = client_address(number);
        let result = client.send(entry, address, quiet).await;
        let client = result.unwrap_or_else(|error| format!("no connection: {error}"));
        Observation { client, upstream: record.of(Some(address)) }
    });
    stream::iter(sends).buffered(CONCURRENCY).collect().await
}

/// The expected results by the names of the entries.
fn expected() -> BTreeMap<String, String> {
    let text = std::fs::read_to_string(corpus::folder().join("expected.txt")).unwrap_or_default();
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines
        .filter_map(|line| line.split_once(": "))
        .map(|(name, result)| (name.to_owned(), result.to_owned()))
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn upstream_sees_exactly_the_requests_that_jackstay_forwarded() {
    let certs = Certs::new();
    let recorder = Recorder::start(&certs.pki).await;
    let mut jackstay = Jackstay::start(&certs, recorder.tls, "jackstay");
    let client = CorpusClient::new(jackstay.address, &certs);
    let entries = corpus::load();
    let record = &recorder.record;
    let mut observed = send_all(&client, record, entries.iter().enumerate(), QUIET).await;
    assert!(jackstay.is_running(), "{}", jackstay.log());

    // Access log lines are written when a response ends.
    let sent = |observed: &[Observation]| observed.iter().map(|o| o.upstream.len()).sum::<usize>();
    // A property below shows which line is missing.
    let logged = async || jackstay.forwarded().len() >= sent(&observed);
    wait::within(PATIENCE, logged).await;
    let forwarded = jackstay.forwarded();
    let mut broken = Vec::new();
    for (number, (entry, observation)) in entries.iter().zip(&observed).enumerate() {
        let client = client_address(number);
        let said: Vec<_> = forwarded.iter().filter(|line| line.client == client).collect();
        for property in properties::broken(observation, client, &said) {
            broken.push(format!("{}: {property}: {}", entry.name, observation.describe()));
        }
    }
    let mut strays = record.of(None);
    // jackstay asks what is behind its only endpoint.
    strays.retain(|request| request.target != "/api");
    assert!(strays.is_empty(), "requests of no entry: {strays:?}");
    assert!(broken.is_empty(), "{} properties broken:\n{}", broken.len(), broken.join("\n"));

    if std::env::var_os("JACKSTAY_WRITE_EXPECTED").is_some() {
        write_expected(&entries, &observed);
        return;
    }
    // On a slow machine a response may have come after `QUIET`, so a difference is checked again.
    let expected = expected();
    let differs = |entry: &Entry, observation: &Observation| {
        expected.get(&entry.name) != Some(&observation.describe())
    };
    let different: Vec<_> =
        (0..entries.len()).filter(|&at| differs(&entries[at], &observed[at])).collect();
    record.clear();
    let again = different.iter().map(|&at| (at, &entries[at]));
    let again = send_all(&client, record, again, LONG_QUIET).await;
    for (&at, observation) in different.iter().zip(again) {
        observed[at] = observation;
    }
    let different: Vec<_> = (0..entries.len())
        .filter(|&at| differs(&entries[at], &observed[at]))
        .map(|at| {
            let name = &entries[at].name;
            let expected = expected.get(name).map_or("nothing", String::as_str);
            let (text, observed) = (&entries[at].text, observed[at].describe());
            format!("{name}: expected {expected}\n  observed {observed}\n  of {text}")
        })
        .collect();
    assert!(different.is_empty(), "{} results:\n{}", different.len(), different.join("\n"));
    assert_eq!(expected.len(), entries.len(), "expected.txt has results of other entries");
    println!("{} entries, {} requests upstream", entries.len(), sent(&observed));
}

fn write_expected(entries: &[Entry], observed: &[Observation]) {
    let mut text = String::from(
        "# The result of each entry: the responses at the client, then each request at the upstream. Written by\n\
         # JACKSTAY_WRITE_EXPECTED=1 cargo test --test program smuggling::\n",
    );
    for (entry, observation) in entries.iter().zip(observed) {
        let _ = writeln!(text, "{}: {}", entry.name, observation.describe());
    }
    std::fs::write(corpus::folder().join("expected.txt"), text).unwrap();
}
