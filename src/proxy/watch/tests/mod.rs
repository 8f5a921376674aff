//! Watches as a whole: the tables, and properties over random histories, cuts and losses.

pub(crate) mod model;
mod properties;
mod requests;
mod session;

use std::path::Path;

/// Everything the corpus has ever taught us goes through the splitter and the parsers again.
#[test]
fn the_corpus_is_digested() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/watch");
    let mut files = 0;
    for entry in std::fs::read_dir(folder).expect("the corpus is in the repository") {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        model::digest(&bytes);
        files += 1;
    }
    assert!(files > 0);
}
