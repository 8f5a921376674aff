//! Checks connections that stay open: one is pinged continuously, another stays idle. If they fail
//! while fresh connections work, a device on the path forgets established flows.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use h2::Ping;
use jackstay_sys::clock;
use tokio::time::{sleep, sleep_until, timeout_at};

use super::observations::{IdleConnection, LongLived, Ms, percentile};
use super::probe::{PeerConfig, ProbeConnection, StepTimer, open};

/// Smallest interval between two PINGs. With a round trip of 50 ms there are more than 100 PINGs in 10 s.
const PING_PAUSE: Duration = Duration::from_millis(50);
/// A round trip that is longer than the median by this many milliseconds contained a retransmission.
/// Linux retransmits after at least 200 ms (`TCP_RTO_MIN`); its tail loss probe for a single segment is
/// not earlier.
const LATE_MS: f64 = 150.0;
/// Pause before another connection is opened when the server has ended one.
const RECONNECT_PAUSE: Duration = Duration::from_millis(500);
/// Time after which an idle connection has sent its last delayed acknowledgement of the handshakes, which
/// Linux delays by at most 200 ms (`TCP_DELACK_MAX`).
const HANDSHAKE_TIME: Duration = Duration::from_millis(500);
/// Limit of the PING on an idle connection.
const IDLE_PING_LIMIT: Duration = Duration::from_secs(3);
/// Shortest wait for a PONG, also beyond the end of the examination. Linux has retransmitted a lost PING
/// four times by then (see `SILENT_MS` in the findings), so only a silent connection exceeds it.
const MIN_PING_WAIT: Duration = Duration::from_secs(4);

/// Pings a connection to `address` until `until`, and opens another when the server ends it.
pub(super) async fn ping_until(
    address: SocketAddr,
    peer: &PeerConfig,
    began: Instant,
    until: Instant,
) -> Vec<LongLived> {
    let mut all: Vec<LongLived> = Vec::new();
    while clock::now() < until {
        // Fresh connections record why a connection cannot be opened.
        if let Ok(opened) = open(&mut StepTimer::start(began), address, peer).await {
            all.push(ping(opened, began, until).await);
        }
        // One connection that is silent, or whose PINGs are refused, is enough for a finding.
        let is_enough = |last: &LongLived| last.silent_ms.is_some() || last.refuses_pings;
        if all.last().is_some_and(is_enough) {
            break;
        }
        sleep(RECONNECT_PAUSE).await;
    }
    all
}

/// Pings a connection until `until` or until the connection fails.
async fn ping(mut opened: ProbeConnection, began: Instant, until: Instant) -> LongLived {
    let at_ms = (clock::now() - began).into();
    let mut times: Vec<f64> = Vec::new();
    let (mut silent_ms, mut silent_at_ms, mut ended, mut refuses_pings) = (None, None, None, false);
    while clock::now() < until {
        let sent = clock::now();
        let deadline = until.max(sent + MIN_PING_WAIT);
        match timeout_at(deadline.into(), opened.ping.ping(Ping::opaque())).await {
            Ok(Ok(_)) => times.push(Ms::from(clock::elapsed(sent)).0),
            Ok(Err(error)) => {
                // The reason of the connection's end is more precise than the error of the PING.
                let driver = (&mut opened.driver).await;
                refuses_pings = driver.as_ref().is_ok_and(|end| end.refuses_pings);
                ended = Some(driver.map_or_else(|_| error.to_string(), |end| end.text));
                break;
            }
            Err(_) => {
                silent_ms = Some(clock::elapsed(sent).into());
                silent_at_ms = Some((sent - began).into());
                break;
            }
        }
        sleep_until(((sent + PING_PAUSE).max(clock::now() + PING_PAUSE / 2)).into()).await;
    }
    let info = opened.observer.tcp_info().unwrap_or_default();
    times.sort_by(f64::total_cmp);
    let p50 = percentile(&times, 0.5);
    LongLived {
        at_ms,
        pongs: times.len(),
        p50_ms: p50.map(Ms),
        p99_ms: percentile(&times, 0.99).map(Ms),
        late: times.iter().filter(|ms| **ms > p50.unwrap_or_default() + LATE_MS).count(),
        silent_ms,
        silent_at_ms,
        ended,
        refuses_pings,
        retransmitted: info.retransmitted,
        sent: info.segments_out,
    }
}

/// Opens a connection, sends nothing until `until`, and then one PING. Returns `None` if the connection
/// cannot be opened or the server ends it.
pub(super) async fn ping_after_idle(
    address: SocketAddr,
    peer: &PeerConfig,
    began: Instant,
    until: Instant,
) -> Option<IdleConnection> {
    let mut opened = open(&mut StepTimer::start(began), address, peer).await.ok()?;
    // A keepalive probe would refresh the flow in a firewall.
    opened.observer.disable_keepalives().ok()?;
    let start = clock::now();
    let segments_sent =
        |opened: &ProbeConnection| opened.observer.tcp_info().unwrap_or_default().segments_out;
    idle_until(&mut opened, until.min(start + HANDSHAKE_TIME)).await?;
    let sent_in_handshakes = segments_sent(&opened);
    idle_until(&mut opened, until).await?;
    let idle = clock::elapsed(start);
    let sent = segments_sent(&opened).wrapping_sub(sent_in_handshakes);
    let pong = opened.ping.ping(Ping::opaque());
    let alive = match timeout_at((clock::now() + IDLE_PING_LIMIT).into(), pong).await {
        Ok(Ok(_)) => true,
        Ok(Err(_)) => return None,
        Err(_) => false,
    };
    Some(IdleConnection { for_ms: idle.into(), alive, sent })
}

/// Waits until `moment`; `None` if the server ends the connection before.
async fn idle_until(opened: &mut ProbeConnection, moment: Instant) -> Option<()> {
    tokio::select! {
        () = sleep_until(moment.into()) => Some(()),
        _ = &mut opened.driver => None,
    }
}
