//! MoveEligibility may connect to an endpoint, and what came of it.
//!
//! Everybody on this node shares what an endpoint that is down is asked: workers, identity classes
//! and the prober claim each attempt here, and what one of them learns holds for all. A SYN costs an
//! apiserver nothing, a TLS handshake costs it a millisecond: where thousands of nodes have nothing
//! else to connect to, it is the handshakes that keep a server down that is just coming up. So each
//! node has one under way at most. It is bounded by the connect timeout, which doubles.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use super::Endpoint;
use super::state::{ConnectFailure, Facts, Lifecycle, Transport, backoff};

/// A connect that is only slow gets more time on each try, up to this.
const CONNECT_TIMEOUT_MAX: Duration = Duration::from_secs(10);

impl Endpoint {
    /// Claims the right to connect now. A failing endpoint is tried by one at a time, after its
    /// backoff; `alone` says that no endpoint at all is usable: then no second handshake begins
    /// there before the first has ended.
    pub fn claim_connect_attempt(&self, alone: bool, now: Instant) -> bool {
        let mut facts = self.facts();
        if facts.leaving {
            return false;
        }
        if facts.failures == 0 {
            return true;
        }
        let pause = backoff(facts.failures, alone, facts.jitter);
        if alone && self.handshakes.load(Ordering::Relaxed) > 0 {
            return false;
        }
        if facts.tried.is_some_and(|tried| now < tried + pause) {
            return false;
        }
        facts.tried = Some(now);
        true
    }

    /// How long a connect may take: `base`, doubled for each one in a row that was only slow.
    pub fn connect_timeout(&self, base: Duration) -> Duration {
        let doublings = self.facts().slow_failures.min(4);
        base.saturating_mul(1 << doublings).min(CONNECT_TIMEOUT_MAX.max(base))
    }

    /// When the last failed connect ended.
    pub fn last_failure(&self) -> Option<Instant> {
        let facts = self.facts();
        facts.failed.filter(|_| facts.failures > 0)
    }

    /// A fresh connection is up: TCP, TLS and the first PONG.
    pub fn connected(&self) {
        self.update(Facts::connected);
    }

    /// A fresh connect failed. With no live connection left that is the end of the endpoint;
    /// with one it is noted and tried again later, as it is where the failure is our own.
    pub fn connect_failed(&self, failure: ConnectFailure, now: Instant) {
        self.update(|facts| {
            facts.failures = facts.failures.saturating_add(1);
            facts.tried = Some(now);
            facts.failed = Some(now);
            facts.jitter = fastrand::f64();
            if matches!(failure, ConnectFailure::Timeout(_)) {
                facts.slow_failures = facts.slow_failures.saturating_add(1);
            }
            if let ConnectFailure::LocalShortage(why) = failure {
                facts.shortage = Some(why);
                return;
            }
            facts.shortage = None;
            if facts.live > 0 {
                return;
            }
            facts.transport = match failure {
                ConnectFailure::TlsFailed(why) => {
                    // It answers: what leads there already has not died with it.
                    facts.lifecycle = Lifecycle::New;
                    Transport::Down(why)
                }
                ConnectFailure::NoH2(why) => Transport::NoH2(why),
                ConnectFailure::Refused(why)
                | ConnectFailure::Timeout(why)
                | ConnectFailure::LocalShortage(why) => Transport::Down(why),
            };
        });
    }

    /// Counts a handshake under way for as long as the guard lives.
    pub fn track_handshake(&self) -> HandshakeGuard<'_> {
        self.handshakes.fetch_add(1, Ordering::Relaxed);
        HandshakeGuard(&self.handshakes)
    }
}

/// A handshake under way.
#[derive(Debug)]
pub struct HandshakeGuard<'a>(&'a AtomicUsize);

