//! The reference tables equal the code. The metrics in `deploy/monitoring/README.md` come from
//! `observe::names`. The keys in `config/README.md` come from `config/jackstay.yaml`, which a unit test of
//! `config::load` compares with the defaults. This command writes the tables after a change:
//!
//! ```sh
//! JACKSTAY_WRITE_README=1 cargo test --test checks reference::
//! ```

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use jackstay::observe::{Metrics, names};
use jackstay_core::admission::MemoryBudget;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// One row for each metric, in the order of the code.
fn metrics() -> String {
    let mut out = String::from("| metric | type | labels | description |\n|---|---|---|---|\n");
    for spec in names::ALL {
        let labels: Vec<String> = spec.labels.iter().map(|label| format!("`{label}`")).collect();
        let (kind, labels) = (spec.kind.as_str(), labels.join(", "));
        writeln!(out, "| `{}` | {kind} | {labels} | {} |", spec.name, spec.help).unwrap();
    }
    out
}

/// A key of the example file: its path, its value and the comment beside it.
#[derive(Debug, PartialEq)]
struct Key {
    path: String,
    value: String,
    comment: String,
    /// Index of the item of its top-level list.
    item: usize,
}

/// Reads the keys of the example file. The parser supports the style of that file, not YAML in general.
fn keys(yaml: &str) -> Vec<Key> {
    let mut stack: Vec<(usize, String)> = Vec::new();
    let (mut found, mut item): (Vec<Key>, usize) = (Vec::new(), 0);
    for line in yaml.lines() {
        let (text, comment) = match line.split_once(" #") {
            Some((text, comment)) => (text, comment.trim()),
            None => (line, ""),
        };
        if text.trim().is_empty() || text.starts_with('#') {
            continue;
        }
        let mut indent = text.len() - text.trim_start().len();
        let mut text = text.trim();
        while let Some((outer, _)) = stack.last()
            && *outer >= indent
        {
            stack.pop();
        }
        if indent == 0 {
            item = 0;
        }
        if let Some(rest) = text.strip_prefix("- ") {
            if indent == 2 && found.iter().any(|key| key.path.ends_with("[].name")) {
                let list = format!("{}[].name", stack[0].1.trim_end_matches("[]"));
                item = found.iter().filter(|key| key.path == list).count();
            }
            let list = &mut stack.last_mut().expect("a list has a key").1;
            if !list.ends_with("[]") {
                list.push_str("[]");
            }
            (text, indent) = (rest.trim(), indent + 2);
            if text.starts_with('"') {
                continue; // an item of a plain list, whose key has its row
            }
        }
        let (name, value) = text.split_once(':').unwrap_or_else(|| panic!("no key in {line}"));
        let path = stack.iter().map(|(_, name)| name.as_str()).chain([name]).collect::<Vec<_>>();
        let (path, value, comment) = (path.join("."), value.trim().into(), comment.into());
        found.push(Key { path, value, comment, item });
        stack.push((indent, name.to_owned()));
    }
    found
}

/// One row for each key that has a value or a comment.
fn configuration() -> String {
    let keys = keys(&read("config/jackstay.yaml"));
    let mut out = String::from("| key | default | description |\n|---|---|---|\n");
    for (at, key) in keys.iter().enumerate() {
        let earlier = keys[..at].iter().find(|earlier| earlier.path == key.path);
        if key.comment.is_empty() && (key.value.is_empty() || earlier.is_some())
            || earlier.is_some_and(|earlier| earlier.comment == key.comment)
        {
            continue;
        }
        let mut description = key.comment.as_str();
        let mut default = match key.value.as_str() {
            "" => String::new(),
            value => format!("`{value}`"),
        };
        if let Some(rest) = description.strip_prefix("required") {
            description = rest.trim_start_matches(':').trim();
            "required".clone_into(&mut default);
        } else if let Some(rest) = description.strip_prefix("example") {
            let rest = rest.trim_start_matches(':').trim();
            let (text, value) = rest.split_once("default ").unwrap_or((rest, ""));
            let value = value.split([',', ';']).next().unwrap_or("");
            default = if value.is_empty() { String::new() } else { format!("`{value}`") };
            description = text.trim_end_matches([';', ' ']);
        }
        let mode = if key.item > 0 { "passthrough: " } else { "" };
        let description = description.replace('|', "\\|");
        writeln!(out, "| `{}` | {default} | {mode}{description} |", key.path).unwrap();
    }
    out
}

