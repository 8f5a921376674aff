//! The commands of the binary: version, help, check, completion, manual, probe, run and status.

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use crate::support::child::KillOnDrop;
use crate::support::{CONFIGMAPS, TestCluster, passthrough_config, refusing_address, soon, wait};
use jackstay_apiserver::client::Client;
use serde_json::Value;

/// Timeout of waits, long enough for a slow machine.
const TIMEOUT: Duration = Duration::from_secs(60);

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
fn version_contains_the_commit_or_build_kind() {
    let out = text(&jackstay(&["--version"]).stdout);
    let rest = out.strip_prefix(concat!("jackstay ", env!("CARGO_PKG_VERSION"), " ("));
    let build = rest.and_then(|rest| rest.strip_suffix(")\n")).expect(&out);
    let hex = build.len() == 12 && build.bytes().all(|b| b.is_ascii_hexdigit());
    assert!(hex || ["debug build", "unknown commit"].contains(&build), "{out}");
}

#[test]
fn version_command_text_equals_the_flag_and_has_json_and_yaml() {
    let out = text(&jackstay(&["version"]).stdout);
    assert_eq!(out, text(&jackstay(&["--version"]).stdout));
    let json: Value = serde_json::from_slice(&jackstay(&["version", "-o", "json"]).stdout).unwrap();
    assert_eq!(json["version"], env!("CARGO_PKG_VERSION"));
    let yaml = text(&jackstay(&["version", "-o", "yaml"]).stdout);
    assert!(yaml.lines().any(|line| line.starts_with("version: ")), "{yaml}");
}

#[test]
fn help_of_every_command_has_exit_codes_and_examples() {
    for command in commands().iter().filter(|command| *command != "help") {
        let help = text(&jackstay(&[command, "--help"]).stdout);
        assert!(help.contains("Exit codes: 0 "), "{command}: {help}");
        assert!(help.contains(&format!("Examples:\n  jackstay {command}")), "{command}: {help}");
    }
}

#[test]
fn commands_with_a_result_take_an_output_format() {
    for command in ["check", "demo", "doctor", "kubeconfig", "probe", "status", "version"] {
        let help = text(&jackstay(&[command, "--help"]).stdout);
        assert!(help.contains("-o, --output <FORMAT>"), "{command}: {help}");
    }
}

#[test]
fn unknown_command_or_flag_gets_a_suggestion() {
    for (args, suggestion) in [(&["stauts"][..], "'status'"), (&["run", "--confg=f"], "'--config'")]
    {
        let out = jackstay(args);
        assert_eq!(out.status.code(), Some(2));
        assert!(text(&out.stderr).contains(suggestion), "{}", text(&out.stderr));
    }
}

#[test]
fn check_output_json_has_every_error_with_its_path() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("jackstay.yaml");
    std::fs::write(&file, "workers: many\n").expect("written");
    let out = jackstay(&["check", "--config", file.to_str().expect("UTF-8"), "-o", "json"]);
    assert_eq!(out.status.code(), Some(2));
    let json: Value = serde_json::from_slice(&out.stdout).expect("JSON");
    let errors = json["errors"].as_array().expect("errors");
    assert!(json["ok"] == false && errors.iter().any(|error| error["path"] == "workers"), "{json}");
    assert_eq!(text(&out.stderr), "");
}

