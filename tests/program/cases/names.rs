//! Names and other arguments: what stands in a certificate, and arguments that no program should panic at.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::process::{Command, Output};

use jackstay_apiserver::pki::{Pki, Subject, kubeconfig};
use jackstay_net::tls::local_ca::subject_alt_names;
use jackstay_net::tls::pem_files::valid_certificates;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer as _, X509Certificate};

/// Runs the program, which must not panic.
fn jackstay<S: AsRef<OsStr>>(dir: &tempfile::TempDir, args: &[S]) -> (Output, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_jackstay"));
    command.args(args).current_dir(dir.path()).env_clear().env("HOME", dir.path());
    let output = command.env("COLUMNS", "0").output().unwrap();
    let text = [&output.stdout[..], &output.stderr].map(String::from_utf8_lossy).concat();
    assert!(!text.contains("panicked") && output.status.code() != Some(101), "{text}");
    (output, text)
}

fn setup() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let pki = Pki::new("kubernetes").unwrap();
    let admin = pki.client(&Subject::admin()).unwrap();
    let text = kubeconfig("https://127.0.0.1:6443", &pki.ca_pem(), Some(&admin), None);
    fs::write(dir.path().join("in.kubeconfig"), text).unwrap();
    dir
}

fn terminate(dir: &tempfile::TempDir, more: &[&str]) -> (Output, String) {
    let args = [
        "kubeconfig",
        "--offline",
        "--mode",
        "terminate",
        "--kubeconfig",
        "in.kubeconfig",
        "--force",
    ];
    let files = ["--out", "out.kubeconfig", "--config-out", "js/jackstay.yaml"];
    jackstay(dir, &[&args[..], &files, more].concat())
}

/// Whether Go reads a CA with this DNS constraint (`crypto/x509`, `domainToReverseLabels`).
fn is_read_by_go(name: &str) -> bool {
    name.split('.')
        .all(|label| !label.is_empty() && label.bytes().all(|byte| (33..=126).contains(&byte)))
}

#[test]
fn node_name_is_normalised_or_refused_with_its_option() {
    let dir = setup();
    let long_label = "a".repeat(64);
    for (name, reason) in [
        ("my host", "a DNS name has no ' '"),
        ("nœud-1", "a DNS name has only ASCII characters"),
        ("node..1", "two dots follow one another"),
        (".node", "two dots follow one another, or the name begins with a dot"),
        ("", "it is empty"),
        ("*.example.com", "it is a pattern"),
        ("bob's-laptop", "a DNS name has no '\\''"),
        ("[::1]", "a DNS name has no '['"),
        ("fe80::1%eth0", "a DNS name has no ':'"),
        ("a\nb", "a DNS name has no '\\n'"),
        ("10.0.1", "it is neither an IP address nor a DNS name"),
        (long_label.as_str(), "a DNS name has at most 253 characters"),
        (&["a"; 130].join("."), "a DNS name has at most 253 characters"),
        ("-node", "neither begins nor ends with a hyphen"),
    ] {
        let (output, text) = terminate(&dir, &[&format!("--node-name={name}")]);
        assert_eq!(output.status.code(), Some(2), "{name}: {text}");
        assert!(
            text.contains(&format!("--node-name {name:?}: ")) && text.contains(reason),
            "{name}: {text}"
        );
        assert!(!dir.path().join("js").exists(), "{name}");
    }
    for (name, expected) in [
        ("node-1", "node-1"),
        ("Node-1.Example.com.", "node-1.example.com"),
        ("node_1", "node_1"),
        ("10.1.2.3", "10.1.2.3"),
        ("FD00::1", "fd00::1"),
        (&"n".repeat(63), &"n".repeat(63)),
    ] {
        let (output, text) = terminate(&dir, &["--node-name", name]);
        assert_eq!(output.status.code(), Some(0), "{name}: {text}");
        let read =
            |file: &str| valid_certificates(&fs::read(dir.path().join("js").join(file)).unwrap());
        let serving = &read("serving.pem")[0];
        assert!(
            subject_alt_names(serving).unwrap().iter().any(|found| found == expected),
            "{name}"
        );
        let ca = &read("local-ca.crt")[0];
        let (_, ca) = X509Certificate::from_der(ca).unwrap();
        let constraints =
            ca.name_constraints().unwrap().unwrap().value.permitted_subtrees.as_ref().unwrap();
        for subtree in constraints {
            if let GeneralName::DNSName(name) = &subtree.base {
                assert!(is_read_by_go(name), "{name:?}");
            }
        }
    }
}

