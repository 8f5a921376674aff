//! What the built binary says of itself: version, completions, manual, and useful errors.

use std::process::{Command, Output};

fn jackstay(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_jackstay")).args(args).output().expect("it starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

/// Every command that `--help` shows.
fn commands() -> Vec<String> {
    let help = text(&jackstay(&["--help"]).stdout);
    let (_, list) = help.split_once("Commands:\n").expect("a list of commands");
    let lines = list.lines().take_while(|line| !line.is_empty());
    let names = lines.filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    names.map(|line| line.split_whitespace().next().expect("a name").to_owned()).collect()
}

#[test]
fn the_version_says_which_build_it_is() {
    let out = text(&jackstay(&["--version"]).stdout);
    let rest = out.strip_prefix(concat!("jackstay ", env!("CARGO_PKG_VERSION"), " ("));
    let build = rest.and_then(|rest| rest.strip_suffix(")\n")).expect(&out);
    let hex = build.len() == 12 && build.bytes().all(|b| b.is_ascii_hexdigit());
    assert!(hex || ["debug build", "unknown commit"].contains(&build), "{out}");
}

#[test]
fn completions_and_manual_know_every_command() {
    let commands = commands();
    assert!(commands.contains(&"run".to_owned()) && commands.len() >= 6, "{commands:?}");
    for shell in ["bash", "zsh", "fish"] {
        let out = jackstay(&["completions", shell]);
        assert!(out.status.success());
        let script = text(&out.stdout);
        for command in &commands {
            assert!(script.contains(command.as_str()), "{shell} does not know {command}");
        }
    }
    let page = text(&jackstay(&["man"]).stdout);
    assert!(page.contains(".TH jackstay 1"), "{page}");

    let dir = tempfile::tempdir().expect("a directory");
    let out = jackstay(&["man", "--out", dir.path().to_str().expect("UTF-8")]);
    assert!(out.status.success(), "{}", text(&out.stderr));
    for command in commands.iter().filter(|command| *command != "help") {
        let file = dir.path().join(format!("jackstay-{command}.1"));
        assert!(file.is_file(), "no {}", file.display());
    }
    let out = jackstay(&["man", "--out", "/does/not/exist"]);
    assert_eq!(out.status.code(), Some(1));
    assert!(text(&out.stderr).contains("/does/not/exist"), "{}", text(&out.stderr));
}

#[test]
fn a_file_or_two_flags() {
    for args in [
        &["run"][..],
        &["run", "--listen", "127.0.0.1:0"],
        &["run", "--upstream", "10.0.0.1:6443"],
        &["run", "--config", "f", "--listen", "127.0.0.1:0", "--upstream", "10.0.0.1:6443"],
    ] {
        let out = jackstay(args);
        assert_eq!(out.status.code(), Some(2), "{args:?}");
        assert!(text(&out.stderr).contains("Usage: jackstay run"), "{}", text(&out.stderr));
    }
    let out = jackstay(&["run", "--listen", "nowhere", "--upstream", "10.0.0.1:6443"]);
    assert_eq!(out.status.code(), Some(2));
    let said = text(&out.stderr);
    assert!(said.starts_with("command line: --listen[0]: \"nowhere\" has no port"), "{said}");
}

#[test]
fn status_of_nothing_says_what_to_do() {
    let port = {
        let free = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        free.local_addr().expect("an address").to_string()
    };
    let out = jackstay(&["status", "--admin", &port]);
    assert_eq!(out.status.code(), Some(1));
    let error = text(&out.stderr);
    assert!(error.contains(&format!("nothing listens on {port}")), "{error}");
    assert_eq!((error.lines().count(), out.stdout.len()), (1, 0), "{error}");
    assert_eq!(jackstay(&["status", "--watch=1ms"]).status.code(), Some(2));
    assert_eq!(jackstay(&["status", "--output", "xml"]).status.code(), Some(2));
}