#[test]
fn completion_and_manual_contain_every_command() {
    let commands = commands();
    assert!(commands.contains(&"run".to_owned()) && commands.len() >= 6, "{commands:?}");
    for shell in ["bash", "zsh", "fish"] {
        let out = jackstay(&["completion", shell]);
        assert!(out.status.success());
        assert_eq!(
            out.stdout,
            jackstay(&["completions", shell]).stdout,
            "`completions` is an alias of `completion`"
        );
        let script = text(&out.stdout);
        for command in &commands {
            assert!(script.contains(command.as_str()), "the {shell} script lacks {command}");
        }
    }
    let page = text(&jackstay(&["man"]).stdout);
    assert!(page.contains(".TH jackstay 1"), "{page}");
    let sections = |page: &str| {
        let titles = page.lines().filter_map(|line| line.strip_prefix(".SH "));
        titles.map(|title| title.trim_matches('"').to_owned()).collect::<Vec<_>>()
    };
    let usual = ["NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "COMMANDS", "EXIT STATUS"];
    let last = ["ENVIRONMENT", "FILES", "EXAMPLES", "SEE ALSO"];
    assert_eq!(sections(&page), [&usual[..], &last].concat());

    let dir = tempfile::tempdir().expect("a directory");
    let missing = dir.path().join("share/man1");
    let out = jackstay(&["man", "--out", missing.to_str().expect("UTF-8")]);
    assert!(out.status.success(), "{}", text(&out.stderr));
    for command in commands.iter().filter(|command| *command != "help") {
        let file = missing.join(format!("jackstay-{command}.1"));
        let page = std::fs::read_to_string(&file).expect("a page");
        let sections = sections(&page);
        assert_eq!(sections[..4], usual[..4], "{command}");
        for title in ["EXIT STATUS", "EXAMPLES", "SEE ALSO"] {
            assert!(sections.contains(&title.to_owned()), "{command}: {sections:?}");
        }
    }
    assert!(!missing.join("jackstay-launcher.1").exists());
    let page = std::fs::read_to_string(missing.join("jackstay-run.1")).expect("a page");
    assert!(sections(&page).contains(&"SIGNALS".to_owned()), "{page}");
    let out = jackstay(&["man", "--out", "/dev/null/man1"]);
    assert_eq!(out.status.code(), Some(1));
    assert!(text(&out.stderr).contains("/dev/null/man1"), "{}", text(&out.stderr));
}

#[test]
fn probe_over_unix_socket_returns_the_check_as_exit_code() {
    let dir = tempfile::tempdir().expect("a directory");
    let socket = dir.path().join("run").join("admin.sock");
    let socket = socket.to_str().expect("UTF-8");
    let probe = |check| jackstay(&["probe", check, "--socket", socket]);
    let out = probe("livez");
    assert_eq!(out.status.code(), Some(3));
    let error = text(&out.stderr);
    assert!(error.contains(socket) && error.lines().count() == 1, "{error}");

    let upstream = refusing_address().to_string();
    let args = ["--listen", "127.0.0.1:0", "--endpoint", &upstream];
    let running = Running::start_with("127.0.0.1:0", &args, &[("JACKSTAY__ADMIN__SOCKET", socket)]);
    let is_alive = || probe("livez").status.success();
    wait::until_blocking(TIMEOUT, "the probe succeeds", is_alive);
    assert_eq!(text(&probe("livez").stdout), "ok\n");
    let mode = std::fs::metadata(socket).expect("a socket").permissions().mode();
    assert_eq!(mode & 0o777, 0o660, "its group may connect");
    let out = probe("readyz");
    assert_eq!(out.status.code(), Some(1));
    assert!(text(&out.stderr).contains("0 of 1 endpoints usable"), "{}", text(&out.stderr));
    let out = jackstay(&["probe", "livez", "--admin", &running.admin]);
    assert!(out.status.success(), "{}", text(&out.stderr));
    drop(running);
    assert_eq!(probe("livez").status.code(), Some(3), "the process has exited");
}

#[test]
fn config_defaults_to_the_file_in_etc() {
    let default = "/etc/jackstay/jackstay.yaml";
    for command in ["run", "check"] {
        let help = text(&jackstay(&[command, "--help"]).stdout);
        assert!(help.contains(&format!("[default: {default}]")), "{help}");
        if std::path::Path::new(default).exists() {
            continue;
        }
        let out = jackstay(&[command]);
        let error = text(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{error}");
        assert!(
            error.starts_with(&format!("{default}: ")) && error.contains("--config"),
            "{error}"
        );
    }
}

#[test]
fn run_flags_incomplete_or_with_a_file_are_refused() {
    for args in [
        &["run", "--listen", "127.0.0.1:0"][..],
        &["run", "--endpoint", "10.0.0.1:6443"],
        &["run", "--config", "f", "--listen", "127.0.0.1:0", "--endpoint", "10.0.0.1:6443"],
    ] {
        let out = jackstay(args);
        assert_eq!(out.status.code(), Some(2), "{args:?}");
        assert!(text(&out.stderr).contains("Usage: jackstay run"), "{}", text(&out.stderr));
    }
    let out = jackstay(&["run", "--listen", "nowhere", "--endpoint", "10.0.0.1:6443"]);
    assert_eq!(out.status.code(), Some(2));
    let output = text(&out.stderr);
    assert!(output.starts_with("command line: --listen[0]: \"nowhere\" has no port"), "{output}");
}

#[test]
fn status_without_jackstay_names_the_address() {
    let address = refusing_address().to_string();
    let out = jackstay(&["status", "--admin", &address]);
    assert_eq!(out.status.code(), Some(3));
    let error = text(&out.stderr);
    assert!(error.contains(&format!("nothing listens on {address}")), "{error}");
    assert_eq!((error.lines().count(), out.stdout.len()), (1, 0), "{error}");
    assert_eq!(jackstay(&["status", "--watch=1ms"]).status.code(), Some(2));
    assert_eq!(jackstay(&["status", "--output", "xml"]).status.code(), Some(2));
}

/// A running jackstay with its own admin endpoint.
struct Running {
    child: KillOnDrop,
    admin: String,
}

impl Running {
    fn start(args: &[&str]) -> Self {
        Self::start_with("127.0.0.1:0", args, &[])
    }

    /// Starts with the admin endpoint at this address and these environment variables.
    fn start_with(admin: &str, args: &[&str], variables: &[(&str, &str)]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_jackstay"))
            .arg("run")
            .args(args)
            .args(["--admin", admin])
            .env("JACKSTAY__STATE_DIR", "")
            .envs(variables.iter().copied())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it starts");
        let stderr = BufReader::new(child.stderr.take().expect("a pipe"));
        let mut lines = stderr.lines().map_while(Result::ok);
        let output = lines.find(|line| line.contains("the admin endpoint listens"));
        let output = output.expect("the log has the address of the admin endpoint");
        let at = output.find("127.0.0.").expect("an address");
        let part = |c: &char| c.is_ascii_digit() || ".:".contains(*c);
        let admin = output[at..].chars().take_while(part).collect();
        // The thread reads the remaining log, so that the process does not block on a full pipe.
        std::thread::spawn(move || lines.for_each(drop));
        Self { child: KillOnDrop(child), admin }
    }

    /// Runs `jackstay status`.
    fn status_output(&self, args: &[&str]) -> Output {
        jackstay(&[&["status", "--admin", &self.admin], args].concat())
    }

    fn status(&self, args: &[&str]) -> String {
        let out = self.status_output(args);
        assert!(!out.stdout.is_empty(), "{}", text(&out.stderr));
        text(&out.stdout)
    }

    fn json(&self) -> Value {
        serde_json::from_str(&self.status(&["--output", "json"])).expect("JSON")
    }

    /// Waits until the condition holds for the status.
    fn until(&self, condition: &str, holds: impl Fn(&Value) -> bool) {
        wait::until_ok_blocking(TIMEOUT, condition, || {
            let status = self.json();
            if holds(&status) { Ok(()) } else { Err(format!("{status:#}")) }
        });
    }

    /// The addresses of the listeners.
    fn addresses(&self) -> Vec<SocketAddr> {
        let status = self.json();
        let listeners = status["listeners"].as_array().expect("listeners");
        let bind = |listener: &Value| listener["bind"][0].as_str().and_then(|a| a.parse().ok());
        listeners.iter().map(|listener| bind(listener).expect("an address")).collect()
    }
}

/// After the start, resident memory falls below the peak that the kernel has recorded.
#[test]
fn run_after_start_returns_memory_to_the_kernel() {
    let running = Running::start(&["--listen", "127.0.0.1:0", "--endpoint", "127.0.0.1:9"]);
    let file = format!("/proc/{}/status", running.child.id());
    wait::until_ok_blocking(TIMEOUT, "resident memory below the peak", || {
        let status = std::fs::read_to_string(&file).expect("a process");
        let kib = |key: &str| -> u64 {
            let line = status.lines().find_map(|line| line.strip_prefix(key)).expect("a figure");
            line.trim_matches(|c: char| !c.is_ascii_digit()).parse().expect("a number")
        };
        let (now, peak) = (kib("VmRSS:"), kib("VmHWM:"));
        // In a debug build a fifth to a fourth of the peak is returned.
        if now * 10 < peak * 9 { Ok(()) } else { Err(format!("{now} of {peak} KiB")) }
    });
}

fn states(status: &Value) -> Vec<&str> {
    let endpoints = status["upstreams"][0]["endpoints"].as_array().expect("endpoints");
    endpoints.iter().map(|e| e["state"].as_str().expect("a state")).collect()
}

/// Reserves a port of a loopback address that no other test uses. Nothing listens there until the
/// socket is dropped.
fn reserve_unused_port() -> (socket2::Socket, String) {
    let reserved = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None);
    let reserved = reserved.expect("a socket");
    reserved.bind(&SocketAddr::from(([127, 0, 0, 77], 0)).into()).expect("a port");
    let address = reserved.local_addr().expect("an address").as_socket().expect("of IPv4");
    (reserved, address.to_string())
}

#[test]
fn status_every_endpoint_down_fails_after_printing_the_table() {
    let (_reserved, unused) = reserve_unused_port();
    let running = Running::start(&["--listen", "127.0.0.1:0", "--endpoint", &unused]);
    running.until("ejected", |status| states(status) == ["ejected"]);
    // The client is reset, which counts as an error answered by jackstay itself.
    let mut client = std::net::TcpStream::connect(running.addresses()[0]).expect("it listens");
    let _ = std::io::Read::read(&mut client, &mut [0]);
    let count = |status: &Value| status["listeners"][0]["own_errors"][0]["count"] == 1;
    running.until("counted", count);
    let shown = running.status(&[]);
    assert!(shown.contains("  ·  1 error answered by jackstay itself"), "{shown}");
    assert!(shown.contains("own error reset, unreachable: 1 time, last "), "{shown}");
    for args in [&[][..], &["--output", "json"], &["--wait", "--timeout", "3s"]] {
        let out = running.status_output(args);
        let error = text(&out.stderr);
        assert_eq!(out.status.code(), Some(1), "{args:?} {error}");
        assert!(text(&out.stdout).contains(&unused), "{args:?}");
        assert!(error.starts_with("requests cannot be served"), "{args:?} {error}");
        assert!(error.contains(&format!("{unused} is ejected (")), "{args:?} {error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
    assert_eq!(jackstay(&["status", "--wait", "--watch"]).status.code(), Some(2));
    assert_eq!(jackstay(&["status", "--watch", "--timeout", "1s"]).status.code(), Some(2));
}

/// With `--wait` the time is for all requests together.
#[test]
fn status_timeout_without_wait_limits_the_request() {
    // It accepts connections and does not answer.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let admin = silent.local_addr().expect("an address").to_string();
    let out = jackstay(&["status", "--timeout", "100ms", "--admin", &admin]);
    let error = text(&out.stderr);
    assert_eq!(out.status.code(), Some(3), "{error}");
    assert!(error.contains(&format!("{admin} gives no answer within 100ms: ")), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn status_wait_succeeds_once_process_and_apiserver_are_up() {
    let world = TestCluster::new(1);
    world.servers[0].kill();
    let (reserved, admin) = reserve_unused_port();
    let waiting = Command::new(env!("CARGO_BIN_EXE_jackstay"))
        .args(["status", "--wait", "--timeout", "60s", "--admin", &admin])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    let upstream = world.servers[0].addr.to_string();
    drop(reserved);
    let args = ["--listen", "127.0.0.1:0", "--endpoint", &upstream];
    let running = Running::start_with(&admin, &args, &[]);
    running.until("ejected", |status| states(status) == ["ejected"]);
    world.servers[0].restart().expect("its port");
    let out = waiting.wait_with_output().expect("it ends");
    assert_eq!((out.status.code(), text(&out.stderr).as_str()), (Some(0), ""));
    assert!(text(&out.stdout).contains(&upstream), "{}", text(&out.stdout));
    let out = running.status_output(&[]);
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
}

/// Runs `jackstay run --ready-fd 9` with a pipe as descriptor 9. A shell opens it, because passing a
/// descriptor by number needs unsafe code.
fn run_with_descriptor_9(args: &str) -> Child {
    let command =
        format!("exec {} run --ready-fd 9 {args} 9>&1 >&2", env!("CARGO_BIN_EXE_jackstay"));
    Command::new("sh")
        .args(["-c", &command])
        .env("JACKSTAY__STATE_DIR", "")
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("it starts")
}

#[test]
fn run_ready_descriptor_gets_a_newline_once_clients_can_connect() {
    let (reserved, listener) = reserve_unused_port();
    let (_reserved, upstream) = reserve_unused_port();
    drop(reserved);
    let args = format!("--listen {listener} --endpoint {upstream} --admin 127.0.0.1:0");
    let mut child = run_with_descriptor_9(&args);
    let mut output = Vec::new();
    // The read ends because the process closes the descriptor; the process keeps running.
    std::io::Read::read_to_end(&mut child.stdout.take().expect("a pipe"), &mut output)
        .expect("read");
    assert_eq!(output, b"\n");
    std::net::TcpStream::connect(&listener).expect("it listens");
    assert!(child.try_wait().expect("its state").is_none(), "it keeps running");
    child.kill().expect("killed");
    child.wait().expect("waited for");

    // A failed start closes the descriptor without a newline.
    let child = run_with_descriptor_9("--config /does/not/exist");
    let out = child.wait_with_output().expect("it ends");
    assert_eq!((out.status.code(), out.stdout), (Some(2), Vec::new()));

    let args = ["run", "--listen", "127.0.0.1:0", "--endpoint", "10.0.0.1:1", "--ready-fd", "777"];
    let out = jackstay(&args);
    assert_eq!(out.status.code(), Some(2));
    assert!(text(&out.stderr).contains("--ready-fd 777: no such descriptor is open"));
}

#[test]
fn help_is_no_wider_than_the_terminal_and_100_columns() {
    let width = |columns: &str, command: &str| {
        let out = Command::new(env!("CARGO_BIN_EXE_jackstay"))
            .args([command, "--help"])
            .env("COLUMNS", columns)
            .output()
            .expect("it starts");
        text(&out.stdout).lines().map(|line| line.chars().count()).max().expect("lines")
    };
    for command in commands().iter().filter(|command| *command != "help") {
        let (narrow, wide) = (width("70", command), width("200", command));
        assert!(narrow <= 70 && wide <= 100, "{command}: {narrow}, {wide}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn run_with_listen_and_upstream_passes_connections_through() {
    let world = TestCluster::new(2);
    let upstreams: Vec<String> = world.addresses().iter().map(ToString::to_string).collect();
    let running = Running::start(&[
        "--listen",
        "127.0.0.1:0",
        "--endpoint",
        &upstreams[0],
        "--endpoint",
        &upstreams[1],
    ]);
    running.until("ready", |status| states(status) == ["ready", "ready"]);
    let listener = running.addresses()[0];
    // TLS is end to end: the client verifies the apiserver, and the apiserver verifies the client.
    let client = soon("TLS", Client::connect(listener, &world.certs.credentials())).await.unwrap();
    let reply = soon("an answer", client.get(CONFIGMAPS)).await.unwrap();
    assert_eq!((reply.status.as_u16(), &reply.json()["kind"]), (200, &"ConfigMapList".into()));
    let status = running.json();
    assert_eq!(
        (&status["listeners"][0]["mode"], &status["listeners"][0]["flows"]),
        (&"passthrough".into(), &1.into())
    );
}

/// The cells by column heading of the row whose first cell is `row`, in the table whose first heading
/// is `table`.
fn row(shown: &str, table: &str, row: &str) -> HashMap<String, String> {
    let cells = |line: &str| -> Vec<String> {
        line.split("  ").map(str::trim).filter(|c| !c.is_empty()).map(str::to_owned).collect()
    };
    let starts_with =
        |line: &Vec<String>, cell: &str| line.first().is_some_and(|first| first == cell);
    let mut lines = shown.lines().map(cells);
    let headings = lines
        .find(|line| starts_with(line, table))
        .unwrap_or_else(|| panic!("no {table}: {shown}"));
    let mut below = lines.take_while(|line| !line.is_empty());
    let found =
        below.find(|line| starts_with(line, row)).unwrap_or_else(|| panic!("no {row}: {shown}"));
    headings.into_iter().zip(found).collect()
}

/// The table reads JSON keys by name; this test shows that a running jackstay writes all of them.
#[tokio::test(flavor = "multi_thread")]
async fn status_table_of_a_running_jackstay_has_no_empty_cell() {
    let world = TestCluster::new(2);
    let (up, down) = (world.servers[0].addr.to_string(), world.servers[1].addr.to_string());
    let mut config = world.config();
    let mut lb = passthrough_config(config.clone()).listeners.remove(0);
    lb.name = "lb".into();
    config.listeners.push(lb);
    let list = world.certs.path().join("endpoints");
    std::fs::write(&list, format!("{up}\n{down}\n")).unwrap();
    config.upstreams[0].endpoints_file = Some(list);
    config.upstreams[0].used_by.passthrough = true;
    // Long enough that a slow response on a busy machine does not make the endpoint unready.
    let readyz = &mut config.upstreams[0].health.readyz;
    (readyz.interval, readyz.timeout) = (Duration::from_secs(10), Duration::from_secs(5));
    let file = world.certs.path().join("jackstay.yaml");
    std::fs::write(&file, config.to_json().to_string()).unwrap();
    let running = Running::start(&["--config", file.to_str().unwrap()]);
    running.until("ready", |status| states(status) == ["ready", "ready"]);

    world.servers[1].kill();
    running.until("ejected", |status| {
        let mut states = states(status);
        states.sort_unstable();
        states == ["ejected", "ready"]
    });
    let [terminate, passthrough] = running.addresses()[..] else { panic!("not two listeners") };
    let credentials = world.certs.credentials();
    let first_client = soon("TLS", Client::connect(terminate, &credentials)).await.unwrap();
    assert_eq!(soon("an answer", first_client.get(CONFIGMAPS)).await.unwrap().status.as_u16(), 200);
    let _watch =
        soon("a watch", first_client.watch(&format!("{CONFIGMAPS}?watch=1"))).await.unwrap();
    let second_client = soon("TLS", Client::connect(passthrough, &credentials)).await.unwrap();
    assert_eq!(
        soon("an answer", second_client.get(CONFIGMAPS)).await.unwrap().status.as_u16(),
        200
    );
    std::fs::write(&file, "workers: many\n").unwrap();
    let hup = Command::new("kill").args(["-HUP", &running.child.id().to_string()]).status();
    assert!(hup.unwrap().success());
    running.until("all values known", |status| {
        let endpoints = status["upstreams"][0]["endpoints"].as_array().unwrap();
        let alive = endpoints.iter().find(|e| e["address"] == up.as_str()).unwrap();
        alive["rtt"]["p99_ms"].is_number()
            && alive["watches"] == 1
            && alive["flows"] == 1
            && status["config"]["last_reload"]["outcome"] == "failed"
    });

    let shown = running.status(&[]);
    let head = shown.lines().next().unwrap();
    let version = concat!("jackstay ", env!("CARGO_PKG_VERSION"), " (");
    assert!(head.starts_with(version) && !head.contains("(-)"), "{head}");
    for part in ["  ·  up ", "s  ·  1 of 2 endpoints ready", " (1 watch)", " of them 5xx"] {
        assert!(head.contains(part), "no `{part}` in {head}");
    }
    assert!(!head.contains(" 0 streams") && !head.contains(" 0 answers"), "{head}");
    let reload = shown.lines().nth(1).unwrap();
    assert!(reload.starts_with("last reload ") && !reload.contains("reload - ago"), "{reload}");
    assert!(
        reload.contains("the old configuration stays: ") && reload.contains("workers"),
        "{reload}"
    );

    let cells = row(&shown, "LISTENER", "apiserver");
    let expected = [
        ("MODE", "terminate"),
        ("ADDRESS", &terminate.to_string()),
        ("UPSTREAM", "control-plane"),
        ("CLIENTS", "1"),
        ("REQUESTS", "1"),
        ("WATCHES", "1"),
        ("TUNNELS", "0"),
        ("FLOWS", "-"),
    ];
    for (heading, cell) in expected {
        assert_eq!(cells[heading], cell, "{heading} in {shown}");
    }
    assert!(shown.contains("identity loaded CN=kubernetes-admin"), "{shown}");
    let cells = row(&shown, "LISTENER", "lb");
    let expected = [
        ("MODE", "passthrough"),
        ("ADDRESS", &passthrough.to_string()),
        ("CLIENTS", "1"),
        ("FLOWS", "1"),
    ];
    for (heading, cell) in expected {
        assert_eq!(cells[heading], cell, "{heading} in {shown}");
    }

    let cells = row(&shown, "CONTROL-PLANE", &up);
    for heading in ["CONNS", "STREAMS", "WATCHES", "FLOWS"] {
        let number = cells[heading].split(' ').next().unwrap().parse::<u64>();
        assert!(
            number.is_ok_and(|number| number > 0),
            "{heading} is {} in {shown}",
            cells[heading]
        );
    }
    for heading in ["RTT p50", "p99"] {
        assert!(
            cells[heading].ends_with("ms") || cells[heading].ends_with('s'),
            "{heading} in {shown}"
        );
    }
    assert_eq!((&*cells["STATE"], &*cells["5xx"]), ("ready", "0"), "{shown}");
    assert_eq!((&*cells["REASON"] == "-", &*cells["LAST EJECTION"]), (false, "never"), "{shown}");
    let cells = row(&shown, "CONTROL-PLANE", &down);
    assert_eq!(cells["STATE"], "ejected", "{shown}");
    assert!(cells["SINCE"] != "-" && cells["REASON"] != "-", "{shown}");
    let (ago, why) = cells["LAST EJECTION"].split_once(" ago: ").expect(&shown);
    assert!(ago != "-" && why != "-", "{shown}");

    let cells = row(&shown, "SOURCE", "file");
    assert!(cells["LAST SUCCESS"].ends_with(" ago") && cells["ENDPOINTS"] == "2", "{shown}");
    let event = shown
        .lines()
        .find(|line| line.contains(&format!("endpoint {down}  ")) && line.contains("-> ejected: "));
    let event = event.unwrap_or_else(|| panic!("no ejection: {shown}"));
    assert!(
        !event.starts_with("- ago") && !event.contains("- ->") && !event.ends_with(": -"),
        "{event}"
    );
}

#[test]
fn options_with_their_former_names_are_accepted_and_help_shows_one_name() {
    let help = |command| text(&jackstay(&[command, "--help"]).stdout);
    for (command, others, former, name, value) in [
        ("kubeconfig", &[][..], "--in", "--kubeconfig", "missing"),
        ("kubeconfig", &["--kubeconfig", "missing"], "--server", "--listen", "vip:1"),
        ("kubeconfig", &["--kubeconfig", "missing"], "--upstream", "--endpoint", "10.0.0.1"),
        ("run", &["--listen", "127.0.0.1:0"], "--upstream", "--endpoint", "no address"),
        ("doctor", &["--kubeconfig", "missing"], "--server-name", "--tls-server-name", "node"),
    ] {
        let run = |option| jackstay(&[&[command][..], others, &[option, value]].concat());
        let [before, now] = [former, name].map(run);
        assert_eq!(text(&before.stderr), text(&now.stderr), "{command} {former}");
        assert!(!text(&now.stderr).contains("unexpected argument"), "{}", text(&now.stderr));
        assert_eq!(
            (before.status.code(), now.status.code()),
            (Some(2), Some(2)),
            "{command} {name}"
        );
        let shown = |option| help(command).contains(&format!("{option} <"));
        assert!(shown(name) && !shown(former), "{command}: {}", help(command));
    }
}
