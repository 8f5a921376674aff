//! The accept loop of a listener, the same for L7 and L4.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use jackstay_core::admission::Refusal;
use jackstay_sys::process::resource_limits;
use jackstay_sys::sockets::stream::{TcpListener, TcpStream};
use tokio::time::sleep;

use super::admission::listener_admission::ListenerAdmission;
use super::drain::DrainWatcher;

/// Pause after `accept` failed and no waiting connection could be reset.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// Accepts on one socket and passes each connection to `admit`, until `drain` starts. Then it admits the
/// connections that are already in the socket's queue, because closing the socket would reset them. A
/// forced drain does not admit them, since another process may accept them on the same socket. `max_unsent` bounds
/// the unsent bytes of each.
///
/// If the process is out of descriptors, waiting connections are reset, so that clients do not wait for
/// a response.
pub async fn until_drain(
    socket: TcpListener,
    max_unsent: u32,
    mut drain: DrainWatcher,
    admission: &ListenerAdmission,
    admit: impl Fn(TcpStream, SocketAddr),
) {
    // The socket may have had another mode, or be that of another version of this program.
    if let Err(error) = socket.configure_accepted(max_unsent) {
        admission.warn("accepted sockets lack options", error);
    }
    let mut spare = socket.spare_descriptor();
    let refused = |error: io::Error| {
        admission.count(Refusal::Descriptors);
        admission.warn(Refusal::Descriptors.reason(), error);
    };
    loop {
        let accepted = tokio::select! {
            biased;
            () = drain.started() => break,
            accepted = socket.accept() => accepted,
        };
        match accepted {
            Ok((stream, _)) if stream.has_reserved_descriptor() => {
                stream.close_with_reset();
                refused(resource_limits::out_of_descriptors());
            }
            Ok((stream, from)) => admit(stream, from),
            Err(error) if concerns_one_connection(&error) => {}
            Err(error) => match socket.reset_oldest_waiting(&mut spare) {
                Ok(()) => refused(error),
                // No connection is waiting.
                Err(reset) if reset.kind() == io::ErrorKind::WouldBlock => sleep(RETRY_PAUSE).await,
                Err(_) => {
                    admission.warn("connections cannot be accepted", error);
                    sleep(RETRY_PAUSE).await;
                }
            },
        }
    }
    if drain.is_forced() {
        return;
    }
    for (stream, from) in socket.close_and_accept_queued() {
        admit(stream, from);
    }
}

/// Whether an error of `accept` concerns one connection only (accept(2)).
fn concerns_one_connection(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::Interrupted
            | io::ErrorKind::WouldBlock
    )
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use jackstay_core::admission::{DEFAULT_LIMIT, MemoryBudget};

    use super::super::drain::{self, DrainTrigger};
    use super::*;
    use crate::observe::Metrics;
    use jackstay_sys::sockets::{listening, tcp_options};

    /// Puts five connections into the queue of a socket, starts the drain with `begin_drain`, and returns
    /// how many connections are admitted.
    async fn admitted_after(begin_drain: impl FnOnce(&DrainTrigger)) -> usize {
        let socket = listening::listen("127.0.0.1:0".parse().unwrap(), false).unwrap();
        let address = socket.local_addr().unwrap();
        let connect = |_| std::net::TcpStream::connect(address).unwrap();
        let _clients: Vec<_> = (0..5).map(connect).collect();
        let (trigger, drain) = drain::channel();
        begin_drain(&trigger);
        let count = Cell::new(0);
        accept(socket, drain, |_| count.set(count.get() + 1)).await;
        count.get()
    }

    async fn accept(
        socket: std::net::TcpListener,
        drain: DrainWatcher,
        admit: impl Fn(tokio::net::TcpStream),
    ) {
        let socket = tokio::net::TcpListener::from_std(socket).unwrap().into();
        let (metrics, memory) = (Metrics::new().listener("l"), MemoryBudget::new(DEFAULT_LIMIT));
        let admission = ListenerAdmission::new("l".to_owned(), metrics, memory);
        let admit = |stream: TcpStream, _| admit(stream.into_kernel().unwrap());
        until_drain(socket, tcp_options::MAX_UNSENT, drain, &admission, admit).await;
    }

    /// Such a socket comes from the service manager, or from another version of this program.
    #[tokio::test]
    async fn until_drain_sets_the_options_of_connections_on_a_socket_without_options() {
        let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        socket.set_nonblocking(true).unwrap();
        let address = socket.local_addr().unwrap();
        let (trigger, drain) = drain::channel();
        let options = Cell::new(None);
        let admit = |stream: tokio::net::TcpStream| {
            let keepalive = socket2::SockRef::from(&stream).keepalive().unwrap();
            options.set(Some((stream.nodelay().unwrap(), keepalive)));
            trigger.start(Duration::ZERO);
        };
        // The accept loop is polled first, and a connection has the options that its listening socket had.
        let ((), client) = tokio::join!(
            biased;
            accept(socket, drain, admit),
            tokio::net::TcpStream::connect(address)
        );
        client.unwrap();
        assert_eq!(options.get(), Some((true, true)));
    }

    #[tokio::test]
    async fn until_drain_admits_queued_connections_unless_drain_is_forced() {
        assert_eq!(admitted_after(|trigger| trigger.start(Duration::ZERO)).await, 5);
        assert_eq!(admitted_after(DrainTrigger::force).await, 0);
    }
}
