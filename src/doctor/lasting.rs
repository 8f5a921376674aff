//! Connections that stay: one that is pinged all the time, one that is left alone. What fresh ones
//! do and these do not is the trace of a load balancer that forgets its flow table.

use std::net::SocketAddr;
use std::time::Duration;

use h2::Ping;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};

use super::observations::{Idle, Lasting, Ms, percentile};
use super::probe::{Clock, Opened, Peer, open};

/// Pause after a PONG: a hundred round trips in ten seconds even at 50 ms.
const GAP: Duration = Duration::from_millis(50);
/// A round trip this much longer than the median has waited for a retransmission: Linux's least
/// RTO is 200 ms, and a tail loss probe for a lone segment comes no earlier.
const LATE_MS: f64 = 150.0;
/// Pause before the next connection when one was ended by the other side.
const AGAIN: Duration = Duration::from_millis(500);
/// When the handshakes of an idle connection are over: the longest delayed acknowledgement (200 ms,
/// `TCP_DELACK_MAX`) has gone out.
const SETTLED: Duration = Duration::from_millis(500);
/// How long an idle connection may take to answer.
const IDLE_ANSWER: Duration = Duration::from_secs(3);
/// A silence is watched for this long, beyond the end of the examination if need be, to be sure.
const SURE: Duration = Duration::from_secs(4);

/// Keeps a connection to `address` busy until `until`, and opens another when it ends.
pub(super) async fn keep(
    address: SocketAddr,
    peer: &Peer,
    began: Instant,
    until: Instant,
) -> Vec<Lasting> {
    let mut all = Vec::new();
    while Instant::now() < until {
        match open(&mut Clock::new(began), address, peer).await {
            Ok(opened) => {
                let lasting = ping(opened, began, until).await;
                let silent = lasting.silent_ms.is_some();
                all.push(lasting);
                // What is forgotten has been seen; the rest of the time is for the others.
                if silent {
                    return all;
                }
                sleep(AGAIN).await;
            }
            // Fresh connections tell why.
            Err(_) => sleep(AGAIN).await,
        }
    }
    all
}

async fn ping(mut opened: Opened, began: Instant, until: Instant) -> Lasting {
    let at_ms = (Instant::now() - began).into();
    let mut times: Vec<f64> = Vec::new();
    let (mut silent_ms, mut silent_at_ms, mut ended) = (None, None, None);
    while Instant::now() < until {
        let sent = Instant::now();
        // To the end of the examination, or long enough to tell a silence from a retransmission.
        let patience = until.max(sent + SURE);
        match timeout_at(patience, opened.ping.ping(Ping::opaque())).await {
            Ok(Ok(_)) => times.push(Ms::from(sent.elapsed()).0),
            Ok(Err(error)) => {
                // How the connection itself ended says more than that PINGs cannot be sent.
                let driver = (&mut opened.driver).await;
                ended = Some(driver.unwrap_or_else(|_| error.to_string()));
                break;
            }
            Err(_) => {
                silent_ms = Some(sent.elapsed().into());
                silent_at_ms = Some((sent - began).into());
                break;
            }
        }
        sleep_until((sent + GAP).max(Instant::now() + GAP / 2)).await;
    }
    let info = opened.observer.tcp_info().unwrap_or_default();
    times.sort_by(f64::total_cmp);
    let p50 = percentile(&times, 0.5);
    Lasting {
        at_ms,
        pongs: times.len(),
        p50_ms: p50.map(Ms),
        p99_ms: percentile(&times, 0.99).map(Ms),
        late: times.iter().filter(|ms| **ms > p50.unwrap_or_default() + LATE_MS).count(),
        silent_ms,
        silent_at_ms,
        ended,
        retransmitted: info.retransmitted,
        sent: info.segments_out,
    }
}

/// Opens a connection, leaves it alone until `until`, and then asks whether it is still there.
pub(super) async fn leave_alone(
    address: SocketAddr,
    peer: &Peer,
    began: Instant,
    until: Instant,
) -> Option<Idle> {
    let mut opened = open(&mut Clock::new(began), address, peer).await.ok()?;
    // A firewall takes a keepalive probe for life, whatever it carries.
    opened.observer.disable_keepalives().ok()?;
    let since = Instant::now();
    let sent = |opened: &Opened| opened.observer.tcp_info().unwrap_or_default().segments_out;
    let mut before = None;
    for moment in [until.min(since + SETTLED), until] {
        tokio::select! {
            () = sleep_until(moment) => {}
            // An end that the server announces is no silence.
            _ = &mut opened.driver => return None,
        }
        before.get_or_insert_with(|| sent(&opened));
    }
    let idle = since.elapsed();
    let sent = sent(&opened).wrapping_sub(before.unwrap_or_default());
    let asked = opened.ping.ping(Ping::opaque());
    match timeout_at(Instant::now() + IDLE_ANSWER, asked).await {
        Ok(Ok(_)) => Some(Idle { for_ms: idle.into(), alive: true, sent }),
        Ok(Err(_)) => None,
        Err(_) => Some(Idle { for_ms: idle.into(), alive: false, sent }),
    }
}