/// The README with the text between the markers of `name` replaced.
fn with_table(readme: &str, name: &str, table: &str) -> String {
    let (begin, end) = (format!("<!-- {name}: begin -->\n"), format!("<!-- {name}: end -->"));
    let (before, rest) = readme.split_once(&begin).unwrap_or_else(|| panic!("no {begin}"));
    let (_, after) = rest.split_once(&end).unwrap_or_else(|| panic!("no {end}"));
    format!("{before}{begin}{table}{end}{after}")
}

/// Compares the table `name` of a README with the code, or writes it with `JACKSTAY_WRITE_README`.
fn check_table(path: &str, name: &str, table: &str) {
    let readme = read(path);
    let wanted = with_table(&readme, name, table);
    if std::env::var_os("JACKSTAY_WRITE_README").is_some() {
        fs::write(root().join(path), wanted).unwrap_or_else(|error| panic!("{path}: {error}"));
    } else {
        let command = "JACKSTAY_WRITE_README=1 cargo test --test checks reference::";
        assert!(readme == wanted, "{path} differs from the code; run: {command}");
    }
}

#[test]
fn metrics_table_equals_the_code() {
    check_table("deploy/monitoring/README.md", "metrics", &metrics());
}

#[test]
fn configuration_table_equals_the_example_file() {
    check_table("config/README.md", "configuration", &configuration());
}

#[test]
fn top_readme_has_fewer_than_200_lines() {
    let lines = read("README.md").lines().count();
    assert!(
        lines < 200,
        "README.md has {lines} lines; references belong in the READMEs of the folders"
    );
}

#[test]
fn keys_have_path_value_comment_and_item() {
    let text = "# head\na: 1   # one\nlist:\n  - name: x   # a name\n    of:\n      - \"v # w\"\n    \
                in: { y: 2 }\n  - name: z # other\n    new: 3\n";
    let keys = keys(text);
    let flat = keys.iter().map(|k| (&*k.path, &*k.value, &*k.comment, k.item));
    assert_eq!(
        flat.collect::<Vec<_>>(),
        [
            ("a", "1", "one", 0),
            ("list", "", "", 0),
            ("list[].name", "x", "a name", 0),
            ("list[].of", "", "", 0),
            ("list[].in", "{ y: 2 }", "", 0),
            ("list[].name", "z", "other", 1),
            ("list[].new", "3", "", 1),
        ]
    );
    let table = configuration();
    for key in [
        "`admin.bind`",
        "`upstreams[].health.readyz.interval` | `10s`",
        "`listeners[].name` | required",
    ] {
        assert!(table.contains(key), "no {key} in\n{table}");
    }
}

/// Files that query metrics: scrape configuration, alerts, dashboard.
fn queries() -> Vec<PathBuf> {
    let folder = root().join("deploy/monitoring");
    let files = fs::read_dir(&folder).expect("deploy/monitoring").map(|file| file.unwrap().path());
    let is_query = |path: &PathBuf| path.extension().is_some_and(|end| end != "md");
    let mut files: Vec<_> = files.filter(is_query).collect();
    files.sort();
    files
}

/// The metrics of jackstay in `text`, each with the labels of its selector.
fn metrics_in(text: &str) -> Vec<(String, Vec<(String, String)>)> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut found = Vec::new();
    for (at, _) in text.match_indices("jackstay_") {
        if text[..at].ends_with(is_name) {
            continue;
        }
        let name: String = text[at..].chars().take_while(|c| is_name(*c)).collect();
        let rest = &text[at + name.len()..];
        let selector = rest.strip_prefix('{').and_then(|rest| rest.split_once('}'));
        let labels = selector.map_or("", |(labels, _)| labels).replace('\\', "");
        let pairs = labels.split(',').filter_map(|pair| {
            let (key, rest) = pair.split_at(pair.find(['=', '!'])?);
            let value = rest.trim_start_matches(['=', '!', '~']).trim_matches(['"', ' ']);
            Some((key.trim().to_owned(), value.to_owned()))
        });
        found.push((name, pairs.collect()));
    }
    found
}