impl Drop for HandshakeGuard<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::super::EndpointState;
    use super::*;
    use crate::config::EndpointAddress;
    use crate::observe::Metrics;
    use std::sync::Arc;

    /// Of one node: the classes of two identities, of tokens and of nobody, and the prober.
    const ASK: usize = 5;
    const NODES: usize = 5_000;
    const OUTAGE: Duration = Duration::from_secs(120);

    fn endpoint() -> Arc<Endpoint> {
        let address = EndpointAddress { host: "10.0.0.1".into(), port: 6443 };
        Endpoint::new(&"u".into(), &address, None, Metrics::new().endpoint("u", "e")).unwrap()
    }

    /// What one node does to a server that is down, while somebody waits all the time: attempts in
    /// all, most of them at once, and the longest time that none was under way. An attempt takes
    /// `takes`, of which all but the TCP connect is a handshake if it is one that `shakes`.
    fn outage(takes: Option<Duration>, shakes: bool) -> (usize, usize, Duration) {
        let endpoint = endpoint();
        let zero = Instant::now();
        let mut under_way: Vec<(Instant, Option<HandshakeGuard<'_>>)> = Vec::new();
        let (mut attempts, mut most, mut longest) = (0, 0, Duration::ZERO);
        let mut nobody_since = zero;
        // It was there before: the loss of the last connection is what everybody hears of.
        endpoint.connect_failed(ConnectFailure::Refused("gone".into()), zero);
        for ms in 0..OUTAGE.as_millis() as u64 {
            let now = zero + Duration::from_millis(ms);
            while let Some(at) = under_way.iter().position(|(until, _)| *until <= now) {
                under_way.remove(at);
                let failure = match takes {
                    None => ConnectFailure::Refused("connection refused".into()),
                    Some(_) => ConnectFailure::Timeout("no connection within 3000 ms".into()),
                };
                endpoint.connect_failed(failure, now);
                if under_way.is_empty() {
                    nobody_since = now;
                }
            }
            for _ in 0..ASK {
                if !endpoint.claim_connect_attempt(true, now) {
                    continue;
                }
                attempts += 1;
                if under_way.is_empty() {
                    longest = longest.max(now - nobody_since);
                }
                let took =
                    takes.map_or(Duration::from_millis(1), |base| endpoint.connect_timeout(base));
                under_way.push((now + took, shakes.then(|| endpoint.track_handshake())));
                most = most.max(under_way.len());
            }
        }
        (attempts, most, longest)
    }

    /// All servers are down for two minutes: what one of them gets of 5,000 nodes, and how soon a
    /// node notices that it is back.
    #[test]
    fn a_server_that_comes_up_is_not_kept_down() {
        let a_second = |attempts: usize| attempts * NODES / OUTAGE.as_secs() as usize;
        // Its process is gone: refused at once. One attempt for all, 800 ms apart at most.
        let (attempts, most, longest) = outage(None, false);
        println!(
            "refused: {} SYNs a second of {NODES} nodes, noticed within {longest:?}",
            a_second(attempts)
        );
        assert_eq!(most, 1);
        assert!(longest <= Duration::from_millis(801), "{longest:?}");
        assert!(attempts <= 120 * 10 / 4, "{attempts}");
        // It accepts, and is too busy for the rest: a handshake at a time, and longer each time.
        let (attempts, most, longest) = outage(Some(Duration::from_secs(3)), true);
        println!("busy: {} handshakes a second of {NODES} nodes", a_second(attempts));
        assert_eq!(most, 1, "handshakes of one node at once");
        assert!(attempts <= 20, "{attempts}");
        assert!(longest <= Duration::from_millis(801), "{longest:?}");
    }

    #[test]
    fn only_who_does_not_answer_has_died() {
        let endpoint = endpoint();
        let now = Instant::now();
        let fails = |failure: fn(String) -> ConnectFailure, why: &str| {
            endpoint.connect_failed(failure(why.to_owned()), now);
            (endpoint.state(), endpoint.reason(), endpoint.deaths())
        };
        let lacks = fails(ConnectFailure::LocalShortage, "too many open files");
        assert_eq!(lacks, (EndpointState::Connecting, "too many open files".into(), 0));
        assert!(!endpoint.claim_connect_attempt(true, now), "there is a pause all the same");
        endpoint.connected();
        endpoint.readyz_ok();
        assert_eq!(fails(ConnectFailure::LocalShortage, "no memory").0, EndpointState::Ready);
        let another = fails(ConnectFailure::TlsFailed, "unknown issuer");
        assert_eq!(another, (EndpointState::Ejected, "unknown issuer".into(), 0));
        endpoint.connected();
        let gone = fails(ConnectFailure::Refused, "refused");
        assert_eq!(gone, (EndpointState::Ejected, "refused".into(), 1));
    }

    #[test]
    fn a_handshake_holds_up_nobody_who_can_do_without() {
        let endpoint = endpoint();
        let now = Instant::now();
        let later = now + Duration::from_secs(6);
        let shaking = endpoint.track_handshake();
        assert!(endpoint.claim_connect_attempt(true, now), "nothing has failed there");
        endpoint.connect_failed(ConnectFailure::Refused("no".into()), now);
        assert!(endpoint.claim_connect_attempt(false, later), "others do the work");
        assert!(!endpoint.claim_connect_attempt(true, later + Duration::from_secs(6)));
        drop(shaking);
        assert!(endpoint.claim_connect_attempt(true, later + Duration::from_secs(6)));
    }
}
