//! The planted defects must apply to the source that they change: `crates/sim/check-defects` plants those of the simulator, one
//! after the other, and `crates/core/check-defects` those of shadow watches, each alone. Neither is part of CI.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

/// A hunk of a patch: the file, the lines that it replaces, and those that it puts in their place.
#[derive(Default)]
struct Hunk<'a> {
    file: &'a str,
    before: Vec<&'a str>,
    after: Vec<&'a str>,
}

fn hunks(patch: &str) -> Vec<Hunk<'_>> {
    let mut found: Vec<Hunk<'_>> = Vec::new();
    let mut file = "";
    for line in patch.lines() {
        if line.starts_with("--- ") {
            continue;
        }
        if let Some(path) = line.strip_prefix("+++ b/") {
            file = path;
        } else if line.starts_with("@@") {
            found.push(Hunk { file, ..Hunk::default() });
        } else if let Some(hunk) = found.last_mut() {
            let text = line.get(1..).unwrap_or_default();
            if !line.starts_with('+') {
                hunk.before.push(text);
            }
            if !line.starts_with('-') {
                hunk.after.push(text);
            }
        }
    }
    found
}

/// Applies the patches of a folder one after the other, or each alone, and returns those that do not apply, with the file.
fn outdated(root: &Path, folder: &str, alone: bool) -> Vec<String> {
    let patches = fs::read_dir(root.join(folder)).unwrap();
    let mut patches: Vec<_> = patches.map(|entry| entry.unwrap().path()).collect();
    patches.sort();
    let mut sources: HashMap<String, Vec<String>> = HashMap::new();
    let mut outdated = Vec::new();
    for path in patches {
        if alone {
            sources.clear();
        }
        let patch = fs::read_to_string(&path).unwrap();
        let hunks = hunks(&patch);
        assert!(!hunks.is_empty(), "{}: no hunk", path.display());
        for Hunk { file, before, after } in hunks {
            let source = sources.entry(file.to_owned()).or_insert_with(|| {
                let text = fs::read_to_string(root.join(file)).unwrap();
                text.lines().map(str::to_owned).collect()
            });
            match source.windows(before.len()).position(|window| window == before) {
                Some(at) => {
                    let after = after.into_iter().map(str::to_owned);
                    source.splice(at..at + before.len(), after);
                }
                None => outdated.push(format!("{}: {file}", path.display())),
            }
        }
    }
    outdated
}

#[test]
fn planted_defects_apply_to_the_source() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    assert_eq!(outdated(root, "crates/sim/defects", false), [""; 0]);
    assert_eq!(outdated(root, "crates/core/defects", true), [""; 0]);
}
