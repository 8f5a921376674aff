//! The takeover protocol, also with a peer that fails at one of its steps.

use super::predecessor::connect;
use super::*;
use crate::app::shared_sockets::OtherOwners;
use crate::app::start_error::StartError;
use jackstay_core::takeover::hand_over::{Offered, offer};
use jackstay_sys::process::inherited_sockets::InheritedSockets;
use socket2::{Domain, SockAddr, Socket, Type};
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use tokio::sync::mpsc::unbounded_channel;
use tokio::task::{JoinHandle, spawn_blocking};

/// A running process: a listening socket, and the server that hands it over.
struct OldProcess {
    dir: tempfile::TempDir,
    address: SocketAddr,
    /// Serves the requests of the server. Returns the PID with the release request.
    released: JoinHandle<Option<i32>>,
    server: JoinHandle<()>,
    /// Dropped when the server shall stop.
    stop: Option<oneshot::Sender<Infallible>>,
}

/// The process that serves `path` and hands over its sockets, if one does.
fn request_sockets(path: &Path) -> Result<Option<(Predecessor, InheritedSockets)>, StartError> {
    match request(path, Request::TakeOver)? {
        Found::Predecessor(predecessor, sockets) => Ok(Some((predecessor, sockets))),
        Found::Nothing => Ok(None),
        other => panic!("{other:?}"),
    }
}

impl OldProcess {
    fn start() -> Self {
        Self::start_with(false)
    }

    fn start_with(draining: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let server = TakeoverServer::listen(&socket_path(dir.path()), false).unwrap();
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = socket.local_addr().unwrap();
        let (sender, mut requests) = unbounded_channel();
        let released = tokio::spawn(async move {
            while let Some(request) = requests.recv().await {
                match request {
                    TakeoverRequest::DuplicateSockets { request, reply } => {
                        let copies = vec![socket.as_fd().try_clone_to_owned().unwrap()];
                        drop(reply.send(Ok(match offer(draining, request) {
                            Offered::AdminSocket => Offer::Draining(copies),
                            Offered::Nothing => Offer::Nothing,
                            Offered::Sockets => Offer::Sockets(copies, SentSockets::default()),
                        })));
                    }
                    TakeoverRequest::ReleaseSockets { pid, done } => {
                        done.send(true).unwrap();
                        return pid;
                    }
                }
            }
            None
        });
        let (stop, stopped) = oneshot::channel();
        let server = tokio::spawn(async move {
            server.serve(sender, stopped, &Mutex::default()).await;
        });
        Self { dir, address, released, server, stop: Some(stop) }
    }

    async fn request(&self) -> Result<Option<(Predecessor, InheritedSockets)>, StartError> {
        let path = socket_path(self.dir.path());
        spawn_blocking(move || request_sockets(&path)).await.unwrap()
    }

    /// Sends a line, then the end of the stream, and returns the answer.
    async fn exchange(&self, line: &'static str) -> String {
        let path = socket_path(self.dir.path());
        let run = move || {
            let mut stream = BlockingStream::connect(path).unwrap();
            stream.write_all(line.as_bytes()).unwrap();
            stream.shutdown(std::net::Shutdown::Write).unwrap();
            let mut answer = String::new();
            // A close with unread bytes is a reset.
            let _ = stream.read_to_string(&mut answer);
            answer
        };
        spawn_blocking(run).await.unwrap()
    }
}

#[tokio::test]
async fn takeover_hands_over_sockets_and_their_queues() {
    let old = OldProcess::start();
    let waiting = std::net::TcpStream::connect(old.address).unwrap();
    let (predecessor, mut sockets) = old.request().await.unwrap().expect("a process serves");
    assert_eq!(predecessor.pid(), i32::try_from(std::process::id()).ok());
    let socket = sockets.take(old.address, false).pop().expect("its socket");
    assert!(!old.released.is_finished());
    assert!(predecessor.replace().await.unwrap(), "no other process has the sockets");
    assert_eq!(old.released.await.unwrap(), i32::try_from(std::process::id()).ok());
    old.server.await.unwrap();
    // The connection that waited in the queue is accepted by the new process.
    let (_, from) = socket.accept().unwrap();
    assert_eq!(from, waiting.local_addr().unwrap());
    // The server has ended.
    assert!(request_sockets(&socket_path(old.dir.path())).unwrap().is_none());
}

/// With and without `--take-over`.
#[tokio::test]
async fn request_to_a_process_that_drains_returns_what_is_left() {
    for wanted in [Request::TakeOver, Request::IfDraining] {
        let old = OldProcess::start_with(true);
        let path = socket_path(old.dir.path());
        let found = spawn_blocking(move || request(&path, wanted)).await.unwrap().unwrap();
        let Found::Predecessor(predecessor, mut sockets) = found else { panic!("{found:?}") };
        assert!(predecessor.is_draining());
        assert_eq!(sockets.take(old.address, false).len(), 1);
        predecessor.replace().await.unwrap();
        assert!(old.released.await.unwrap().is_some());
    }
}

