//! Tests of `--take-over` and of signals: a new process replaces a running one, and clients see no failure.

mod certificates;
mod failed;
mod load;
mod releases;
mod restarts;
mod saved_endpoints;
mod setup;

use self::load::Load;
use self::setup::{ServiceManager, Setup, start_as, start_passthrough};
use crate::support::child::{PROCESS_TIMEOUT, Process, first_address};
use crate::support::{
    CONFIGMAPS, TestCluster, long_form, passthrough_config, refusing_address, replace_symlink,
    soon, terminate_mode, until,
};
use jackstay_apiserver::client::{Client, Credentials};
use jackstay_config::{Config, FlowSettings, IdentitySource, PassedThrough};
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};

/// A name in the apiservers' certificates.
const NAME: &str = "kubernetes.default.svc";

fn is_refused(address: SocketAddr) -> bool {
    TcpStream::connect(address).is_err()
}

/// The number of workers changes with each takeover. The test has three takeovers, with `JACKSTAY_LONG=1`
/// twenty.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn takeover_under_load_fails_no_request_and_no_watch() {
    let rounds = if long_form() { 20 } else { 3 };
    let mut setup = Setup::new(2, 1).await;
    let load = Load::start(&setup).await;
    load.wait_progress().await;
    for round in 0..rounds {
        setup.change(|config| config.workers = [2, 3, 1][round % 3]);
        let new = setup.start(&["--take-over"]);
        let mut old = setup.replace(new);
        let status = old.wait_exit().await;
        assert!(status.success(), "{status}:\n{}", old.output());
        old.wait_output("draining: a new process has taken over").await;
        old.wait_output("handed over: this process drains and ends").await;
        load.wait_progress().await;
        let events = setup.page("/events").await;
        assert!(events.contains("taken over: this process accepts connections"), "{events}");
    }
    let report = load.end().await;
    println!("{rounds} takeovers: {report}");
}

/// The first line says which process runs how. Lines of two processes in one journal differ by their `pid`, from the
/// start of the takeover until the old process has ended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn log_begins_with_the_process_and_has_its_pid_while_two_overlap() {
    let mut setup = Setup::with(1, |config| *config = passthrough_config(config.clone())).await;
    let first_line = |process: &Process| process.output().lines().next().unwrap().to_owned();
    let (pid, first) = (setup.process.pid().to_owned(), first_line(&setup.process));
    let version =
        concat!(" INFO jackstay starts version=\"", env!("CARGO_PKG_VERSION"), "\" commit=");
    assert!(first.contains(version), "{first}");
    for field in [
        &format!(" pid={pid} config=/"),
        " user=",
        " l7=none l4=apiserver take_over=false ",
        " sandbox=\"not_dumpable on, no_new_privs on, seccomp ",
    ] {
        assert!(first.contains(field), "{field}: {first}");
    }
    assert_eq!(setup.process.output().matches(" pid=").count(), 1, "{}", setup.process.output());

    // The flow keeps the old process in its drain.
    let client = Client::connect(setup.address, &setup.cluster.certs.credentials()).await.unwrap();
    assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 200);
    let new = setup.start(&["--take-over"]);
    let mut old = setup.replace(new);
    let new = &mut setup.process;
    let new_pid = new.pid().to_owned();
    let of = |pid: &str| format!(" pid={pid}");
    for text in
        ["all listening sockets sent to a new process", "draining: a new process has taken over"]
    {
        let line = old.wait_output(text).await;
        assert!(line.ends_with(&of(&pid)), "{line}");
    }
    for text in ["taking over from a running process", "taken over: this process accepts"] {
        let line = new.wait_output(text).await;
        assert!(line.ends_with(&of(&new_pid)), "{line}");
    }
    assert!(first_line(new).contains(" take_over=true "), "{}", new.output());
    drop(client);
    old.wait_exit().await;
    let without_pid = async || {
        setup.process.signal("HUP");
        let output = setup.process.output();
        output.lines().last().is_some_and(|line| !line.contains(" pid="))
    };
    until("lines of the new process have no pid any more", without_pid).await;
}