#[test]
fn dashboard_and_alerts_name_existing_metrics_and_labels() {
    let files = queries();
    assert!(files.len() >= 3, "scrape, alerts and dashboard: {files:?}");
    let mut wrong = Vec::new();
    let mut query_count = 0;
    for file in files {
        let (text, file) = (fs::read_to_string(&file).unwrap(), file.display());
        for (name, labels) in metrics_in(&text) {
            query_count += 1;
            let spec = names::ALL.iter().find(|spec| {
                let suffixes: &[&str] = match spec.kind {
                    names::MetricKind::Histogram => &["_bucket", "_sum", "_count"],
                    names::MetricKind::Counter | names::MetricKind::Gauge => &[""],
                };
                suffixes.iter().any(|suffix| name.strip_prefix(spec.name) == Some(suffix))
            });
            let Some(spec) = spec else {
                wrong.push(format!("{file}: no metric `{name}`"));
                continue;
            };
            for (key, value) in labels {
                // Prometheus adds these when it scrapes.
                if !spec.labels.contains(&key.as_str()) && !["job", "instance"].contains(&&*key) {
                    wrong.push(format!("{file}: {name} has no label `{key}`"));
                }
                let states: &[&str] = match (spec.name, &*key) {
                    ("jackstay_endpoint_state", "state") => &names::ENDPOINT_STATES,
                    ("jackstay_connections", "state") => &names::CONNECTION_STATES,
                    (_, "verb") => &names::VERBS,
                    _ => continue,
                };
                for value in value.split('|').filter(|value| !states.contains(value)) {
                    wrong.push(format!("{file}: {name} is never {key}=\"{value}\""));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(query_count > 30, "only {query_count} queries found: the parser misses some");
}

#[test]
fn metrics_in_query_have_their_labels() {
    let text =
        r#"sum by (le) (rate(jackstay_x_bucket{a="b",c!~\"d|e\"}[5m])) / my_jackstay_y jackstay_z"#;
    let found = metrics_in(text);
    let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
    assert_eq!(found[0], ("jackstay_x_bucket".into(), vec![pair("a", "b"), pair("c", "d|e")]));
    assert_eq!(found[1], ("jackstay_z".into(), vec![]));
    assert_eq!(found.len(), 2);
}

/// A counter that begins with its first event has no increase then, so an alert on it would miss that event.
#[test]
fn counters_whose_increase_an_alert_queries_begin_with_zero() {
    let metrics = Metrics::new();
    metrics.upstream_configured("u");
    metrics.endpoint("u", "e");
    metrics.discovery_expected("u", "dns");
    metrics.show_memory(&MemoryBudget::new(1 << 20));
    let page = metrics.render();
    let alerts = read("deploy/monitoring/alerts.yaml");
    let mut count = 0;
    for (at, call) in alerts.match_indices("increase(") {
        let (name, labels) = metrics_in(&alerts[at + call.len()..]).swap_remove(0);
        let begins = page.lines().any(|line| {
            let has_labels = labels.iter().all(|(key, value)| {
                value.split('|').any(|value| line.contains(&format!("{key}=\"{value}\"")))
            });
            line.starts_with(&format!("{name}{{")) && has_labels && line.ends_with("} 0")
        });
        assert!(begins, "{name} {labels:?} has no series before its first event:\n{page}");
        count += 1;
    }
    assert!(count >= 7, "only {count} increases found: the parser misses some");
    // A rate is compared with another one: what goes on is seen at the second scrape.
    for (at, call) in alerts.match_indices("rate(") {
        let (name, _) = metrics_in(&alerts[at + call.len()..]).swap_remove(0);
        let known = ["jackstay_requests_total", "jackstay_ping_rtt_seconds_bucket"];
        assert!(known.contains(&&*name), "rate of {name}: does it miss the first event?");
    }
}
