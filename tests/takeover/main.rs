//! A running binary is replaced by a new one under load, and nobody notices.
//!
//! The short form replaces it three times, the long one (`JACKSTAY_LONG=1 cargo test --test takeover`)
//! twenty times.

#![cfg(feature = "demo")]

#[path = "../support/mod.rs"]
mod support;

mod load;
mod setup;

use crate::load::Load;
use crate::setup::{Managed, PATIENCE, Process, Setup, address};
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

/// No request fails, no watch breaks or has to list, no event is lost or comes twice; whatever the
/// numbers of workers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replaced_under_load() {
    let rounds = if long_form() { 20 } else { 3 };
    let mut setup = Setup::new(2, 1).await;
    let load = Load::start(&setup).await;
    load.goes_on().await;
    for round in 0..rounds {
        setup.change(|config| config.workers = [2, 3, 1][round % 3]);
        let new = setup.start(&["--take-over"]);
        let mut old = setup.replace(new);
        let status = old.ended().await;
        assert!(status.success(), "{status}:\n{}", old.said());
        old.says("draining: a new process has taken over").await;
        old.says("handed over: this process drains and ends").await;
        load.goes_on().await;
        let events = setup.page("/events").await;
        assert!(events.contains("taken over: this process accepts connections"), "{events}");
    }
    let report = load.end().await;
    println!("replaced {rounds} times: {report}");
}

/// With L4 an upgrade costs a connection nothing before the end of the drain: it goes on through the
/// old process, while the new one has whatever comes from now on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flows_outlive_the_take_over_until_the_drain_is_over() {
    let mut setup = Setup::with(1, |config| *config = passthrough_config(config.clone())).await;
    let who = setup.cluster.certs.credentials();
    let before = Client::connect(setup.address, &who).await.unwrap();
    let mut watch = before.watch(&format!("{CONFIGMAPS}?watch=1")).await.unwrap();
    let new = setup.start(&["--take-over"]);
    let mut old = setup.replace(new);
    old.says("draining: a new process has taken over").await;
    let after = Client::connect(setup.address, &who).await.unwrap();
    assert_eq!(after.get(CONFIGMAPS).await.unwrap().status, 200);
    assert_eq!(before.get(CONFIGMAPS).await.unwrap().status, 200);
    assert!(old.is_running(), "{}", old.said());
    let status = setup.page("/status").await;
    assert!(status.contains(r#""flows": 1"#), "the new process has its own: {status}");
    // What is left at the end is reset: it does not look like an end.
    let status = old.ended().await;
    assert!(status.success(), "{status}:\n{}", old.said());
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

/// One command in a unit: the service manager is told of the new main process, and hears nothing
/// of an end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_signal_starts_the_binary_again() {
    let mut setup = Setup::new(1, 1).await;
    let load = Load::start(&setup).await;
    let manager = Managed::new();
    let new = setup.start_under(&manager, &["--take-over"]);
    setup.replace(new).ended().await;
    assert_eq!(manager.hears(), "READY=1");
    load.goes_on().await;

    setup.process.signal("USR2");
    let main = manager.hears();
    let pid = main.strip_prefix("MAINPID=").expect(&main).to_owned();
    assert_eq!(manager.hears(), "READY=1");
    let status = setup.process.ended().await;
    assert!(status.success(), "{status}:\n{}", setup.process.said());
    setup.process.becomes(&pid);
    load.goes_on().await;
    let report = load.end().await;
    println!("replaced by a signal: {report}");

    setup.process.signal("TERM");
    assert_eq!(manager.hears(), "STOPPING=1");
}

/// The first signal lets what runs finish, for as long as it is configured; the second one does not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_signal_ends_the_drain() {
    let cluster = TestCluster::new(1);
    for second in ["TERM", "INT"] {
        let mut process = Process::pass_through(cluster.addresses()[0]);
        let address = address(&process.says("listening").await);
        // TLS is from end to end: nobody can tell this client that it should go.
        let client = Client::connect(address, &cluster.certs.credentials()).await.unwrap();
        process.signal("TERM");
        process.says("draining").await;
        assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 200, "what runs goes on");
        assert!(process.is_running());
        process.signal(second);
        let status = process.ended().await;
        assert!(status.success(), "{status}:\n{}", process.said());
        let last = process.says("drain ended; closing open connections").await;
        assert!(last.contains("connections=1"), "{last}");
        assert!(soon("its end", client.get(CONFIGMAPS)).await.is_err());
        // That nobody looks any more is no news of the apiserver.
        let said = process.said();
        let (_, end) = said.split_once(&last).unwrap();
        assert!(!end.contains("not connected"), "{end}");
    }
}

/// Who is told to end is that also while it starts, for as long as that may take.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_that_hangs_is_ended() {
    let mut setup = Setup::new(1, 1).await;
    setup.process.signal("TERM");
    setup.process.ended().await;
    let state = tempfile::tempdir().unwrap();
    setup.change(|config| config.state_dir = Some(state.path().to_owned()));
    let silent = UnixListener::bind(state.path().join("take-over.sock")).unwrap();
    for signal in ["TERM", "INT"] {
        let mut new = setup.start(&["--take-over"]);
        // It is asked for its sockets, and has nothing to say.
        let asked = silent.accept().unwrap();
        new.signal(signal);
        assert!(new.ended().await.success(), "{}", new.said());
        new.says("termination signal before the start was complete").await;
        drop(asked);
    }
}

