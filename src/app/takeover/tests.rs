//! The conversation, with a process on each side that may stop at any point of it.

use super::*;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::PermissionsExt;
use tokio::sync::mpsc::unbounded_channel;
use tokio::task::{JoinHandle, spawn_blocking};

/// A process that serves on a socket, and where it is asked.
struct Old {
    dir: tempfile::TempDir,
    address: SocketAddr,
    /// Ends when it has left its socket; whether it was asked to.
    left: JoinHandle<Option<i32>>,
    door: JoinHandle<()>,
}

impl Old {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let door = Door::open(&path(dir.path()), false).unwrap();
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = socket.local_addr().unwrap();
        let (wishes, mut asked) = unbounded_channel();
        let left = tokio::spawn(async move {
            while let Some(wish) = asked.recv().await {
                match wish {
                    Wish::Sockets(reply) => {
                        let copy = socket.as_fd().try_clone_to_owned();
                        drop(reply.send(copy.map(|copy| vec![copy])));
                    }
                    Wish::Leave { pid, done: _done } => return pid,
                }
            }
            None
        });
        Self { dir, address, left, door: tokio::spawn(door.answer(wishes)) }
    }

    async fn ask(&self) -> Result<Option<(Predecessor, InheritedSockets)>, TakeOverError> {
        let path = path(self.dir.path());
        spawn_blocking(move || ask(&path)).await.unwrap()
    }

    /// What it answers to a line.
    async fn hears(&self, line: &'static str) -> String {
        let path = path(self.dir.path());
        let talk = move || {
            let mut stream = BlockingStream::connect(path).unwrap();
            stream.write_all(line.as_bytes()).unwrap();
            stream.shutdown(std::net::Shutdown::Write).unwrap();
            let mut answer = String::new();
            // A process that hangs up with our bytes unread resets.
            let _ = stream.read_to_string(&mut answer);
            answer
        };
        spawn_blocking(talk).await.unwrap()
    }
}

#[tokio::test]
async fn sockets_change_hands() {
    let old = Old::start();
    let waiting = std::net::TcpStream::connect(old.address).unwrap();
    let (predecessor, mut sockets) = old.ask().await.unwrap().expect("somebody");
    assert_eq!(predecessor.pid, i32::try_from(std::process::id()).ok());
    let socket = sockets.take(old.address, false).pop().expect("its socket");
    assert!(!old.left.is_finished());
    predecessor.leave().await.unwrap();
    assert_eq!(old.left.await.unwrap(), i32::try_from(std::process::id()).ok());
    old.door.await.unwrap();
    // Whoever waited in the queue is ours now.
    let (_, from) = socket.accept().unwrap();
    assert_eq!(from, waiting.local_addr().unwrap());
    // Nobody answers there any more.
    assert!(ask(&path(old.dir.path())).unwrap().is_none());
}

#[tokio::test]
async fn one_that_goes_away_changes_nothing() {
    let old = Old::start();
    for _ in 0..3 {
        let (predecessor, sockets) = old.ask().await.unwrap().expect("somebody");
        assert_eq!(sockets.len(), 1);
        drop(predecessor);
    }
    assert!(!old.left.is_finished() && !old.door.is_finished());
    let (predecessor, _) = old.ask().await.unwrap().expect("it still answers");
    predecessor.leave().await.unwrap();
}

#[tokio::test]
async fn what_is_not_understood_changes_nothing() {
    let old = Old::start();
    assert_eq!(
        old.hears("jackstay take-over 2\n").await,
        "this process understands `jackstay take-over 1`\n"
    );
    let long: &str = "0123456789abcdef".repeat(100).leak();
    for nonsense in ["", "jackstay", "\n", long] {
        let answer = old.hears(nonsense).await;
        assert!(!answer.contains("sockets"), "{nonsense}: {answer}");
    }
    // The word that it serves is for later.
    assert_eq!(old.hears("jackstay take-over 1\nleft\n").await.lines().next(), Some("sockets 1"));
    assert!(!old.left.is_finished() && !old.door.is_finished());
    assert!(old.ask().await.unwrap().is_some());
}

/// Whoever says nothing holds up others for seconds: before it asks, and before it begins.
#[tokio::test]
async fn silence_does_not_hold_up_others() {
    let old = Old::start();
    let _silent = BlockingStream::connect(path(old.dir.path())).unwrap();
    let (first, _) = old.ask().await.unwrap().expect("its turn");
    tokio::time::pause();
    tokio::time::advance(BEGIN + Duration::from_secs(1)).await;
    tokio::time::resume();
    let (second, _) = old.ask().await.unwrap().expect("its turn");
    assert!(first.leave().await.is_err(), "too late");
    assert!(!old.left.is_finished());
    second.leave().await.unwrap();
}

#[tokio::test]
async fn an_old_one_that_says_something_else() {
    let dir = tempfile::tempdir().unwrap();
    let path = path(dir.path());
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    for (answer, expected) in [
        ("no\n", "the other process says: no"),
        ("sockets 100000\n", "the other process says: sockets 100000"),
        ("sockets 1\nx", "not one descriptor"),
        ("sockets 1\n", "the other process ended the conversation"),
        ("", "the other process ended the conversation"),
    ] {
        let asked = {
            let path = path.clone();
            spawn_blocking(move || ask(&path))
        };
        let (mut stream, _) = listener.accept().unwrap();
        let mut line = [0; ASK.len() + 1];
        stream.read_exact(&mut line).unwrap();
        stream.write_all(answer.as_bytes()).unwrap();
        drop(stream);
        let error = asked.await.unwrap().unwrap_err().to_string();
        let said = format!("cannot take over by {}: {expected}; what runs goes on", path.display());
        assert_eq!(error, said);
    }
}

/// One that hangs: as many have asked it as may wait.
#[test]
fn an_old_one_that_hangs_is_not_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let path = path(dir.path());
    let hanging = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
    hanging.bind(&SockAddr::unix(&path).unwrap()).unwrap();
    hanging.listen(0).unwrap();
    let mut waiting = Vec::new();
    while let Ok(stream) = knock(&path) {
        waiting.push(stream);
    }
    let error = ask(&path).unwrap_err().to_string();
    assert!(error.contains("many have asked there already and none was answered"), "{error}");
    assert!(error.ends_with("what runs goes on"), "{error}");
}

#[tokio::test]
async fn doors() {
    let dir = tempfile::tempdir().unwrap();
    let path = path(dir.path());
    assert!(ask(&path).unwrap().is_none(), "no file");
    let first = Door::open(&path, false).unwrap();
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let second = Door::open(&path, false).unwrap_err();
    assert!(second.to_string().contains("another process"), "{second}");
    let second = Door::open(&path, true).unwrap();
    drop(first);
    assert!(BlockingStream::connect(&path).is_ok(), "the second one's");
    drop(second);
    assert!(ask(&path).unwrap().is_none(), "a file that nobody answers");
    Door::open(&path, false).unwrap();
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "nothing is left beside it");
    Door::open(&dir.path().join("x".repeat(200)), false).unwrap_err();
}

#[test]
fn who_is_trusted() {
    let own = descriptor_passing::effective_user();
    assert!(is_trusted(own) && is_trusted(0));
    assert!(!is_trusted(own + 1));
}
