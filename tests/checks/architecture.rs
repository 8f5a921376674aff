//! Rules of the source tree that the compiler does not check: allowed imports between modules, no import circle between
//! files, links of the architecture page, length of files, a module comment in each file, no fixed waits in tests, no
//! duplicate keys in JSON literals.

mod calls;
mod defects;
mod imports;

use std::fs;
use std::path::{Path, PathBuf};

/// A package whose modules import each other in one direction, which Cargo does not check.
struct LayeredPackage {
    /// Its source folder.
    folder: &'static str,
    /// For each top-level module, the other modules that it may import.
    may_import: &'static [(&'static str, &'static [&'static str])],
}

const LAYERED: [LayeredPackage; 2] = [
    LayeredPackage {
        folder: "src",
        may_import: &[
            ("observe", &[]),
            ("upstream", &["observe"]),
            ("admin", &["upstream", "observe"]),
            ("proxy", &["upstream", "observe"]),
            ("control", &["upstream", "observe"]),
            ("app", &["admin", "proxy", "control", "upstream", "observe"]),
            // The demo runs a complete jackstay in front of its apiservers.
            ("demo", &["app", "observe"]),
            ("cli", &["app", "demo", "observe"]),
        ],
    },
    LayeredPackage {
        folder: "crates/operator/src",
        may_import: &[
            ("options", &[]),
            ("admin_client", &[]),
            ("systemd", &[]),
            ("kubeconfig", &[]),
            ("doctor", &["kubeconfig"]),
            ("install", &["kubeconfig", "systemd"]),
            (
                "commands",
                &["options", "admin_client", "systemd", "kubeconfig", "doctor", "install"],
            ),
        ],
    },
];

/// The tools of operators, which only the command line of the program may import.
const TOOLS: &str = "jackstay_operator";

/// Maximum number of lines of a file without its tests.
const MAX_LINES: usize = 700;

/// The source folders of the packages, the program's first.
fn roots() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let crates = fs::read_dir(root.join("crates")).unwrap();
    let mut roots: Vec<_> = crates.map(|entry| entry.unwrap().path().join("src")).collect();
    roots.sort();
    roots.insert(0, root.join("src"));
    roots
}

/// Top-level module, path and text of every file below a source folder.
fn sources_of(root: &Path) -> Vec<(String, PathBuf, String)> {
    files(root)
        .into_iter()
        .map(|path| {
            let inside = path.strip_prefix(root).unwrap();
            let module = inside.iter().next().unwrap().to_str().unwrap().trim_end_matches(".rs");
            let text = fs::read_to_string(&path).unwrap();
            (module.to_owned(), path, text)
        })
        .collect()
}

/// [`sources_of`] all packages.
fn sources() -> Vec<(String, PathBuf, String)> {
    roots().iter().flat_map(|root| sources_of(root)).collect()
}

/// The Rust files below a folder.
fn files(root: &Path) -> Vec<PathBuf> {
    fn walk(dir: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, found);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                found.push(path);
            }
        }
    }
    let mut found = Vec::new();
    walk(root, &mut found);
    found
}

fn is_test(path: &Path) -> bool {
    path.iter().any(|part| part.to_str().is_some_and(|part| part.contains("tests")))
}

/// The imports of all files of a package but `main.rs` and those of tests.
fn imports(root: &Path) -> imports::Imports {
    let sources = sources_of(root);
    let sources = sources.iter().filter(|(module, path, _)| module != "main" && !is_test(path));
    let files = sources.map(|(_, path, text)| (path.strip_prefix(root).unwrap(), text.as_str()));
    imports::Imports::read(files)
}

