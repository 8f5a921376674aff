//! Bytes of another process during a takeover.

use std::io::Write;
use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::LazyLock;

use jackstay::app::shared_sockets::SentSockets;
use jackstay::app::takeover::{Found, Offer, Request, TakeoverRequest, ask, hand_over};
use jackstay_sys::process::descriptor_passing;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::mpsc::unbounded_channel;

/// The bytes of an input that stand for a listening socket and for a descriptor that is none. No message has them.
const SOCKET: u8 = 1;
const OTHER: u8 = 2;
/// Maximum of an input in bytes, so that its messages fit into the buffers of a socket.
const MAX_INPUT: usize = 256;
/// What a new process sends in a takeover, and the last line of the old one.
const NEW_PROCESS: &[u8] = b"jackstay take-over 1\nserving\n";
/// What a new process sends that only starts beside one that drains.
const IF_DRAINING: &[u8] = b"jackstay take-over 1 if draining\n";
const LEFT: &[u8] = b"left\n";

static LISTENER: LazyLock<TcpListener> =
    LazyLock::new(|| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap());
static UDP: LazyLock<UdpSocket> =
    LazyLock::new(|| UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap());

/// The messages of a peer: of an old process, which sends sockets, and of a new one. A side succeeds only if the peer
/// follows the protocol, and sockets are released only then.
pub(super) fn takeover(bytes: &[u8]) {
    let bytes = &bytes[..bytes.len().min(MAX_INPUT)];
    // Timers of the protocol run out at once, because the clock is paused.
    let runtime = Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    old_process_sends(bytes, &runtime);
    new_process_sends(bytes, &runtime);
}

fn old_process_sends(bytes: &[u8], runtime: &Runtime) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    send(&theirs, bytes);
    theirs.shutdown(std::net::Shutdown::Write).unwrap();
    let Ok(Found::Predecessor(predecessor, sockets)) = ask(ours, Request::TakeOver) else { return };
    let line = bytes.iter().position(|byte| *byte == b'\n').expect("a line");
    let (line, rest) = (&bytes[..line], &bytes[line + 1..]);
    let prefix = if predecessor.is_draining() { "draining " } else { "sockets " };
    let count = std::str::from_utf8(line).unwrap().strip_prefix(prefix).unwrap();
    assert_eq!(count.parse(), Ok(sockets.len()));
    let (sent, rest) = rest.split_at(sockets.len());
    assert!(sent.iter().all(|byte| *byte == SOCKET), "{sent:?}");
    let replaced = runtime.block_on(predecessor.replace());
    assert_eq!(replaced.is_ok(), rest.starts_with(LEFT), "{replaced:?}");
}

fn new_process_sends(bytes: &[u8], runtime: &Runtime) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    send(&theirs, bytes);
    theirs.shutdown(std::net::Shutdown::Write).unwrap();
    ours.set_nonblocking(true).unwrap();
    let (requests, mut received) = unbounded_channel();
    let serve = async {
        let mut stream = tokio::net::UnixStream::from_std(ours).unwrap();
        let result = hand_over(&mut stream, &requests).await;
        drop(requests);
        result
    };
    let answer =
        async {
            let (mut duplicated, mut released) = (false, false);
            while let Some(request) = received.recv().await {
                match request {
                    TakeoverRequest::DuplicateSockets { request: Request::IfDraining, reply } => {
                        drop(reply.send(Ok(Offer::Nothing)));
                    }
                    TakeoverRequest::DuplicateSockets { request: Request::TakeOver, reply } => {
                        duplicated = true;
                        let copy = LISTENER.as_fd().try_clone_to_owned();
                        drop(reply.send(
                            copy.map(|copy| Offer::Sockets(vec![copy], SentSockets::default())),
                        ));
                    }
                    TakeoverRequest::ReleaseSockets { .. } => released = true,
                }
            }
            (duplicated, released)
        };
    let (result, (duplicated, released)) = runtime.block_on(async { tokio::join!(serve, answer) });
    let request = NEW_PROCESS.split_inclusive(|byte| *byte == b'\n').next().unwrap_or_default();
    assert_eq!(duplicated, bytes.starts_with(request));
    assert_eq!(released, bytes.starts_with(NEW_PROCESS), "{result:?}");
    assert_eq!(matches!(result, Ok(true)), released, "{result:?}");
    let ends = matches!(result, Ok(false));
    // A new process that goes before the end of its request is no failure.
    let incomplete = !bytes.contains(&b'\n');
    assert!(ends || !bytes.starts_with(IF_DRAINING), "{result:?}");
    assert!(!ends || bytes.starts_with(IF_DRAINING) || incomplete, "{result:?}");
}

/// Sends an input, with a descriptor where a byte stands for one.
fn send(mut socket: &UnixStream, bytes: &[u8]) {
    let carry = |descriptor: BorrowedFd<'_>| descriptor_passing::send(socket.as_fd(), descriptor);
    for piece in bytes.chunk_by(|one, two| *one > OTHER && *two > OTHER) {
        match piece {
            [SOCKET] => carry(LISTENER.as_fd()).unwrap(),
            [OTHER] => carry(UDP.as_fd()).unwrap(),
            _ => socket.write_all(piece).unwrap(),
        }
    }
}