/// Neither the process beside another one nor one whose state directory cannot be written has a takeover socket.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn process_without_a_state_directory_of_its_own_warns() {
    let mut setup = Setup::new(1, 1).await;
    let free = |config: &mut Config| {
        config.admin.bind = ([127, 0, 0, 1], 0).into();
        config.listeners[0].bind = vec![([127, 0, 0, 1], 0).into()];
    };
    setup.change(free);
    let mut second = setup.start(&[]);
    let line = second.wait_output("takeover is not available").await;
    assert!(line.contains(" WARN ") && line.contains("a state_dir of its own"), "{line}");
    // Below a file nothing can be created, not even by root.
    setup.change(|config| config.state_dir = Some("/dev/null/state".into()));
    let mut unwritable = setup.start(&[]);
    let line = unwritable.wait_output("takeover is not available").await;
    assert!(line.contains(" WARN ") && line.contains("/dev/null/state"), "{line}");
    unwritable.wait_output("state_dir: /dev/null is not a directory").await;
}

/// A running process cannot leave its sandbox, so the log and the reload name the target of the link, and SIGUSR2
/// puts it into use.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn link_that_leads_out_of_the_sandbox_is_reported_and_applied_by_sigusr2() {
    let (links, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (link, target) = (links.path().join("current.pem"), outside.path().join("client.pem"));
    let mut setup = Setup::with(1, |config| {
        let IdentitySource::Files(identity) = &mut terminate_mode(config).identities[0] else {
            unreachable!("the identity has files");
        };
        let pem =
            [&identity.cert_file, &identity.key_file].map(|file| std::fs::read(file).unwrap());
        std::fs::write(links.path().join("client-1.pem"), pem.concat()).unwrap();
        std::fs::write(&target, pem.concat()).unwrap();
        std::os::unix::fs::symlink("client-1.pem", &link).unwrap();
        (identity.cert_file, identity.key_file) = (link.clone(), link.clone());
    })
    .await;
    let landlock = setup.page("/status").await;
    if landlock.contains("\"landlock\": \"unavailable") {
        println!("skipped: the kernel has no Landlock");
        return;
    }
    let reason = format!("{} leads to {}, which is outside of", link.display(), target.display());
    replace_symlink(&link, &target);
    // The file of the configuration may be read again at the same time, which fails, too.
    let name = format!("name={:?}", link.display().to_string());
    let line = setup.process.wait_output(&name).await;
    assert!(line.contains("reload failed") && line.contains(&reason), "{line}");
    assert!(line.contains("(sandbox.landlock): send SIGUSR2"), "{line}");
    setup.process.signal("HUP");
    let line = setup.process.wait_output("the old configuration stays").await;
    assert!(line.contains(&reason), "{line}");

    setup.process.signal("USR2");
    setup.process.wait_output("taken over: this process accepts connections").await;
    let is_valid = async || {
        let page = setup.page("/readyz").await;
        page.contains("readyz check passed") && !page.contains("[-]identity")
    };
    until("the new process uses the target of the link", is_valid).await;
    let started = setup.process.wait_output("takeover process started").await;
    let pid = started.split("new_pid=").nth(1).unwrap().split(' ').next().unwrap();
    setup.process.follow_successor(pid);
}

/// Flows continue in the old process, while the new process accepts new connections.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn takeover_resets_flows_of_the_old_process_only_when_its_drain_ends() {
    let setup = Setup::with(1, |config| *config = passthrough_config(config.clone())).await;
    let credentials = setup.cluster.certs.credentials();
    check_flows_at_takeover(setup, &credentials).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn takeover_resets_flows_by_server_name_only_when_the_drain_ends() {
    let setup = Setup::with(1, |config| {
        let (server_names, flows) = (vec![NAME.into()], FlowSettings::default());
        terminate_mode(config).passed_through =
            Some(Box::new(PassedThrough { server_names, flows }));
    })
    .await;
    let credentials = setup.cluster.certs.credentials().expecting(NAME);
    check_flows_at_takeover(setup, &credentials).await;
}

