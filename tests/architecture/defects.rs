//! The planted defects of the simulator must apply to the source that they change: `crates/sim/check-defects` plants
//! them, and is no part of CI.

use std::fs;
use std::path::Path;

/// The hunks of a patch: the file, and the lines that it must have one after the other.
fn hunks(patch: &str) -> Vec<(&str, Vec<&str>)> {
    let mut found: Vec<(&str, Vec<&str>)> = Vec::new();
    let mut file = "";
    for line in patch.lines() {
        if line.starts_with("--- ") {
            continue;
        }
        if let Some(path) = line.strip_prefix("+++ b/") {
            file = path;
        } else if line.starts_with("@@") {
            found.push((file, Vec::new()));
        } else if !line.starts_with('+')
            && let Some((_, lines)) = found.last_mut()
        {
            lines.push(line.get(1..).unwrap_or_default());
        }
    }
    found
}

/// The patches that do not apply, with the file.
fn outdated(root: &Path) -> Vec<String> {
    let patches = fs::read_dir(root.join("crates/sim/defects")).unwrap();
    let mut outdated = Vec::new();
    for path in patches.map(|entry| entry.unwrap().path()) {
        let patch = fs::read_to_string(&path).unwrap();
        let hunks = hunks(&patch);
        assert!(!hunks.is_empty(), "{}: no hunk", path.display());
        for (file, lines) in hunks {
            let source = fs::read_to_string(root.join(file)).unwrap();
            let source: Vec<&str> = source.lines().collect();
            if !source.windows(lines.len()).any(|window| window == lines) {
                outdated.push(format!("{}: {file}", path.display()));
            }
        }
    }
    outdated
}

#[test]
fn planted_defects_apply_to_the_source() {
    assert_eq!(outdated(Path::new(env!("CARGO_MANIFEST_DIR"))), [""; 0]);
}
