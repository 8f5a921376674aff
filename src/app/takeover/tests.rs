//! The takeover protocol, also with a peer that fails at one of its steps.

use super::*;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::PermissionsExt;
use tokio::sync::mpsc::unbounded_channel;
use tokio::task::{JoinHandle, spawn_blocking};

/// A running process: a listening socket, and the server that hands it over.
struct OldProcess {
    dir: tempfile::TempDir,
    address: SocketAddr,
    /// Serves the requests of the server. Returns the PID with the release request.
    released: JoinHandle<Option<i32>>,
    server: JoinHandle<()>,
}

impl OldProcess {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let server = TakeoverServer::listen(&socket_path(dir.path()), false).unwrap();
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = socket.local_addr().unwrap();
        let (sender, mut requests) = unbounded_channel();
        let released = tokio::spawn(async move {
            while let Some(request) = requests.recv().await {
                match request {
                    TakeoverRequest::DuplicateSockets(reply) => {
                        let copy = socket.as_fd().try_clone_to_owned();
                        drop(reply.send(copy.map(|copy| vec![copy])));
                    }
                    TakeoverRequest::ReleaseSockets { pid, done: _done } => return pid,
                }
            }
            None
        });
        Self { dir, address, released, server: tokio::spawn(server.serve(sender)) }
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
    predecessor.replace().await.unwrap();
    assert_eq!(old.released.await.unwrap(), i32::try_from(std::process::id()).ok());
    old.server.await.unwrap();
    // The connection that waited in the queue is accepted by the new process.
    let (_, from) = socket.accept().unwrap();
    assert_eq!(from, waiting.local_addr().unwrap());
    // The server has ended.
    assert!(request_sockets(&socket_path(old.dir.path())).unwrap().is_none());
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
async fn request_sockets_reports_unexpected_answers() {
    let dir = tempfile::tempdir().unwrap();
    let path = socket_path(dir.path());
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    for (answer, expected) in [
        ("no\n", "unexpected answer: no"),
        ("sockets 100000\n", "unexpected answer: sockets 100000"),
        ("sockets 1\nx", "not one descriptor"),
        ("sockets 1\n", "the other process closed the connection"),
        ("", "the other process closed the connection"),
    ] {
        let request = {
            let path = path.clone();
            spawn_blocking(move || request_sockets(&path))
        };
        let (mut stream, _) = listener.accept().unwrap();
        let mut line = [0; REQUEST.len() + 1];
        stream.read_exact(&mut line).unwrap();
        stream.write_all(answer.as_bytes()).unwrap();
        drop(stream);
        let error = request.await.unwrap().unwrap_err().to_string();
        let expected = format!(
            "cannot take over through {}: {expected}; the running process continues to serve",
            path.display()
        );
        assert_eq!(error, expected);
    }
}

#[test]
fn request_sockets_with_full_accept_queue_fails_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = socket_path(dir.path());
    let hanging = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
    hanging.bind(&SockAddr::unix(&path).unwrap()).unwrap();
    hanging.listen(0).unwrap();
    let mut waiting = Vec::new();
    while let Ok(stream) = connect(&path) {
        waiting.push(stream);
    }
    let error = request_sockets(&path).unwrap_err().to_string();
    assert!(error.contains("it does not answer, and its queue is full"), "{error}");
    assert!(error.ends_with("continues to serve"), "{error}");
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

#[test]
fn is_trusted_accepts_own_user_and_root() {
    let own = rustix::process::geteuid().as_raw();
    assert!(is_trusted(own) && is_trusted(0));
    assert!(!is_trusted(own + 1));
}