async fn check_flows_at_takeover(mut setup: Setup, credentials: &Credentials) {
    let old_client = Client::connect(setup.address, credentials).await.unwrap();
    let mut watch = old_client.watch(&format!("{CONFIGMAPS}?watch=1")).await.unwrap();
    let new = setup.start(&["--take-over"]);
    let mut old = setup.replace(new);
    old.wait_output("draining: a new process has taken over").await;
    let new_client = Client::connect(setup.address, credentials).await.unwrap();
    assert_eq!(new_client.get(CONFIGMAPS).await.unwrap().status, 200);
    assert_eq!(old_client.get(CONFIGMAPS).await.unwrap().status, 200);
    assert!(old.is_running(), "{}", old.output());
    let status = setup.page("/status").await;
    assert!(
        status.contains(r#""flows": 1"#),
        "the new process has another number of flows: {status}"
    );
    // The remaining flow is reset: with an end of stream the watch would look complete.
    let status = old.wait_exit().await;
    assert!(status.success(), "{status}:\n{}", old.output());
    let end = soon("the reset", async {
        loop {
            match watch.next().await {
                Ok(Some(_)) => {}
                end => break end,
            }
        }
    });
    let end = end.await;
    assert!(end.is_err(), "{end:?}");
    // The task of the connection may see the reset after the watch.
    until("the connection is closed", async || old_client.is_closed()).await;
    assert_eq!(new_client.get(CONFIGMAPS).await.unwrap().status, 200);
}

/// The old process announces the new main process to the service manager, and does not report that the
/// service stops.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sigusr2_replaces_the_process_under_load() {
    let mut setup = Setup::new(1, 1).await;
    let load = Load::start(&setup).await;
    let manager = ServiceManager::new();
    let new = setup.start_under(&manager, &["--take-over"]);
    setup.replace(new).wait_exit().await;
    let stored = manager.receive_any();
    assert!(stored.starts_with("FDSTORE=1\nFDNAME=jackstay-listener-127.0.0.1_"), "{stored}");
    assert_eq!(manager.receive(), "READY=1");
    load.wait_progress().await;

    setup.process.signal("USR2");
    let message = manager.receive();
    let named = message.strip_prefix("MAINPID=").expect(&message);
    // Feeds the watchdog, too, for the time until the new main process does.
    let pid = named.strip_suffix("\nWATCHDOG=1").expect(&message).to_owned();
    assert_eq!(manager.receive(), "READY=1");
    let status = setup.process.wait_exit().await;
    assert!(status.success(), "{status}:\n{}", setup.process.output());
    setup.process.follow_successor(&pid);
    load.wait_progress().await;
    let report = load.end().await;
    println!("a takeover by SIGUSR2: {report}");

    setup.process.signal("TERM");
    assert_eq!(manager.receive(), "STOPPING=1");
}

/// After the first signal, open flows continue for at most the drain timeout.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn second_termination_signal_ends_the_drain() {
    let cluster = TestCluster::new(1);
    for second in ["TERM", "INT"] {
        let mut process = start_passthrough(cluster.addresses()[0]);
        let address = first_address(&process.wait_output("listening").await);
        // TLS is end to end, so jackstay cannot ask this client to disconnect.
        let client = Client::connect(address, &cluster.certs.credentials()).await.unwrap();
        process.signal("TERM");
        process.wait_output("draining").await;
        assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 200, "the flow continues");
        assert!(process.is_running());
        process.signal(second);
        let status = process.wait_exit().await;
        assert!(status.success(), "{status}:\n{}", process.output());
        let line = process.wait_output("drain ended; closing open connections").await;
        assert!(line.contains("connections=1"), "{line}");
        assert!(soon("the end of the flow", client.get(CONFIGMAPS)).await.is_err());
        // The end of the prober is not reported as a failure of the apiserver.
        let output = process.output();
        let (_, later_output) = output.split_once(&line).unwrap();
        assert!(!later_output.contains("not connected"), "{later_output}");
    }
}

