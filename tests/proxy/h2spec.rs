//! HTTP/2 conformance of an L7 listener: runs h2spec, all strict cases included, against jackstay over TLS.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use crate::support::{CONFIGMAPS, TestCluster};

/// The number of cases of h2spec with `--strict`.
const CASES: usize = 147;

/// The cases that may fail, each with the reason. Every other case passes.
const DEVIATIONS: &[(&str, &str)] = &[];

/// The result of one case.
#[derive(Debug, PartialEq)]
enum Verdict {
    Passed,
    Skipped,
    Failed(String),
}

/// The value of an attribute in an XML tag, without its entities decoded.
fn attribute<'a>(tag: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = tag.split_once(&format!(" {name}=\""))?;
    rest.split_once('"').map(|(value, _)| value)
}

/// The verdict of each case in a `JUnit` report. A case is named by its section and its description.
fn parse_report(report: &str) -> BTreeMap<String, Verdict> {
    let mut verdicts = BTreeMap::new();
    for case in report.split("<testcase ").skip(1) {
        let (tag, rest) = case.split_once('>').expect("a complete tag");
        let tag = format!(" {tag}");
        let package = attribute(&tag, "package").expect("a package");
        let title = attribute(&tag, "classname").expect("a class name");
        let content = rest.split("</testcase>").next().unwrap();
        let verdict = if tag.ends_with('/') || content.trim().is_empty() {
            Verdict::Passed
        } else if content.contains("<skipped") {
            Verdict::Skipped
        } else {
            Verdict::Failed(content.trim().to_owned())
        };
        let previous = verdicts.insert(format!("{package}: {title}"), verdict);
        assert!(previous.is_none(), "two cases {package}: {title}");
    }
    verdicts
}

#[test]
fn parse_report_distinguishes_passed_failed_and_skipped() {
    let report = r#"<testsuites><testsuite name="a" tests="3">
        <testcase package="http2/3.5" classname="Sends a preface" time="0.1"></testcase>
        <testcase package="http2/4.1" classname="Sends a frame" time="0.1">
            <error>GOAWAY Frame (Error Code: PROTOCOL_ERROR)</error></testcase>
        <testcase package="http2/4.2" classname="Skips" time="0"><skipped></skipped></testcase>
    </testsuite></testsuites>"#;
    let verdicts = parse_report(report);
    assert_eq!(verdicts.len(), 3);
    assert_eq!(verdicts["http2/3.5: Sends a preface"], Verdict::Passed);
    assert!(
        matches!(&verdicts["http2/4.1: Sends a frame"], Verdict::Failed(why) if why.contains("GOAWAY"))
    );
    assert_eq!(verdicts["http2/4.2: Skips"], Verdict::Skipped);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs JACKSTAY_H2SPEC, the path of h2spec (https://github.com/summerwind/h2spec/releases)"]
async fn h2spec_passes_with_listed_deviations() {
    let program = std::env::var("JACKSTAY_H2SPEC").expect(
        "set JACKSTAY_H2SPEC to the h2spec binary (https://github.com/summerwind/h2spec/releases)",
    );
    let cluster = TestCluster::new(2);
    let proxy = cluster.start().await;
    let file = cluster.certs.path().join("report.xml");
    let port = proxy.addr.port().to_string();
    let report = file.clone();
    let output = tokio::task::spawn_blocking(move || run(&program, &port, &report));
    let output = output.await.unwrap();
    let report = std::fs::read_to_string(&file)
        .unwrap_or_else(|error| panic!("h2spec wrote no report: {error}\n{output}"));
    let verdicts = parse_report(&report);

    let mut unexpected = Vec::new();
    for (case, verdict) in &verdicts {
        let expected = DEVIATIONS.iter().any(|(deviation, _)| deviation == case);
        match verdict {
            Verdict::Passed if expected => unexpected.push(format!("{case}: passes now")),
            Verdict::Failed(why) if !expected => unexpected.push(format!("{case}: {why}")),
            Verdict::Skipped => unexpected.push(format!("{case}: skipped")),
            Verdict::Passed | Verdict::Failed(_) => {}
        }
    }
    assert!(unexpected.is_empty(), "{}", unexpected.join("\n"));
    assert_eq!(verdicts.len(), CASES, "h2spec has other cases than before");
    let failed = verdicts.values().filter(|verdict| matches!(verdict, Verdict::Failed(_))).count();
    assert_eq!(failed, DEVIATIONS.len(), "a listed deviation is not a case of h2spec");
    println!("h2spec: {} of {CASES} cases pass", CASES - failed);

    let client = proxy.client().await;
    assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 200);
}

/// Runs h2spec against a port of the loopback address. Returns its output.
fn run(program: &str, port: &str, report: &Path) -> String {
    let output = Command::new(program)
        .args(["--tls", "--insecure", "--strict", "--host", "127.0.0.1", "--port", port])
        // An anonymous client may read `/version`.
        .args(["--path", "/version", "--timeout", "3", "--junit-report"])
        .arg(report)
        .output()
        .unwrap_or_else(|error| panic!("{program}: {error}"));
    String::from_utf8_lossy(&output.stdout).into_owned()
}
