//! `jackstay demo`: its report, its exit code and the removal of its files.

use crate::support::wait;
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// The demo command, with its own temporary directory.
fn demo(home: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_jackstay"));
    command.arg("demo").args(args).env("TMPDIR", home);
    command
}

fn files_in(home: &Path) -> Vec<PathBuf> {
    home.read_dir().unwrap().map(|entry| entry.unwrap().path()).collect()
}

#[test]
fn demo_with_faults_succeeds_and_removes_its_files() {
    let home = tempfile::tempdir().unwrap();
    let log = tempfile::NamedTempFile::new().unwrap();
    let log_path = log.path().to_str().unwrap();
    let args = ["--faults", "2", "--seconds", "1", "--log", log_path];
    let output = demo(home.path(), &args).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    println!("{text}");
    assert!(output.status.success(), "{text}\n{errors}");
    assert_eq!(errors, "", "standard error is empty");
    assert!(text.contains("Every promise held"), "{text}");
    assert!(!text.contains('\x1b'), "no escape codes without a terminal");
    assert_eq!(text.lines().filter(|line| line.starts_with("ok ")).count(), 3, "{text}");
    assert!(text.lines().all(|line| line.chars().count() < 80 || line.contains("kubeconfig")));
    assert!(text.contains("jackstay: 1 connection to"), "the report has events of jackstay");
    assert!(std::fs::read_to_string(log.path()).unwrap().contains("listening"), "the log is kept");

    assert_eq!(files_in(home.path()), [] as [PathBuf; 0]);
    let admin = text.split("http://").nth(1).and_then(|rest| rest.split('/').next()).unwrap();
    let admin: SocketAddr = admin.parse().unwrap();
    assert!(TcpStream::connect(admin).is_err(), "the ports are closed");
}

#[test]
fn demo_output_json_has_the_figures_of_each_scenario() {
    let home = tempfile::tempdir().unwrap();
    let args = ["--faults", "1", "--seconds", "1", "-o", "json"];
    let output = demo(home.path(), &args).output().unwrap();
    let result: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(output.status.success() && result["ok"] == true, "{result:#}");
    let scenarios = result["scenarios"].as_array().unwrap();
    let faults: Vec<_> = scenarios.iter().map(|scenario| &scenario["fault"]).collect();
    assert_eq!(faults[0], "no fault");
    assert_eq!(faults.len(), 2, "{result:#}");
    for scenario in scenarios {
        assert!(scenario["ok"] == true && scenario["reads"].as_u64() > Some(0), "{scenario:#}");
        assert!(scenario["slowest_read_ms"].is_u64(), "{scenario:#}");
        for figure in ["failed_reads", "broken_watches", "lost_events", "duplicated_events"] {
            assert_eq!(scenario[figure], 0, "{figure}: {scenario:#}");
        }
    }
}

#[test]
fn demo_interrupted_reports_and_removes_its_files() {
    let home = tempfile::tempdir().unwrap();
    let args = ["--forever", "--quiet"];
    let child = demo(home.path(), &args).stdout(Stdio::piped()).spawn().unwrap();
    let written = || files_in(home.path()).iter().any(|path| path.join("kubeconfig").exists());
    wait::until_blocking(Duration::from_secs(20), "the demo is running", written);
    let kill = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(kill.success());
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}");
    assert!(text.contains("reads, the slowest took"), "{text}");
    assert_eq!(files_in(home.path()), [] as [PathBuf; 0]);
}

#[test]
fn demo_with_invalid_argument_exits_with_2() {
    let home = tempfile::tempdir().unwrap();
    let output = demo(home.path(), &["--seconds", "soon"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(!output.stderr.is_empty());
    assert_eq!(files_in(home.path()), [] as [PathBuf; 0]);
}
