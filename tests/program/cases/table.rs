//! Checks that each row of `config/compatibility.md` names a test that exists.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Adds the names of the functions in the Rust files below `folder`.
fn functions(folder: &Path, names: &mut BTreeSet<String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            functions(&path, names);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).unwrap();
            let of_line = |line: &str| {
                let rest = line.trim_start().trim_start_matches("async ").strip_prefix("fn ")?;
                Some(rest.split(['(', '<']).next()?.to_owned())
            };
            names.extend(text.lines().filter_map(of_line));
        }
    }
}

/// The rows of the tables, with the names in backticks in their last column.
fn rows(page: &str) -> impl Iterator<Item = (&str, Vec<&str>)> {
    let is_row = |line: &&str| line.starts_with("| ") && !line.starts_with("| input |");
    page.lines().filter(is_row).map(|row| {
        let last = row.trim_end_matches([' ', '|']).rsplit(" | ").next().unwrap_or("");
        let quoted = last.split('`').skip(1).step_by(2);
        (row, quoted.filter_map(|name| name.rsplit("::").next()).collect())
    })
}

#[test]
fn each_row_names_a_test_that_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut names = BTreeSet::new();
    for folder in ["src", "crates", "tests"] {
        functions(&root.join(folder), &mut names);
    }
    let page = fs::read_to_string(root.join("config/compatibility.md")).unwrap();
    let wrong: Vec<_> = rows(&page)
        .filter(|(_, tests)| tests.is_empty() || !tests.iter().all(|test| names.contains(*test)))
        .collect();
    assert!(wrong.is_empty(), "rows without a test: {wrong:#?}");
}