#[tokio::test]
async fn request_if_draining_to_a_process_that_serves_takes_nothing() {
    let old = OldProcess::start();
    let path = socket_path(old.dir.path());
    for _ in 0..3 {
        let path = path.clone();
        let found = spawn_blocking(move || request(&path, Request::IfDraining)).await.unwrap();
        let Found::Serving(pid) = found.unwrap() else { panic!("it does not serve") };
        assert_eq!(pid, i32::try_from(std::process::id()).ok());
    }
    assert!(!old.released.is_finished() && !old.server.is_finished());
}

/// A process of a version that has only the first request, in its drain too.
#[tokio::test]
async fn request_if_draining_to_an_older_version_reports_that_it_serves() {
    let dir = tempfile::tempdir().unwrap();
    let path = socket_path(dir.path());
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let found = spawn_blocking(move || request(&path, Request::IfDraining));
    let (mut stream, _) = listener.accept().unwrap();
    stream.write_all(b"this process understands `jackstay take-over 1`\n").unwrap();
    assert!(matches!(found.await.unwrap().unwrap(), Found::Serving(_)));
}

/// The first version with this protocol closes the connection after `left`, and says nothing of a service manager.
#[tokio::test]
async fn takeover_from_the_first_version_does_not_know_whether_the_sockets_are_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let path = socket_path(dir.path());
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let asked = spawn_blocking(move || request_sockets(&path));
    let (mut stream, _) = listener.accept().unwrap();
    let expect = |stream: &mut BlockingStream, line: &[u8]| {
        let mut bytes = vec![0; line.len()];
        stream.read_exact(&mut bytes).unwrap();
        assert_eq!(bytes, line);
    };
    expect(&mut stream, b"jackstay take-over 1\n");
    stream.write_all(b"sockets 1\n").unwrap();
    descriptor_passing::send(stream.as_fd(), socket.as_fd()).unwrap();
    let (predecessor, mut sockets) = asked.await.unwrap().unwrap().expect("a process serves");
    assert_eq!(sockets.take(socket.local_addr().unwrap(), false).len(), 1);
    stream.write_all(b"left\n").unwrap();
    let replaced = tokio::spawn(predecessor.replace());
    spawn_blocking(move || expect(&mut stream, b"serving\n")).await.unwrap();
    assert!(!replaced.await.unwrap().unwrap());
}

/// The first version closes the connection after `left`, without reading `own`.
#[tokio::test]
async fn takeover_by_the_first_version_ends_with_left() {
    let old = OldProcess::start();
    let path = socket_path(old.dir.path());
    let run = move || {
        let mut stream = BlockingStream::connect(path).unwrap();
        stream.write_all(b"jackstay take-over 1\n").unwrap();
        let mut answer = [0; 10];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"sockets 1\n");
        descriptor_passing::receive(stream.as_fd()).unwrap();
        stream.write_all(b"serving\n").unwrap();
        let mut answer = [0; 5];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"left\n");
    };
    spawn_blocking(run).await.unwrap();
    assert!(old.released.await.unwrap().is_some());
    old.server.await.unwrap();
}

/// It ends while a new process waits for its answer.
#[tokio::test]
async fn request_to_a_process_that_ends_finds_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = socket_path(dir.path());
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let found = spawn_blocking(move || request(&path, Request::TakeOver));
    let (stream, _) = listener.accept().unwrap();
    // The connection may be closed before the socket.
    drop(stream);
    let again = listener.accept().unwrap();
    drop(listener);
    drop(again);
    assert!(matches!(found.await.unwrap().unwrap(), Found::Nothing));
}

#[tokio::test]
async fn takeover_with_disconnecting_new_process_leaves_the_old_one_serving() {
    let old = OldProcess::start();
    for _ in 0..3 {
        let (predecessor, sockets) = old.request().await.unwrap().expect("a process serves");
        assert_eq!(sockets.len(), 1);
        drop(predecessor);
    }
    assert!(!old.released.is_finished() && !old.server.is_finished());
    let (predecessor, _) = old.request().await.unwrap().expect("the server still answers");
    predecessor.replace().await.unwrap();
}