/// The imports of a package that its rule does not allow.
fn forbidden_imports(package: &LayeredPackage) -> Vec<String> {
    let LayeredPackage { folder, may_import } = package;
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
    let mut broken = Vec::new();
    for (module, path, text) in sources_of(&root) {
        let Some((_, allowed)) = may_import.iter().find(|(name, _)| *name == module) else {
            assert!(["lib", "main"].contains(&module.as_str()), "no rule for `{folder}/{module}`");
            continue;
        };
        let code = text.split("\n#[cfg(test)]\nmod ").next().unwrap();
        for line in code.lines().filter(|line| !line.trim_start().starts_with("//")) {
            for (at, _) in line.match_indices("crate::") {
                let target: String = line[at + "crate::".len()..]
                    .chars()
                    .take_while(|c| c.is_alphanumeric() || *c == '_')
                    .collect();
                let known = may_import.iter().any(|(name, _)| *name == target);
                if known && target != module && !allowed.contains(&target.as_str()) {
                    broken.push(format!("{}: {module} imports {target}", path.display()));
                }
            }
        }
    }
    // The lines above are searched for `crate::`. The syntax tree also has paths with `super` and imports in braces.
    for (file, targets) in imports(&root).top_level() {
        let module = file.split('/').next().unwrap().trim_end_matches(".rs");
        let rule = may_import.iter().find(|(name, _)| *name == module);
        let Some((_, allowed)) = rule else { continue };
        for target in targets {
            let known = may_import.iter().any(|(name, _)| *name == target);
            if known && target != module && !allowed.contains(&target.as_str()) {
                broken.push(format!("{folder}/{file}: {module} imports {target}"));
            }
        }
    }
    broken
}

#[test]
fn modules_import_only_allowed_modules() {
    let broken: Vec<_> = LAYERED.iter().flat_map(forbidden_imports).collect();
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

/// The package of the data plane depends on the tools, because its command line calls them.
#[test]
fn only_the_command_line_imports_the_tools_of_operators() {
    let is_import = |line: &str| line.contains(TOOLS) && !line.trim_start().starts_with("//");
    let importing: Vec<_> = sources_of(&roots()[0])
        .into_iter()
        .filter(|(module, _, text)| module != "cli" && text.lines().any(is_import))
        .map(|(_, path, _)| path)
        .collect();
    assert_eq!(importing, [""; 0].map(PathBuf::from), "{TOOLS} is for src/cli");
}

#[test]
fn each_file_has_a_module_comment_and_at_most_700_lines() {
    let mut long = Vec::new();
    for (_, path, text) in sources() {
        if is_test(&path) {
            continue;
        }
        assert!(text.starts_with("//! "), "{} has no module comment", path.display());
        let code = text.split("\n#[cfg(test)]\nmod ").next().unwrap();
        let lines = code.lines().count();
        if lines > MAX_LINES {
            long.push(format!("{} has {lines} lines", path.display()));
        }
    }
    assert_eq!(long, [""; 0], "at most {MAX_LINES}");
}

#[test]
fn file_imports_have_no_circle() {
    for root in roots() {
        let circles = imports(&root).circles();
        assert!(circles.is_empty(), "{}: {circles:#?}", root.display());
    }
}

/// The links of a page, as paths from the root of the repository. `folder` has the page.
fn links(page: &str, folder: &str) -> Vec<String> {
    let links =
        page.match_indices("](").map(|(at, _)| page[at + 2..].split([')', '#']).next().unwrap());
    links
        .map(|link| link.strip_prefix("../").map_or(format!("{folder}/{link}"), str::to_owned))
        .collect()
}

/// A reader follows a path through the files of its section. Each of them is called by one that is listed before it, so
/// that none is left out between them.
#[test]
fn architecture_page_links_exist_and_paths_are_short_and_connected() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = fs::read_to_string(root.join("src/README.md")).unwrap();
    for link in links(&page, "src") {
        assert!(root.join(&link).is_file(), "src/README.md links to {link}");
    }
    let sources = sources();
    let files = sources
        .iter()
        .filter(|(_, path, _)| !is_test(path))
        .map(|(_, path, text)| (path.strip_prefix(root).unwrap().to_str().unwrap(), text.as_str()));
    let calls = calls::Calls::read(files);
    for (heading, limit) in [
        ("## The path of a request\n", 12),
        ("## The path of a resumed watch\n", 11),
        ("## The path of a flow (L4)\n", 6),
        ("## The path of an endpoint update\n", 8),
    ] {
        let section = page.split(heading).nth(1).unwrap_or_else(|| panic!("no {heading}"));
        let section = section.split("\n## ").next().unwrap().split("\n\nBeside ").next().unwrap();
        let path = links(section, "src");
        assert!((2..=limit).contains(&path.len()), "{heading} has {} files", path.len());
        for (at, file) in path.iter().enumerate().skip(1) {
            let is_called = path[..at].iter().any(|before| calls.between(before, file));
            assert!(is_called, "{heading}: no file before {file} calls it");
        }
    }
}

