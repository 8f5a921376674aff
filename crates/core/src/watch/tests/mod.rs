//! Tests of the watch codec, relay and session: decision tables, and property tests with random event
//! histories.

pub mod events;
mod gzip;
mod properties;
mod requests;
mod session;

use std::path::Path;

/// The corpus contains the seeds and the earlier findings of the fuzz target `watch`.
#[test]
fn splitter_and_parser_accept_the_corpus() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/corpus/watch");
    let mut files = 0;
    for entry in std::fs::read_dir(corpus).expect("tests/corpus/watch exists") {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        events::check_split_and_parse(&bytes);
        files += 1;
    }
    assert!(files > 0, "the corpus is empty");
}