/// Only looking whether a process serves is no takeover, and neither is a request whose sender has gone meanwhile.
#[tokio::test]
async fn hand_over_warns_only_of_a_new_process_that_goes_after_it_got_sockets() {
    let (sender, mut requests) = unbounded_channel();
    let sent_to = OtherOwners::default();
    let owners = sent_to.clone();
    let control = tokio::spawn(async move {
        while let Some(TakeoverRequest::DuplicateSockets { request, reply }) = requests.recv().await
        {
            let offer = match request {
                Request::IfDraining => Offer::Nothing,
                Request::TakeOver => Offer::Sockets(Vec::new(), SentSockets::new([owners.clone()])),
            };
            drop(reply.send(Ok(offer)));
        }
    });
    for line in
        ["", "jackstay take-over 1", "jackstay take-over 1\n", "jackstay take-over 1 if draining\n"]
    {
        let (mut new, old) = BlockingStream::pair().unwrap();
        old.set_nonblocking(true).unwrap();
        let mut old = UnixStream::from_std(old).unwrap();
        new.write_all(line.as_bytes()).unwrap();
        drop(new);
        let result = hand_over(&mut old, &sender).await;
        assert!(matches!(result, Ok(false)), "{line:?}: {result:?}");
    }
    let (mut new, old) = BlockingStream::pair().unwrap();
    old.set_nonblocking(true).unwrap();
    let mut old = UnixStream::from_std(old).unwrap();
    new.write_all(b"jackstay take-over 1\n").unwrap();
    new.shutdown(std::net::Shutdown::Write).unwrap();
    let error = hand_over(&mut old, &sender).await.unwrap_err();
    assert_eq!(error.to_string(), "the new process closed the connection");
    assert!(!sent_to.exist(), "its sockets were closed with it");
    // One that sends anything else, or nothing in time, may still have them.
    let (mut new, old) = BlockingStream::pair().unwrap();
    old.set_nonblocking(true).unwrap();
    let mut old = UnixStream::from_std(old).unwrap();
    new.write_all(b"jackstay take-over 1\nleft\n").unwrap();
    let error = hand_over(&mut old, &sender).await.unwrap_err();
    assert_eq!(error.to_string(), "unexpected message: left");
    assert!(sent_to.exist());
    drop(sender);
    control.await.unwrap();
}

/// A reload of `state_dir` stops the server while a new process has the sockets.
#[tokio::test]
async fn server_that_is_stopped_hears_a_new_process_to_its_end() {
    let mut old = OldProcess::start();
    let (predecessor, _sockets) = old.request().await.unwrap().expect("a process serves");
    drop(old.stop.take());
    // The path is free for another server of this process.
    let path = socket_path(old.dir.path());
    while connect(&path).is_ok() {
        tokio::task::yield_now().await;
    }
    drop(TakeoverServer::listen(&path, false).unwrap());
    assert!(predecessor.replace().await.unwrap());
    assert!(old.released.await.unwrap().is_some());
    // Without a new process it stops at once.
    let mut old = OldProcess::start();
    drop(old.stop.take());
    old.server.await.unwrap();
    assert_eq!(old.released.await.unwrap(), None);
}

/// After a reload of `state_dir` the server of the new path waits until that of the old one has served its process.
#[tokio::test]
async fn servers_that_share_a_turn_serve_one_new_process_at_a_time() {
    let (sender, mut requests) = unbounded_channel();
    let turn = Arc::<Mutex<()>>::default();
    let start = |path: &Path| {
        let server = TakeoverServer::listen(path, false).unwrap();
        let (sender, turn) = (sender.clone(), Arc::clone(&turn));
        let (stop, stopped) = oneshot::channel();
        (tokio::spawn(async move { server.serve(sender, stopped, &turn).await }), stop)
    };
    let ask = |path: &Path| {
        let mut stream = BlockingStream::connect(path).unwrap();
        stream.write_all(b"jackstay take-over 1\n").unwrap();
        stream
    };
    let dir = tempfile::tempdir().unwrap();
    let paths = ["old.sock", "new.sock"].map(|name| dir.path().join(name));
    let [(_old, _old_stop), (_new, _new_stop)] = [start(&paths[0]), start(&paths[1])];
    let first = ask(&paths[0]);
    let Some(TakeoverRequest::DuplicateSockets { reply, .. }) = requests.recv().await else {
        panic!("no request")
    };
    reply.send(Ok(Offer::Sockets(Vec::new(), SentSockets::default()))).unwrap();
    let _second = ask(&paths[1]);
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert!(requests.try_recv().is_err(), "two new processes get sockets");
    drop(first);
    assert!(matches!(requests.recv().await, Some(TakeoverRequest::DuplicateSockets { .. })));
}

/// It was stopped for longer than the old process waits.
#[tokio::test]
async fn new_process_that_is_late_asks_again() {
    let old = OldProcess::start();
    let (late, _) = old.request().await.unwrap().expect("the server answers");
    tokio::time::pause();
    tokio::time::advance(SERVE_TIMEOUT + Duration::from_secs(1)).await;
    tokio::time::resume();
    // The server answers the next process, so it has closed the connection of the first one.
    drop(old.request().await.unwrap().expect("the server answers"));
    assert!(late.replace_at(&socket_path(old.dir.path())).await.unwrap());
    assert!(old.released.await.unwrap().is_some());
}

