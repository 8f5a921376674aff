//! Accepts connections until the drain begins: the same for both modes.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::time::sleep;

use super::drain::DrainWatcher;
use crate::net::process::resource_limits::{self, SpareDescriptor};
use crate::net::sockets::{listening, tcp_options};
use crate::observe::{ListenerMetrics, RateLimitedWarnings};

/// Pause after `accept` failed for want of descriptors or memory, and nobody could be refused.
const PAUSE: Duration = Duration::from_millis(100);

/// Refusals of one kind are logged once in this time, with their number.
pub const REPEAT: Duration = Duration::from_secs(5);

/// Accepts on one socket until `drain` begins and gives each connection to `admit`; in the end
/// also those that wait in its queue, which would be reset with it. If it is over at once, they are
/// somebody else's who has the socket too. Where descriptors are used up who waits is reset: a
/// client that hears nothing would wait on.
pub async fn until_drain(
    socket: TcpListener,
    mut drain: DrainWatcher,
    (listener, metrics, warnings): (&str, &ListenerMetrics, &RateLimitedWarnings),
    admit: impl Fn(TcpStream, SocketAddr),
) {
    let mut spare = SpareDescriptor::open();
    let refused = |error: io::Error| {
        metrics.refused("descriptors");
        let line = format!("listener {listener}: refused, it cannot be accepted");
        warnings.warn(&line, error);
    };
    loop {
        let accepted = tokio::select! {
            biased;
            () = drain.started() => break,
            accepted = socket.accept() => accepted,
        };
        match accepted {
            Ok((stream, _)) if resource_limits::is_reserved(&stream) => {
                tcp_options::close_with_reset(stream);
                refused(resource_limits::out_of_descriptors());
            }
            Ok((stream, from)) => admit(stream, from),
            Err(error) if is_of_one_connection(&error) => {}
            Err(error) => match spare.reset_oldest_waiting(&socket) {
                Ok(()) => refused(error),
                // The error tells of the process; nobody may be waiting.
                Err(also) if also.kind() == io::ErrorKind::WouldBlock => sleep(PAUSE).await,
                Err(_) => {
                    let line = format!("listener {listener}: connections cannot be accepted");
                    warnings.warn(&line, error);
                    sleep(PAUSE).await;
                }
            },
        }
    }
    if drain.is_forced() {
        return;
    }
    for (stream, from) in listening::close_and_accept_queued(socket) {
        admit(stream, from);
    }
}

/// What is said when a listener has as many connections as it may.
pub fn full(listener: &str, most: usize) -> String {
    format!("listener {listener}: refused, {most} connections are open (limits.max_connections)")
}

/// Errors of `accept` that concern the one connection (accept(2)): the next one is fine.
fn is_of_one_connection(error: &io::Error) -> bool {
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

    use super::super::drain::{self, DrainTrigger};
    use super::*;
    use crate::observe::Metrics;

    /// How many of five are admitted that wait in the queue when the end comes.
    async fn admitted(end: impl FnOnce(&DrainTrigger)) -> usize {
        let socket = listening::listen("127.0.0.1:0".parse().unwrap(), false).unwrap();
        let at = socket.local_addr().unwrap();
        let _clients: Vec<_> = (0..5).map(|_| std::net::TcpStream::connect(at).unwrap()).collect();
        let (trigger, drain) = drain::channel();
        end(&trigger);
        let count = Cell::new(0);
        let admit = |_, _| count.set(count.get() + 1);
        let socket = TcpListener::from_std(socket).unwrap();
        let metrics = Metrics::new().listener("l");
        until_drain(socket, drain, ("l", &metrics, &RateLimitedWarnings::new(REPEAT)), admit).await;
        count.get()
    }

    #[tokio::test]
    async fn who_waits_when_the_drain_begins_is_served_and_who_is_another_s_is_left() {
        assert_eq!(admitted(|trigger| trigger.start(Duration::ZERO)).await, 5);
        assert_eq!(admitted(DrainTrigger::force).await, 0);
    }
}