/// The test code of a source file.
fn tests_of<'a>(path: &Path, text: &'a str) -> &'a str {
    if is_test(path) {
        return text;
    }
    text.split_once("\n#[cfg(test)]\nmod ").map_or("", |(_, tests)| tests)
}

fn calls_sleep(text: &str) -> bool {
    text.lines().any(|line| line.split("//").next().unwrap().contains("sleep("))
}

/// A fixed wait is too short on a slow machine and too long on a fast one, so tests wait for conditions
/// (`jackstay_testkit::wait`) or run on a paused clock.
#[test]
fn tests_do_not_wait_for_a_fixed_time() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let mut wrong: Vec<_> = files(&root)
        .into_iter()
        .filter(|path| !path.ends_with("checks/architecture.rs"))
        .filter(|path| calls_sleep(&fs::read_to_string(path).unwrap()))
        .collect();
    for (_, path, text) in sources() {
        let tests = tests_of(&path, &text);
        if calls_sleep(tests)
            && (!text.contains("start_paused") || tests.contains("thread::sleep("))
        {
            wrong.push(path);
        }
    }
    assert_eq!(wrong, [""; 0].map(PathBuf::from), "use jackstay_testkit::wait");
}

/// Only tests with real sockets or threads may run in real time. All other tests pause the clock.
#[test]
fn unit_tests_without_sockets_and_threads_pause_the_clock() {
    const REAL_TIME: [&str; 7] = [
        "TcpStream",
        "TcpListener",
        "UdpSocket",
        "UnixListener",
        "UnixStream",
        "name_server",
        "thread::",
    ];
    for (_, path, text) in sources() {
        let tests = tests_of(&path, &text);
        if tests.contains("#[tokio::test]") {
            let real = REAL_TIME.iter().any(|name| tests.contains(name));
            assert!(real, "{}: #[tokio::test(start_paused = true)]", path.display());
        }
    }
}

/// Keys that appear twice in one object of a `json!`, of which `serde_json` silently keeps the last value.
fn duplicate_keys(text: &str) -> Vec<String> {
    let is_comment = |line: &&str| line.trim_start().starts_with("//");
    let code = text.lines().filter(|line| !is_comment(line)).collect::<Vec<_>>().join("\n");
    let mut duplicates = Vec::new();
    for (at, name) in code.match_indices("json!(") {
        let mut rest = &code[at + name.len()..];
        let (mut open, mut objects) = (1, Vec::<Vec<&str>>::new());
        while let Some(next) = rest.find(['"', '(', ')', '{', '}']).filter(|_| open > 0) {
            let (found, after) = (rest.as_bytes()[next], &rest[next + 1..]);
            rest = after;
            match found {
                b'(' => open += 1,
                b')' => open -= 1,
                b'{' => objects.push(Vec::new()),
                b'}' => drop(objects.pop()),
                _ => {
                    let escaped = |end: usize| after[..end].ends_with('\\');
                    let end = after.match_indices('"').map(|(end, _)| end).find(|e| !escaped(*e));
                    let (text, after) = after.split_at(end.expect("a string ends"));
                    rest = &after[1..];
                    let is_key = rest.trim_start().starts_with(':');
                    if let Some(keys) = objects.last_mut().filter(|_| is_key) {
                        if keys.contains(&text) {
                            duplicates.push(text.to_owned());
                        }
                        keys.push(text);
                    }
                }
            }
        }
    }
    duplicates
}

#[test]
fn json_literals_have_no_duplicate_key() {
    let source = r#"f(json!({ "a": "b", "b": { "a": [{ "c": ")" }, { "c": 1 }] }, "a": 2 }), "a")"#;
    assert_eq!(duplicate_keys(source), ["a"]);
    for (_, path, text) in sources() {
        assert_eq!(duplicate_keys(&text), [""; 0], "{}", path.display());
    }
}