/// Without a process at the path, the old one has ended.
#[tokio::test]
async fn new_process_whose_predecessor_has_ended_reports_the_closed_connection() {
    let old = OldProcess::start();
    let (predecessor, _) = old.request().await.unwrap().expect("the server answers");
    old.server.abort();
    assert!(old.server.await.is_err());
    assert!(predecessor.replace_at(&socket_path(old.dir.path())).await.is_err());
}

#[tokio::test]
async fn takeover_with_unknown_messages_is_refused() {
    let old = OldProcess::start();
    assert_eq!(
        old.exchange("jackstay take-over 2\n").await,
        "this process understands `jackstay take-over 1`\n"
    );
    let long: &str = "0123456789abcdef".repeat(100).leak();
    for nonsense in ["", "jackstay", "\n", long] {
        let answer = old.exchange(nonsense).await;
        assert!(!answer.contains("sockets"), "{nonsense}: {answer}");
    }
    // `left` is not the message that the server expects after the sockets.
    assert_eq!(
        old.exchange("jackstay take-over 1\nleft\n").await.lines().next(),
        Some("sockets 1")
    );
    assert!(!old.released.is_finished() && !old.server.is_finished());
    assert!(old.request().await.unwrap().is_some());
}

/// A process that sends no request, and one that does not serve, delay others only until their timeouts.
#[tokio::test]
async fn takeover_by_a_silent_process_times_out() {
    let old = OldProcess::start();
    let _silent = BlockingStream::connect(socket_path(old.dir.path())).unwrap();
    let (first, _) = old.request().await.unwrap().expect("the server answers");
    tokio::time::pause();
    tokio::time::advance(SERVE_TIMEOUT + Duration::from_secs(1)).await;
    tokio::time::resume();
    let (second, _) = old.request().await.unwrap().expect("the server answers");
    assert!(first.replace().await.is_err(), "its time to serve is over");
    assert!(!old.released.is_finished());
    second.replace().await.unwrap();
}

#[tokio::test]
async fn request_reports_unexpected_answers_and_what_is_known_of_the_process() {
    let dir = tempfile::tempdir().unwrap();
    let path = socket_path(dir.path());
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    listener.set_nonblocking(true).unwrap();
    let serves = "the running process continues to serve";
    let unknown = "the log of the other process has its side";
    for (answer, expected, state) in [
        ("no\n", "unexpected answer: no", serves),
        ("serving\n", "unexpected answer: serving", serves),
        ("sockets 100000\n", "unexpected answer: sockets 100000", serves),
        ("sockets 1\nx", "its sockets did not arrive: not one descriptor", unknown),
        ("sockets 1\n", "its sockets did not arrive: unexpected end of file", unknown),
        ("", "the other process closed the connection", unknown),
    ] {
        let asked = {
            let path = path.clone();
            spawn_blocking(move || request(&path, Request::TakeOver))
        };
        // A connection that is closed without an answer is followed by others.
        while !asked.is_finished() {
            let Ok((mut stream, _)) = listener.accept() else {
                tokio::task::yield_now().await;
                continue;
            };
            stream.set_nonblocking(false).unwrap();
            let mut line = [0; REQUEST.len() + 1];
            if stream.read_exact(&mut line).is_ok() {
                stream.write_all(answer.as_bytes()).unwrap();
            }
        }
        let error = asked.await.unwrap().unwrap_err().to_string();
        let expected = format!("cannot take over through {}: {expected}; {state}", path.display());
        assert_eq!(error, expected);
    }
}

#[test]
fn request_with_full_accept_queue_returns_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = socket_path(dir.path());
    let hanging = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
    hanging.bind(&SockAddr::unix(&path).unwrap()).unwrap();
    hanging.listen(0).unwrap();
    let mut waiting = Vec::new();
    while let Ok(stream) = connect(&path) {
        waiting.push(stream);
    }
    assert!(matches!(request(&path, Request::TakeOver).unwrap(), Found::Silent(None)));
}

#[tokio::test]
async fn listen_without_replace_refuses_a_served_socket_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = socket_path(dir.path());
    assert!(request_sockets(&path).unwrap().is_none(), "no file");
    let first = TakeoverServer::listen(&path, false).unwrap();
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let second = TakeoverServer::listen(&path, false).unwrap_err();
    assert!(second.to_string().contains("another process"), "{second}");
    let second = TakeoverServer::listen(&path, true).unwrap();
    drop(first);
    assert!(BlockingStream::connect(&path).is_ok(), "the second server listens");
    drop(second);
    assert!(request_sockets(&path).unwrap().is_none(), "a stale file");
    TakeoverServer::listen(&path, false).unwrap();
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "no temporary file is left");
    TakeoverServer::listen(&dir.path().join("x".repeat(200)), false).unwrap_err();
}