/// Control with Go itself: kubectl loads the CA that `kubeconfig` writes. Needs kubectl.
#[test]
#[ignore = "needs kubectl"]
fn kubectl_loads_the_ca_for_each_accepted_name() {
    let dir = setup();
    for name in ["node-1", "Node-1.Example.com.", "node_1", "10.1.2.3", "fd00::1", &"n".repeat(63)]
    {
        let (output, text) = terminate(&dir, &["--node-name", name]);
        assert_eq!(output.status.code(), Some(0), "{name}: {text}");
        let kubectl = std::env::var_os("KUBECTL").unwrap_or_else(|| "kubectl".into());
        let args = [
            "--kubeconfig",
            "out.kubeconfig",
            "--request-timeout",
            "2s",
            "get",
            "--raw",
            "/version",
        ];
        let output = Command::new(kubectl).args(args).current_dir(dir.path()).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(text.contains("refused"), "nothing listens, and the CA is loaded: {name}: {text}");
    }
}

#[test]
fn arguments_that_are_not_text_or_extreme_cause_no_panic() {
    let dir = setup();
    let odd: OsString = OsStr::from_bytes(b"\xff/\xc3\x28").to_owned();
    let commands: [&[&str]; 16] = [
        &["check", "--config"],
        &["run", "--config"],
        &["kubeconfig", "--offline", "--kubeconfig"],
        &[
            "kubeconfig",
            "--offline",
            "--mode",
            "terminate",
            "--kubeconfig",
            "in.kubeconfig",
            "--out",
        ],
        &[
            "kubeconfig",
            "--offline",
            "--mode",
            "terminate",
            "--kubeconfig",
            "in.kubeconfig",
            "--ca-file",
        ],
        &[
            "kubeconfig",
            "--offline",
            "--mode",
            "terminate",
            "--kubeconfig",
            "in.kubeconfig",
            "--config-out",
        ],
        &["kubeconfig", "--offline", "--kubeconfig", "in.kubeconfig", "--local-ca"],
        &["kubeconfig", "--kubeconfig", "in.kubeconfig", "--node-name"],
        &["kubeconfig", "--kubeconfig", "in.kubeconfig", "--listen"],
        &["kubeconfig", "--kubeconfig", "in.kubeconfig", "--context"],
        &["doctor", "--kubeconfig"],
        &["status", "--admin"],
        &["probe"],
        &["completion"],
        &["install", "--dry-run", "--endpoint"],
        &[],
    ];
    for command in commands {
        let mut args: Vec<OsString> = command.iter().map(OsString::from).collect();
        args.push(odd.clone());
        let (output, text) = jackstay(&dir, &args);
        // A file name need not be UTF-8, so the files are written with it.
        let is_written = command.ends_with(&["--out"]) || command.ends_with(&["--config-out"]);
        assert!(matches!(output.status.code(), Some(0..=2)), "{command:?}: {text}");
        assert!(is_written || output.status.code() != Some(0), "{command:?}: {text}");
    }
    for args in [
        &["status", "--wait", "--timeout", "0s", "--admin", "127.0.0.1:1"][..],
        &["status", "--wait", "--timeout", "18446744073709551615s", "--admin", "127.0.0.1:1"],
        &["status", "--watch=0s", "--admin", "127.0.0.1:1"],
        &["probe", "--timeout", "0s", "--admin", "127.0.0.1:1"],
        &["probe", "--timeout", "18446744073s", "--admin", "127.0.0.1:1"],
        &["doctor", "--timeout", "999999999999h", "--kubeconfig", "in.kubeconfig"],
        &["install", "--dry-run", "--timeout", "99999999999999999999s"],
        &[
            "kubeconfig",
            "--offline",
            "--kubeconfig",
            "in.kubeconfig",
            "--listen",
            "127.0.0.1:99999",
        ],
        &[
            "kubeconfig",
            "--offline",
            "--kubeconfig",
            "in.kubeconfig",
            "--tls-server-name",
            "n\u{0153}ud\r\nx: y",
        ],
        &[
            "kubeconfig",
            "--offline",
            "--kubeconfig",
            "in.kubeconfig",
            "--endpoint",
            "\u{0153}",
            "--mode",
            "passthrough",
        ],
        &["run", "--listen", "\u{0153}", "--endpoint", "\u{1F600}"],
    ] {
        let (output, text) = jackstay(&dir, args);
        assert!(matches!(output.status.code(), Some(1..=3)), "{args:?}: {text}");
    }
}