/// A setup without a process, and in place of one a takeover socket that does not answer.
async fn silent_predecessor() -> (Setup, tempfile::TempDir, UnixListener) {
    let mut setup = Setup::new(1, 1).await;
    setup.process.signal("TERM");
    setup.process.wait_exit().await;
    let state = tempfile::tempdir().unwrap();
    setup.change(|config| config.state_dir = Some(state.path().to_owned()));
    let listener = UnixListener::bind(state.path().join("take-over.sock")).unwrap();
    (setup, state, listener)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn termination_signal_ends_a_start_that_waits_for_the_old_process() {
    let (setup, _state, listener) = silent_predecessor().await;
    for signal in ["TERM", "INT"] {
        let mut new = setup.start(&["--take-over"]);
        let request = listener.accept().unwrap();
        new.signal(signal);
        assert!(new.wait_exit().await.success(), "{}", new.output());
        new.wait_output("termination signal before the start was complete").await;
        drop(request);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn start_that_fails_after_a_termination_signal_is_a_failure() {
    let (setup, _state, listener) = silent_predecessor().await;
    let mut new = setup.start(&["--take-over"]);
    let request = listener.accept().unwrap();
    new.signal("TERM");
    drop(request);
    assert_eq!(new.wait_exit().await.code(), Some(1), "{}", new.output());
    new.wait_output("cannot take over through").await;
}

/// A failure of the new process before it serves does not affect the old one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_start_of_the_new_process_leaves_the_old_one_running() {
    let mut setup = Setup::new(1, 1).await;
    let load = Load::start(&setup).await;

    // Another process listens on an address of the new configuration.
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let before = setup.config.clone();
    setup.change(|config| add_listener(config, "other", taken.local_addr().unwrap()));
    let mut new = setup.start(&["--take-over"]);
    assert_eq!(new.wait_exit().await.code(), Some(1), "{}", new.output());
    new.wait_output("taking over from a running process").await;
    new.wait_output("another process listens there").await;

    // The new configuration is invalid.
    setup.change(|config| config.listeners[0].upstream = "nowhere".into());
    let mut new = setup.start(&["--take-over"]);
    assert_eq!(new.wait_exit().await.code(), Some(2), "{}", new.output());

    // The new process, here the test, ends before it reports that it serves.
    setup.change(|config| *config = before.clone());
    for _ in 0..3 {
        let stream = UnixStream::connect(setup.state_dir().join("take-over.sock")).unwrap();
        (&stream).write_all(b"jackstay take-over 1\n").unwrap();
        let mut line = Vec::new();
        BufReader::new(&stream).read_until(b'\n', &mut line).unwrap();
        assert_eq!(line, b"sockets 2\n", "not those of the listener and of the admin endpoint");
    }

    // The new process has no `--take-over`.
    let mut new = setup.start(&[]);
    assert_eq!(new.wait_exit().await.code(), Some(1), "{}", new.output());
    let line = new.wait_output("cannot listen on").await;
    let pid = setup.process.pid();
    let advice = format!("jackstay runs as process {pid} with the same state_dir");
    assert!(line.contains(&advice) && line.contains("`run --take-over`"), "{line}");

    load.wait_progress().await;
    assert!(setup.process.is_running());
    // The old process can still be replaced.
    let new = setup.start(&["--take-over"]);
    assert!(setup.replace(new).wait_exit().await.success());
    load.wait_progress().await;
    load.end().await;
}

/// Adds a listener like the first one, at another address.
fn add_listener(config: &mut Config, name: &str, address: SocketAddr) {
    let mut listener = config.listeners[0].clone();
    listener.name = name.into();
    listener.bind = vec![address];
    config.listeners.push(listener);
}

/// Sockets whose addresses are in both configurations are handed over. The new process binds addresses that
/// only the new configuration has, and closes sockets whose addresses only the old one has.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn takeover_applies_added_and_removed_addresses() {
    let mut setup = Setup::new(1, 1).await;
    let load = Load::start(&setup).await;
    let (first, second) = (refusing_address(), refusing_address());
    setup.change(|config| add_listener(config, "second", first));
    let new = setup.start(&["--take-over"]);
    setup.replace(new).wait_exit().await;
    assert!(!is_refused(first));
    load.wait_progress().await;
    setup.change(|config| config.listeners[1].bind = vec![second]);
    let new = setup.start(&["--take-over"]);
    let mut old = setup.replace(new);
    assert!(old.wait_exit().await.success());
    assert!(is_refused(first) && !is_refused(second));
    setup.process.wait_output("sockets that no listener uses are closed").await;
    load.wait_progress().await;
    load.end().await;
}

/// Only root and the same user may take over, even if the mode of the takeover socket allows other users to
/// connect.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn takeover_is_refused_between_different_users() {
    use std::os::unix::fs::PermissionsExt;
    const OTHER_UID: u32 = 65534;
    let mut setup = Setup::new(1, 1).await;
    let socket = setup.state_dir().join("take-over.sock");
    let dir = tempfile::tempdir().unwrap();
    if std::os::unix::fs::chown(dir.path(), Some(OTHER_UID), None).is_err() {
        println!("skipped: only root can change the user");
        return;
    }
    for path in [setup.cluster.certs.path(), &setup.state_dir(), &socket, dir.path()] {
        let everyone = std::fs::Permissions::from_mode(0o777);
        std::fs::set_permissions(path, everyone).unwrap();
    }
    let file = dir.path().join("other-user.yaml");
    let text = format!(
        "state_dir: {}\nadmin: {{bind: '127.0.0.1:0'}}\nupstreams: [{{name: u, endpoints: \
         ['127.0.0.1:1']}}]\nlisteners: [{{name: l, mode: passthrough, bind: ['{}'], upstream: u}}]\n",
        setup.state_dir().display(),
        setup.address
    );
    std::fs::write(&file, text).unwrap();
    // The other user may not be able to read the binary, so it runs a copy. `cp` makes the copy: if this
    // process did, a child that another test starts at the same time would inherit the copy open for writing,
    // and such a file cannot be executed (ETXTBSY).
    let binary = dir.path().join("jackstay");
    let copy = [env!("CARGO_BIN_EXE_jackstay").as_ref(), binary.as_os_str()];
    assert!(std::process::Command::new("cp").args(copy).status().unwrap().success());
    let mut other = start_as(&binary, &file, &["--take-over"], OTHER_UID);
    assert_eq!(other.wait_exit().await.code(), Some(1), "{}", other.output());
    other.wait_output("cannot take over").await;
    setup.process.wait_output("user 65534 is not trusted").await;
    assert!(setup.process.is_running());

    // Sockets that another user hands over are not trusted either.
    let state = dir.path().join("state");
    std::fs::create_dir(&state).unwrap();
    std::os::unix::fs::chown(&state, Some(OTHER_UID), None).unwrap();
    let text = std::fs::read_to_string(&file).unwrap();
    let text = text.replace(&setup.state_dir().display().to_string(), &state.display().to_string());
    std::fs::write(&file, text.replace(&setup.address.to_string(), "127.0.0.1:0")).unwrap();
    let mut other = start_as(&binary, &file, &[], OTHER_UID);
    other.wait_output("listening").await;
    until("the socket exists", async || state.join("take-over.sock").exists()).await;
    setup.change(|config| config.state_dir = Some(state.clone()));
    let mut new = setup.start(&["--take-over"]);
    assert_eq!(new.wait_exit().await.code(), Some(1), "{}", new.output());
    new.wait_output("it runs as user 65534, which is not trusted").await;
    other.signal("KILL");
}

/// The service manager listens before jackstay starts (`LISTEN_FDS`).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn inherited_socket_is_used_and_handed_over() {
    let mut setup = Setup::new(1, 1).await;
    setup.process.signal("TERM");
    setup.process.wait_exit().await;
    // A client connects before jackstay starts.
    let socket = TcpListener::bind(setup.address).unwrap();
    let mut early = TcpStream::connect(setup.address).unwrap();
    setup.process = setup.start_with_socket(socket.into());
    setup.process.wait_output("listening").await;
    // The TLS alert after a request without TLS shows that the connection was accepted.
    early.set_read_timeout(Some(PROCESS_TIMEOUT)).unwrap();
    early.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let mut response = Vec::new();
    let _ = BufReader::new(early).read_until(0, &mut response);
    assert!(!response.is_empty(), "{}", setup.process.output());
    let load = Load::start(&setup).await;
    load.wait_progress().await;
    // The next process takes over the socket.
    let new = setup.start(&["--take-over"]);
    assert!(setup.replace(new).wait_exit().await.success());
    load.wait_progress().await;
    load.end().await;
}
