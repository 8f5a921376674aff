//! Tests of codec, relay and session together: tables, and properties over random histories.

pub(crate) mod model;
mod properties;
mod requests;
mod session;

use std::path::Path;

/// Every input in the corpus was found by fuzzing or in a real cluster.
#[test]
fn splitter_and_parser_accept_the_corpus() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/watch");
    let mut files = 0;
    for entry in std::fs::read_dir(folder).expect("tests/corpus/watch exists") {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        model::digest(&bytes);
        files += 1;
    }
    assert!(files > 0);
}
