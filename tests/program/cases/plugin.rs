//! `kubectl jackstay` in the shell: kubectl asks `kubectl_complete-jackstay` for completions.

use std::os::unix::fs::symlink;
use std::process::Command;

/// Needs kubectl 1.26 or later.
#[test]
#[ignore = "needs kubectl"]
fn kubectl_completes_commands_options_and_values_of_the_plugin() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["kubectl-jackstay", "kubectl_complete-jackstay"] {
        symlink(env!("CARGO_BIN_EXE_jackstay"), dir.path().join(name)).unwrap();
    }
    let kubectl = std::env::var_os("KUBECTL").unwrap_or_else(|| "kubectl".into());
    let complete = |words: &[&str]| {
        let mut command = Command::new(&kubectl);
        command.args(["__complete", "jackstay"]).args(words).env("PATH", dir.path());
        let output = command.env("HOME", dir.path()).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let mut lines: Vec<_> = text.lines().map(str::to_owned).collect();
        let directive = lines.pop().unwrap_or_default();
        let words = lines.iter().map(|line| line.split('\t').next().unwrap_or(line).to_owned());
        (words.collect::<Vec<_>>(), directive)
    };
    let (commands, directive) = complete(&[""]);
    for command in ["run", "check", "doctor", "status", "completion"] {
        assert!(commands.contains(&command.to_owned()), "{command}: {commands:?}");
    }
    assert!(!commands.contains(&"launcher".to_owned()), "{commands:?}");
    assert_eq!(directive, ":4");
    for (words, expected, directive) in [
        (&["stat"][..], &["status"][..], ":4"),
        (&["status", "--wa"], &["--watch", "--wait"], ":4"),
        (&["status", "-o", ""], &["text", "json", "yaml"], ":4"),
        (&["status", "--output=j"], &["json"], ":4"),
        (&["probe", "--admin", "127.0.0.1:1", "r"], &["readyz"], ":4"),
        (&["completions", "z"], &["zsh"], ":4"),
        // The shell offers files.
        (&["check", "--config", ""], &[], ":0"),
    ] {
        let (found, got) = complete(words);
        assert_eq!(
            (found, got.as_str()),
            (expected.iter().map(ToString::to_string).collect(), directive),
            "{words:?}"
        );
    }
}
