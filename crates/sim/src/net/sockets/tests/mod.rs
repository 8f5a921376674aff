//! Sockets of two or three hosts on tokio's paused clock (`start_paused`).

mod faults;
mod handshake;
mod streams;

use std::future::{Future, poll_fn};
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Poll, Wake, Waker};
use std::time::{Duration, Instant};

use jackstay_sys::clock::now;
use jackstay_sys::sockets::virtual_network::{VirtualListener, VirtualStream};
use tokio::task::yield_now;
use tokio::time::{advance, sleep_until};

use super::*;
use crate::net::{Keepalive, ProcessId, ProcessState, SocketOptions};

/// The granularity of tokio's timers.
const TICK: Duration = Duration::from_millis(1);
/// The port of the server.
const PORT: u16 = 6443;

type Boxed = Box<dyn VirtualStream>;

/// Runs `work` and handles the events of a network, each at its time.
async fn drive<T>(network: &SocketNetwork, work: impl Future<Output = T>) -> T {
    let driver = async {
        loop {
            for _ in 0..4 {
                network.run_until(now());
                yield_now().await;
            }
            let next = network.next_event_at();
            match next.map(|at| at.saturating_duration_since(now())) {
                Some(pause) if pause.is_zero() => {}
                Some(pause) if pause <= TICK => advance(pause).await,
                _ => sleep_before(network, next).await,
            }
        }
    };
    tokio::select! { biased; result = work => result, () = driver => unreachable!() }
}

/// Sleeps until shortly before `next`, or until an event is queued that is earlier.
async fn sleep_before(network: &SocketNetwork, next: Option<Instant>) {
    let until = next
        .map_or_else(|| now() + Duration::from_secs(3600), |at| at.checked_sub(TICK).unwrap_or(at));
    let mut sleep = pin!(sleep_until(until.into()));
    poll_fn(|cx| {
        network.set_driver(cx.waker().clone());
        let has_earlier =
            network.next_event_at().is_some_and(|at| next.is_none_or(|next| at < next));
        if has_earlier { Poll::Ready(()) } else { sleep.as_mut().poll(cx) }
    })
    .await;
}

/// A waker that counts.
#[derive(Default)]
struct Wakes(AtomicUsize);

impl Wakes {
    fn count(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// A server on host 0 and a client on host 1.
struct Hosts {
    network: SocketNetwork,
    server: ProcessId,
    client: ProcessId,
    listener: Box<dyn VirtualListener>,
}

impl Hosts {
    fn new(seed: u64) -> Self {
        let network = SocketNetwork::new(seed, now(), 3, 1);
        let (server, client) = (network.add_process(0), network.add_process(1));
        let listener = network.listen(server, PORT).unwrap();
        Self { network, server, client, listener }
    }

    fn address() -> SocketAddr {
        SocketAddr::new(SocketNetwork::address_of(0), PORT)
    }

    async fn connect(&self) -> io::Result<Boxed> {
        self.network.of_process(self.client).connect(Self::address()).await
    }

    async fn accept(&self) -> Boxed {
        poll_fn(|cx| self.listener.poll_accept(cx)).await.unwrap().0
    }

    /// A connection: the client's end and the server's.
    async fn pair(&self) -> (Boxed, Boxed) {
        let (client, server) = tokio::join!(self.connect(), self.accept());
        (client.unwrap(), server)
    }
}

async fn sleep_ms(ms: u64) {
    tokio::time::sleep(Duration::from_millis(ms)).await;
}
