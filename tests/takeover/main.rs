//! A new process replaces a running one under load, and clients see no failure.
//!
//! The short form replaces it three times, the long one (`JACKSTAY_LONG=1 cargo test --test takeover`)
//! twenty times.

#![cfg(feature = "demo")]

#[path = "../support/mod.rs"]
mod support;

mod load;
mod setup;

use crate::load::Load;
use crate::setup::{ServiceManager, Setup, start_as, start_passthrough};
use crate::support::child::{PROCESS_TIMEOUT, first_address};
use crate::support::{
    CONFIGMAPS, TestCluster, long_form, passthrough_config, refusing_address, soon,
};
use jackstay::config::Config;
use jackstay::demo::client::Client;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};

fn is_refused(address: SocketAddr) -> bool {
    TcpStream::connect(address).is_err()
}

/// For several numbers of workers: no request fails, no watch breaks or has to list, and no event
/// is lost or duplicated.
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
    println!("replaced {rounds} times: {report}");
}

/// A takeover ends no L4 flow before the end of the drain: flows continue in the old process, and
/// the new one accepts new connections.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flows_continue_in_the_old_process_until_its_drain_ends() {
    let mut setup = Setup::with(1, |config| *config = passthrough_config(config.clone())).await;
    let who = setup.cluster.certs.credentials();
    let before = Client::connect(setup.address, &who).await.unwrap();
    let mut watch = before.watch(&format!("{CONFIGMAPS}?watch=1")).await.unwrap();
    let new = setup.start(&["--take-over"]);
    let mut old = setup.replace(new);
    old.wait_output("draining: a new process has taken over").await;
    let after = Client::connect(setup.address, &who).await.unwrap();
    assert_eq!(after.get(CONFIGMAPS).await.unwrap().status, 200);
    assert_eq!(before.get(CONFIGMAPS).await.unwrap().status, 200);
    assert!(old.is_running(), "{}", old.output());
    let status = setup.page("/status").await;
    assert!(status.contains(r#""flows": 1"#), "the new process has its own flow: {status}");
    // Remaining flows are reset, so that they do not look complete.
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
    assert!(end.await.is_err() && before.is_closed());
    assert_eq!(after.get(CONFIGMAPS).await.unwrap().status, 200);
}

/// One command in a unit: the service manager gets the new main process, and no message that the
/// service stops.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sigusr2_starts_the_binary_again() {
    let mut setup = Setup::new(1, 1).await;
    let load = Load::start(&setup).await;
    let manager = ServiceManager::new();
    let new = setup.start_under(&manager, &["--take-over"]);
    setup.replace(new).wait_exit().await;
    assert_eq!(manager.receive(), "READY=1");
    load.wait_progress().await;

    setup.process.signal("USR2");
    let main = manager.receive();
    let pid = main.strip_prefix("MAINPID=").expect(&main).to_owned();
    assert_eq!(manager.receive(), "READY=1");
    let status = setup.process.wait_exit().await;
    assert!(status.success(), "{status}:\n{}", setup.process.output());
    setup.process.follow_successor(&pid);
    load.wait_progress().await;
    let report = load.end().await;
    println!("replaced by a signal: {report}");

    setup.process.signal("TERM");
    assert_eq!(manager.receive(), "STOPPING=1");
}

/// After the first signal requests finish, for at most the drain timeout; the second signal ends
/// them.
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
        let last = process.wait_output("drain ended; closing open connections").await;
        assert!(last.contains("connections=1"), "{last}");
        assert!(soon("the end of the flow", client.get(CONFIGMAPS)).await.is_err());
        // The end of the prober is not reported as a failure of the apiserver.
        let output = process.output();
        let (_, end) = output.split_once(&last).unwrap();
        assert!(!end.contains("not connected"), "{end}");
    }
}

/// A start that waits for another process can be ended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn termination_signal_ends_a_start_that_hangs() {
    let mut setup = Setup::new(1, 1).await;
    setup.process.signal("TERM");
    setup.process.wait_exit().await;
    let state = tempfile::tempdir().unwrap();
    setup.change(|config| config.state_dir = Some(state.path().to_owned()));
    let listener = UnixListener::bind(state.path().join("take-over.sock")).unwrap();
    for signal in ["TERM", "INT"] {
        let mut new = setup.start(&["--take-over"]);
        // The new process asks for the sockets and gets no response.
        let request = listener.accept().unwrap();
        new.signal(signal);
        assert!(new.wait_exit().await.success(), "{}", new.output());
        new.wait_output("termination signal before the start was complete").await;
        drop(request);
    }
}