/// Until the new process serves it may fail in every way: the old one does not care.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_process_that_fails_changes_nothing() {
    let mut setup = Setup::new(1, 1).await;
    let load = Load::start(&setup).await;

    // It cannot have all of its addresses.
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let before = setup.config.clone();
    setup.change(|config| also(config, "other", taken.local_addr().unwrap()));
    let mut new = setup.start(&["--take-over"]);
    assert_eq!(new.ended().await.code(), Some(1), "{}", new.said());
    new.says("taking over from a running process").await;
    new.says("another process listens there").await;

    // Its configuration is wrong.
    setup.change(|config| config.listeners[0].upstream = "nowhere".into());
    let mut new = setup.start(&["--take-over"]);
    assert_eq!(new.ended().await.code(), Some(2), "{}", new.said());

    // It is gone before it has said that it serves.
    setup.change(|config| *config = before.clone());
    for _ in 0..3 {
        let stream = UnixStream::connect(setup.state().join("take-over.sock")).unwrap();
        (&stream).write_all(b"jackstay take-over 1\n").unwrap();
        let mut line = Vec::new();
        BufReader::new(&stream).read_until(b'\n', &mut line).unwrap();
        assert_eq!(line, b"sockets 2\n", "the listener's and the admin endpoint's");
    }

    // It forgot the flag.
    let mut new = setup.start(&[]);
    assert_eq!(new.ended().await.code(), Some(1), "{}", new.said());
    new.says("`--take-over`").await;

    load.goes_on().await;
    assert!(setup.process.is_running());
    // And it can still be replaced.
    let new = setup.start(&["--take-over"]);
    assert!(setup.replace(new).ended().await.success());
    load.goes_on().await;
    load.end().await;
}

/// A listener more, as the first one, at another address.
fn also(config: &mut Config, name: &str, address: SocketAddr) {
    let mut listener = config.listeners[0].clone();
    listener.name = name.into();
    listener.bind = vec![address];
    config.listeners.push(listener);
}

/// What both name changes hands, what only the new one names is bound, what only the old one named
/// is closed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_new_configuration_may_name_other_addresses() {
    let mut setup = Setup::new(1, 1).await;
    let load = Load::start(&setup).await;
    let (first, second) = (refusing_address(), refusing_address());
    setup.change(|config| also(config, "second", first));
    let new = setup.start(&["--take-over"]);
    setup.replace(new).ended().await;
    assert!(!is_refused(first));
    load.goes_on().await;
    setup.change(|config| config.listeners[1].bind = vec![second]);
    let new = setup.start(&["--take-over"]);
    let mut old = setup.replace(new);
    assert!(old.ended().await.success());
    assert!(is_refused(first) && !is_refused(second));
    setup.process.says("sockets that no listener wants are closed").await;
    load.goes_on().await;
    load.end().await;
}

/// Root may, the same user may, others may not, even where the mode of the socket lets them in.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stranger_gets_nothing() {
    use std::os::unix::fs::PermissionsExt;
    const NOBODY: u32 = 65534;
    let mut setup = Setup::new(1, 1).await;
    let socket = setup.state().join("take-over.sock");
    let dir = tempfile::tempdir().unwrap();
    if std::os::unix::fs::chown(dir.path(), Some(NOBODY), None).is_err() {
        println!("not run: only root can be somebody else");
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
    // The binary may stand where others cannot go. Copied by a process of its own: what another test
    // starts meanwhile would inherit a copy that is open for writing, and such a file cannot be run.
    let binary = dir.path().join("jackstay");
    let copy = [env!("CARGO_BIN_EXE_jackstay").as_ref(), binary.as_os_str()];
    assert!(std::process::Command::new("cp").args(copy).status().unwrap().success());
    let mut stranger = Process::start_as(&binary, &file, &["--take-over"], NOBODY);
    assert_eq!(stranger.ended().await.code(), Some(1), "{}", stranger.said());
    stranger.says("cannot take over").await;
    setup.process.says("user 65534 is not trusted").await;
    assert!(setup.process.is_running());

    // The other way round: whose sockets are not to be trusted.
    let state = dir.path().join("state");
    std::fs::create_dir(&state).unwrap();
    std::os::unix::fs::chown(&state, Some(NOBODY), None).unwrap();
    let text = std::fs::read_to_string(&file).unwrap();
    let text = text.replace(&setup.state().display().to_string(), &state.display().to_string());
    std::fs::write(&file, text.replace(&setup.address.to_string(), "127.0.0.1:0")).unwrap();
    let mut stranger = Process::start_as(&binary, &file, &[], NOBODY);
    stranger.says("listening").await;
    support::until("its socket is there", async || state.join("take-over.sock").exists()).await;
    setup.change(|config| config.state_dir = Some(state.clone()));
    let mut new = setup.start(&["--take-over"]);
    assert_eq!(new.ended().await.code(), Some(1), "{}", new.said());
    new.says("it runs as user 65534, which is not trusted").await;
    stranger.signal("KILL");
}

/// The service manager listens before anybody serves (`LISTEN_FDS`).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_socket_of_the_service_manager() {
    let mut setup = Setup::new(1, 1).await;
    setup.process.signal("TERM");
    setup.process.ended().await;
    // Somebody connects before it is started.
    let socket = TcpListener::bind(setup.address).unwrap();
    let mut early = TcpStream::connect(setup.address).unwrap();
    setup.process = setup.start_with(socket.into());
    setup.process.says("listening").await;
    // No TLS: an answer, if only an alert, is a sign that it was accepted.
    early.set_read_timeout(Some(PATIENCE)).unwrap();
    early.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    let _ = BufReader::new(early).read_until(0, &mut answer);
    assert!(!answer.is_empty(), "{}", setup.process.said());
    let load = Load::start(&setup).await;
    load.goes_on().await;
    // And it is handed on.
    let new = setup.start(&["--take-over"]);
    assert!(setup.replace(new).ended().await.success());
    load.goes_on().await;
    load.end().await;
}