/// Until the new process serves, any failure of it leaves the old one unaffected.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn new_process_that_fails_leaves_the_old_one_running() {
    let mut setup = Setup::new(1, 1).await;
    let load = Load::start(&setup).await;

    // One of its addresses is taken.
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let before = setup.config.clone();
    setup.change(|config| add_listener(config, "other", taken.local_addr().unwrap()));
    let mut new = setup.start(&["--take-over"]);
    assert_eq!(new.wait_exit().await.code(), Some(1), "{}", new.output());
    new.wait_output("taking over from a running process").await;
    new.wait_output("another process listens there").await;

    // Its configuration is invalid.
    setup.change(|config| config.listeners[0].upstream = "nowhere".into());
    let mut new = setup.start(&["--take-over"]);
    assert_eq!(new.wait_exit().await.code(), Some(2), "{}", new.output());

    // It ends before it reports that it serves.
    setup.change(|config| *config = before.clone());
    for _ in 0..3 {
        let stream = UnixStream::connect(setup.state().join("take-over.sock")).unwrap();
        (&stream).write_all(b"jackstay take-over 1\n").unwrap();
        let mut line = Vec::new();
        BufReader::new(&stream).read_until(b'\n', &mut line).unwrap();
        assert_eq!(line, b"sockets 2\n", "of the listener and of the admin endpoint");
    }

    // Without the flag.
    let mut new = setup.start(&[]);
    assert_eq!(new.wait_exit().await.code(), Some(1), "{}", new.output());
    new.wait_output("`--take-over`").await;

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

/// Addresses of both configurations are handed over, those of the new one alone are bound, and
/// those of the old one alone are closed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn new_configuration_may_change_addresses() {
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

/// Only root and the same user may take over, also if the mode of the socket allows others to
/// connect.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn takeover_is_refused_for_another_user() {
    use std::os::unix::fs::PermissionsExt;
    const NOBODY: u32 = 65534;
    let mut setup = Setup::new(1, 1).await;
    let socket = setup.state().join("take-over.sock");
    let dir = tempfile::tempdir().unwrap();
    if std::os::unix::fs::chown(dir.path(), Some(NOBODY), None).is_err() {
        println!("skipped: only root can change the user");
        return;
    }
    for path in [setup.cluster.certs.path(), &setup.state(), &socket, dir.path()] {
        let all = std::fs::Permissions::from_mode(0o777);
        std::fs::set_permissions(path, all).unwrap();
    }
    let file = dir.path().join("stranger.yaml");
    let text = format!(
        "state_dir: {}\nadmin: {{bind: '127.0.0.1:0'}}\nupstreams: [{{name: u, endpoints: \
         ['127.0.0.1:1']}}]\nlisteners: [{{name: l, mode: passthrough, bind: ['{}'], upstream: u}}]\n",
        setup.state().display(),
        setup.address
    );
    std::fs::write(&file, text).unwrap();
    // The other user may not be able to reach the binary. A process of its own copies it: a child
    // of another test would inherit the copy open for writing, and such a file cannot be executed.
    let binary = dir.path().join("jackstay");
    let copy = [env!("CARGO_BIN_EXE_jackstay").as_ref(), binary.as_os_str()];
    assert!(std::process::Command::new("cp").args(copy).status().unwrap().success());
    let mut stranger = start_as(&binary, &file, &["--take-over"], NOBODY);
    assert_eq!(stranger.wait_exit().await.code(), Some(1), "{}", stranger.output());
    stranger.wait_output("cannot take over").await;
    setup.process.wait_output("user 65534 is not trusted").await;
    assert!(setup.process.is_running());

    // The reverse: sockets of another user are not trusted.
    let state = dir.path().join("state");
    std::fs::create_dir(&state).unwrap();
    std::os::unix::fs::chown(&state, Some(NOBODY), None).unwrap();
    let text = std::fs::read_to_string(&file).unwrap();
    let text = text.replace(&setup.state().display().to_string(), &state.display().to_string());
    std::fs::write(&file, text.replace(&setup.address.to_string(), "127.0.0.1:0")).unwrap();
    let mut stranger = start_as(&binary, &file, &[], NOBODY);
    stranger.wait_output("listening").await;
    support::until("the socket exists", async || state.join("take-over.sock").exists()).await;
    setup.change(|config| config.state_dir = Some(state.clone()));
    let mut new = setup.start(&["--take-over"]);
    assert_eq!(new.wait_exit().await.code(), Some(1), "{}", new.output());
    new.wait_output("it runs as user 65534, which is not trusted").await;
    stranger.signal("KILL");
}

/// The service manager listens before jackstay starts (`LISTEN_FDS`).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn socket_of_the_service_manager_is_used_and_handed_over() {
    let mut setup = Setup::new(1, 1).await;
    setup.process.signal("TERM");
    setup.process.wait_exit().await;
    // A client connects before jackstay is started.
    let socket = TcpListener::bind(setup.address).unwrap();
    let mut early = TcpStream::connect(setup.address).unwrap();
    setup.process = setup.start_with(socket.into());
    setup.process.wait_output("listening").await;
    // A response to a request without TLS shows that the connection was accepted.
    early.set_read_timeout(Some(PROCESS_TIMEOUT)).unwrap();
    early.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let mut response = Vec::new();
    let _ = BufReader::new(early).read_until(0, &mut response);
    assert!(!response.is_empty(), "{}", setup.process.output());
    let load = Load::start(&setup).await;
    load.wait_progress().await;
    // The next process takes the socket over.
    let new = setup.start(&["--take-over"]);
    assert!(setup.replace(new).wait_exit().await.success());
    load.wait_progress().await;
    load.end().await;
}
