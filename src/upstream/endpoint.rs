//! One endpoint of an upstream: what is known of it, and the state that follows.
//!
//! | state | enters when | effect |
//! |---|---|---|
//! | connecting | nothing is known yet | tried |
//! | ready | connected, and `/readyz` says ok, or there is no credential to ask it with | first choice |
//! | degraded | connected, but `/readyz` fails | no new request while another is ready; nothing is cut, watches move away ([`super::evacuation`]) |
//! | suspect | connected, but no connection has had its PING answered for 500 ms | no new request while another is there; tried by a fresh connect |
//! | ejected | none of its connections is live and a fresh connect failed | probed with jittered backoff |
//! | no-h2 | it does not speak HTTP/2 by ALPN | as ejected, with its own reason |
//! | leaving | removed from the set | its connections drain |
//!
//! The facts come from several places (data-plane workers that dial, the prober that asks
//! `/readyz`); the state is derived here, in one function, and each change is logged here, once,
//! with its reason.

mod availability;
mod connecting;
mod evidence;
mod state;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, SystemTime};

use rustls::pki_types::ServerName;
use tokio::sync::Notify;
use tokio::time::Instant;

use self::availability::Downtime;
pub use self::availability::ReadyzCheck;
pub use self::connecting::HandshakeGuard;
pub use self::evidence::ProbeTrigger;
pub use self::state::{ConnectFailure, EndpointState, backoff};
use self::state::{Facts, Lifecycle, Readyz, Transport};
use super::balance;
use super::stats::{ConnectionStats, Ejection, EndpointStatus, ReadyzCheckStatus};
use crate::config::EndpointAddress;
use crate::observe::EndpointMetrics;
use crate::observe::events::{Change, Kind};
use crate::observe::utc::Utc;

/// An endpoint, shared by the workers, the prober and the admin page.
#[derive(Debug)]
pub struct Endpoint {
    /// Name of the upstream it belongs to.
    pub upstream: Arc<str>,
    /// Where it is.
    pub address: EndpointAddress,
    /// The address as text: a label in logs and metrics.
    pub label: Arc<str>,
    /// Name sent as SNI and verified in its certificate.
    pub server_name: ServerName<'static>,
    /// Its metrics.
    pub metrics: Arc<EndpointMetrics>,
    facts: Mutex<Facts>,
    state: AtomicU8,
    /// Handshakes under way: TCP is up, TLS or the first PONG is not.
    handshakes: AtomicUsize,
    connections: Mutex<Vec<Weak<ConnectionStats>>>,
    /// Passed connections that lead here, of all workers.
    flows: AtomicUsize,
    /// See [`Self::deaths`].
    deaths: AtomicU64,
    probe: Notify,
    /// It is a seed that is not in what was discovered: for when nothing else will do.
    fallback: AtomicBool,
    /// Told when it leaves.
    leaves: Notify,
    /// Time starts here for [`Self::ready_for`].
    born: Instant,
    /// Milliseconds from then until it became ready, plus one; 0 while it is not.
    ready_at: AtomicU64,
    /// It has recovered, and takes load back gradually.
    recovering: AtomicBool,
    /// The latest `/readyz` failed or keeps us waiting.
    probe_failing: AtomicBool,
    /// Somebody wants to know whether it is well now, before watches move to it.
    proof_wanted: AtomicBool,
    /// Answers of 500 and above in a row: passive evidence.
    errors_in_row: AtomicU64,
}

impl Endpoint {
    /// An endpoint of which nothing is known yet.
    ///
    /// # Errors
    /// The server name is no DNS name or IP address.
    pub fn new(
        upstream: &Arc<str>,
        address: &EndpointAddress,
        server_name: Option<&str>,
        metrics: Arc<EndpointMetrics>,
    ) -> Result<Arc<Self>, String> {
        let name = server_name.unwrap_or(&address.host);
        let server_name = ServerName::try_from(name.to_owned())
            .map_err(|_| format!("`{name}` cannot be verified in a certificate"))?;
        let mut gauge = metrics.state_gauge();
        gauge.set(EndpointState::Connecting.as_str());
        Ok(Arc::new(Self {
            upstream: Arc::clone(upstream),
            address: address.clone(),
            label: address.to_string().into(),
            server_name,
            metrics,
            facts: Mutex::new(Facts {
                transport: Transport::Unknown,
                live: 0,
                unanswered: 0,
                suspect: None,
                lost: None,
                given_up: None,
                readyz: Readyz::Unknown,
                probe_failing_since: None,
                last_ready_probe: None,
                leaving: false,
                silent: None,
                lifecycle: Lifecycle::New,
                was_out: false,
                failures: 0,
                slow_failures: 0,
                shortage: None,
                tried: None,
                failed: None,
                jitter: fastrand::f64(),
                since: SystemTime::now(),
                reason: "not connected".into(),
                last_ejection: None,
                downtime: Downtime::default(),
                last_check: None,
                gauge,
            }),
            state: AtomicU8::new(EndpointState::Connecting as u8),
            handshakes: AtomicUsize::new(0),
            connections: Mutex::default(),
            flows: AtomicUsize::new(0),
            deaths: AtomicU64::new(0),
            probe: Notify::new(),
            fallback: AtomicBool::new(false),
            leaves: Notify::new(),
            born: Instant::now(),
            ready_at: AtomicU64::new(0),
            recovering: AtomicBool::new(false),
            probe_failing: AtomicBool::new(false),
            proof_wanted: AtomicBool::new(false),
            errors_in_row: AtomicU64::new(0),
        }))
    }

    /// The addresses to connect to. `localhost` is both loopback addresses, without asking anyone
    /// (RFC 6761 section 6.3).
    pub fn socket_addresses(&self) -> Vec<SocketAddr> {
        let port = self.address.port;
        match self.address.host.parse::<IpAddr>() {
            Ok(ip) => vec![SocketAddr::new(ip, port)],
            Err(_) => vec![
                SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port),
                SocketAddr::new(Ipv6Addr::LOCALHOST.into(), port),
            ],
        }
    }

    /// The state now. Cheap: the picker asks for every candidate.
    pub fn state(&self) -> EndpointState {
        EndpointState::from_u8(self.state.load(Ordering::Relaxed))
    }

    /// Whether requests get an answer there: also before its first `/readyz`, once connected.
    pub fn is_usable(&self) -> bool {
        match self.state() {
            EndpointState::Ready | EndpointState::Degraded | EndpointState::Suspect => true,
            EndpointState::Connecting => self.facts().live > 0,
            EndpointState::Ejected | EndpointState::NoH2 | EndpointState::Leaving => false,
        }
    }

    /// For how long it has been ready, if it is.
    pub fn ready_for(&self, now: Instant) -> Option<Duration> {
        let at = self.ready_at.load(Ordering::Relaxed).checked_sub(1)?;
        Some(now.saturating_duration_since(self.born + Duration::from_millis(at)))
    }

    /// Share of its picks that it takes part in: less than the whole for a while after it has
    /// recovered ([`balance::slow_start`]).
    pub fn slow_start_share(&self, now: Instant) -> f64 {
        if !self.recovering.load(Ordering::Relaxed) {
            return 1.0;
        }
        let share = self.ready_for(now).map_or(1.0, balance::slow_start);
        if share >= 1.0 {
            self.recovering.store(false, Ordering::Relaxed);
        }
        share
    }

    /// Why it is in its state.
    pub fn reason(&self) -> String {
        self.facts().reason.clone()
    }

    /// For too long it has neither answered on the prober's connection nor completed a fresh
    /// handshake, whatever its kernel says.
    pub fn mark_unresponsive(&self, why: &str) {
        self.update(|facts| facts.silent = Some(why.to_owned()));
    }

    /// It answers on a connection that was there all the time.
    pub fn mark_responsive(&self) {
        self.update(|facts| {
            if facts.silent.take().is_some() {
                facts.lifecycle = Lifecycle::Alive;
            }
        });
    }

    /// It announced that it ends (GOAWAY on the prober's connection). That it takes no new
    /// connections then is not the death of what runs there.
    pub fn goaway_received(&self) {
        self.update(|facts| {
            if facts.lifecycle == Lifecycle::Alive {
                facts.lifecycle = Lifecycle::Ending;
            }
        });
    }

    /// It is no longer in the set.
    pub fn remove(&self) {
        self.update(|facts| facts.leaving = true);
        self.leaves.notify_waiters();
    }

    /// Waits until it has left the set.
    pub async fn removed(&self) {
        let mut leaves = std::pin::pin!(self.leaves.notified());
        // Registered before the look, so that it cannot leave in between.
        leaves.as_mut().enable();
        if self.state() != EndpointState::Leaving {
            leaves.await;
        }
    }

    /// Whether it is asked only where no other endpoint of its state is there: a seed that is not
    /// among what was discovered.
    pub fn is_fallback(&self) -> bool {
        self.fallback.load(Ordering::Relaxed)
    }

    /// Says whether it is a fallback.
    pub fn set_fallback(&self, fallback: bool) {
        self.fallback.store(fallback, Ordering::Relaxed);
    }

    /// A connection to it became live. Its statistics show up in the status as long as they live.
    pub fn connection_opened(&self, stats: &Arc<ConnectionStats>) {
        let mut list = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        list.retain(|known| known.strong_count() > 0);
        list.push(Arc::downgrade(stats));
        drop(list);
        self.update(Facts::opened);
    }

    /// A connection that [`Self::connection_opened`] counted takes no new streams any more, for this
    /// reason; whether its PINGs were answered. With the last one goes what was known: what comes
    /// back may be another process, and is not ready until it says so.
    pub fn connection_closed(&self, answered: bool, why: &str) {
        let now = Instant::now();
        self.update(|facts| facts.closed(answered, why, now));
    }

    /// PINGs on a connection that [`Self::connection_opened`] counted are no longer answered, or are
    /// again. An endpoint is suspect while none is answered on any of its connections.
    pub fn connection_responds(&self, answers: bool) {
        self.update(|facts| facts.answers(answers));
    }

    /// How often it has died: was up, and was then ejected. What leads there from before has died
    /// with it; what was opened since then, for want of anything better, has not.
    pub fn deaths(&self) -> u64 {
        self.deaths.load(Ordering::Relaxed)
    }

    /// Passed connections that lead here now.
    pub fn flows(&self) -> usize {
        self.flows.load(Ordering::Relaxed)
    }

    /// Counts a passed connection for as long as the guard lives.
    pub fn track_flow(self: &Arc<Self>) -> FlowGuard {
        self.flows.fetch_add(1, Ordering::Relaxed);
        self.metrics.flow_opened();
        FlowGuard(Arc::clone(self))
    }

    /// Records the latest `/readyz` check, for `/status`.
    pub fn record_check(&self, check: ReadyzCheck) {
        self.facts().last_check = Some(check);
    }

    /// Everything an operator wants to know, for `/status`.
    pub fn status(&self) -> EndpointStatus {
        let usable = self.is_usable();
        let facts = self.facts();
        let connections: Vec<_> = {
            let list = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
            list.iter().filter_map(Weak::upgrade).map(|stats| stats.status()).collect()
        };
        let (answers, errors) = self.metrics.history().totals();
        EndpointStatus {
            rtt: self.metrics.history().quantiles(),
            streams: connections.iter().map(|connection| connection.streams).sum(),
            watches: connections.iter().map(|connection| connection.watches).sum(),
            answers,
            errors,
            address: self.label.to_string(),
            server_name: self.server_name.to_str().into_owned(),
            fallback: self.is_fallback(),
            state: self.state().as_str(),
            usable,
            readiness: facts.readiness(),
            reason: facts.reason.clone(),
            since: Utc(facts.since).seconds(),
            last_ejection: facts
                .last_ejection
                .as_ref()
                .map(|(at, reason)| Ejection { at: Utc(*at).seconds(), reason: reason.clone() }),
            downtime_seconds: facts.downtime.total(Instant::now()).as_secs_f64(),
            ejections: facts.downtime.ejections(),
            last_check: facts.last_check.as_ref().map(ReadyzCheckStatus::from),
            connections,
            flows: self.flows(),
        }
    }

    fn facts(&self) -> MutexGuard<'_, Facts> {
        self.facts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the facts, derives the state and tells what changed. Nothing here waits.
    fn update(&self, change: impl FnOnce(&mut Facts)) {
        let mut facts = self.facts();
        let (before, _) = facts.state();
        change(&mut facts);
        let (after, reason) = facts.state();
        let reason = reason.to_owned();
        if before == after {
            facts.reason = reason;
            return;
        }
        facts.since = SystemTime::now();
        facts.reason.clone_from(&reason);
        let ejected = matches!(after, EndpointState::Ejected | EndpointState::NoH2);
        facts.downtime.record(ejected, Instant::now());
        if ejected {
            facts.last_ejection = Some((facts.since, reason.clone()));
            self.metrics.ejected(if after == EndpointState::NoH2 {
                "no_h2"
            } else if facts.silent.is_some() {
                "silent"
            } else if facts.slow_failures > 0 {
                "connect_timeout"
            } else {
                "connect_failed"
            });
        }
        if after == EndpointState::Ejected {
            let lifecycle = std::mem::replace(&mut facts.lifecycle, Lifecycle::New);
            let cut_off = facts.silent.is_some();
            if lifecycle == Lifecycle::Alive || (lifecycle == Lifecycle::Ending && cut_off) {
                self.deaths.fetch_add(1, Ordering::Relaxed);
            }
        }
        let ready = after == EndpointState::Ready;
        let at = self.born.elapsed().as_millis() as u64 + 1;
        self.ready_at.store(if ready { at } else { 0 }, Ordering::Relaxed);
        if ready {
            // The first start of all is no recovery: there is no load that left and comes back. Nor
            // is a PING that was answered late.
            let was_out = std::mem::take(&mut facts.was_out);
            if was_out || before != EndpointState::Suspect {
                self.recovering.store(was_out, Ordering::Relaxed);
            }
        } else if !matches!(after, EndpointState::Connecting | EndpointState::Suspect) {
            facts.was_out = true;
        }
        self.state.store(after as u8, Ordering::Relaxed);
        facts.gauge.set(after.as_str());
        drop(facts);
        self.metrics.changed(&Change {
            kind: Kind::Endpoint,
            upstream: Some(&self.upstream),
            name: &self.label,
            detail: "",
            from: before.as_str(),
            to: after.as_str(),
            reason: &reason,
            effect: after.effect(),
            bad: matches!(
                after,
                EndpointState::Ejected
                    | EndpointState::NoH2
                    | EndpointState::Degraded
                    | EndpointState::Suspect
            ),
        });
    }
}

/// A passed connection to an endpoint.
#[derive(Debug)]
pub struct FlowGuard(Arc<Endpoint>);

impl FlowGuard {
    /// Where it leads.
    pub fn endpoint(&self) -> &Arc<Endpoint> {
        &self.0
    }
}

impl Drop for FlowGuard {
    fn drop(&mut self) {
        self.0.flows.fetch_sub(1, Ordering::Relaxed);
        self.0.metrics.flow_closed();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::Metrics;
    use crate::upstream::credentials::CredentialClass;

    #[test]
    fn a_state_survives_its_number() {
        for state in EndpointState::ALL {
            assert_eq!(EndpointState::from_u8(state as u8), state);
        }
    }

    #[test]
    fn only_a_recovery_starts_slowly() {
        let address = EndpointAddress { host: "10.0.0.1".into(), port: 6443 };
        let metrics = Metrics::new().endpoint("u", "e");
        let endpoint = Endpoint::new(&"u".into(), &address, None, metrics).unwrap();
        let later = Instant::now() + Duration::from_secs(15);
        let whole = |endpoint: &Endpoint| endpoint.slow_start_share(later) >= 1.0;
        assert!(whole(&endpoint) && endpoint.ready_for(later).is_none());
        endpoint.connected();
        endpoint.readyz_ok();
        assert!(whole(&endpoint), "the first start of all");
        assert!(endpoint.ready_for(later).is_some_and(|since| since.as_secs() >= 14));

        endpoint.readyz_failing("etcd");
        assert!(endpoint.ready_for(later).is_none());
        endpoint.readyz_ok();
        assert!(
            (0.5..0.6).contains(&endpoint.slow_start_share(later)),
            "{}",
            endpoint.slow_start_share(later)
        );
        assert!(endpoint.slow_start_share(Instant::now() + Duration::from_secs(31)) >= 1.0);
        assert!(whole(&endpoint), "and then it is over");

        endpoint.connect_failed(ConnectFailure::Refused("no".into()), Instant::now());
        endpoint.connected();
        assert_eq!(endpoint.state(), EndpointState::Connecting);
        endpoint.readyz_ok();
        assert!(!whole(&endpoint), "back from an ejection");
    }

    /// Workers and the prober lose and open connections in any order.
    #[test]
    fn it_is_connected_for_as_long_as_a_connection_lives() {
        let address = EndpointAddress { host: "10.0.0.1".into(), port: 6443 };
        let metrics = Metrics::new().endpoint("u", "e");
        let endpoint = Endpoint::new(&"u".into(), &address, None, metrics).unwrap();
        let opened = || {
            let stats =
                ConnectionStats::new(CredentialClass::Anonymous, None, None, Instant::now());
            endpoint.connection_opened(&stats);
        };
        let failed = || {
            endpoint.connect_failed(ConnectFailure::Refused("no".into()), Instant::now());
        };
        opened();
        endpoint.readyz_ok();
        opened();
        endpoint.connection_closed(true, "lost");
        failed();
        assert_eq!(endpoint.state(), EndpointState::Ready, "one lives");
        endpoint.connection_closed(true, "lost");
        assert_eq!(endpoint.state(), EndpointState::Connecting);
        assert!(!endpoint.is_usable());
        opened();
        assert_eq!(endpoint.state(), EndpointState::Connecting, "not well until it says so");
        assert!(endpoint.is_usable());
        endpoint.connection_closed(true, "lost");
        failed();
        assert_eq!(endpoint.state(), EndpointState::Ejected);
        opened();
        assert_eq!(endpoint.state(), EndpointState::Connecting);
    }

    #[test]
    fn endpoint_is_suspect_while_no_connection_has_its_ping_answered() {
        use EndpointState::{Connecting, Ready, Suspect};
        let address = EndpointAddress { host: "10.0.0.1".into(), port: 6443 };
        let metrics = Metrics::new().endpoint("u", "e");
        let endpoint = Endpoint::new(&"u".into(), &address, None, metrics).unwrap();
        let opened = || {
            let stats =
                ConnectionStats::new(CredentialClass::Anonymous, None, None, Instant::now());
            endpoint.connection_opened(&stats);
        };
        let known = || (endpoint.state(), endpoint.reason());
        opened();
        opened();
        endpoint.readyz_ok();
        endpoint.connection_responds(false);
        assert_eq!(endpoint.state(), Ready, "one answers");
        endpoint.connection_responds(false);
        assert_eq!(known(), (Suspect, "PING unanswered on every connection (2)".into()));
        assert!(endpoint.is_usable() && endpoint.deaths() == 0, "no verdict yet");
        // A fresh one works.
        opened();
        assert_eq!(known(), (Ready, "/readyz is ok".into()));
        endpoint.connection_closed(true, "closed by the peer");
        assert_eq!(endpoint.state(), Suspect);
        endpoint.connection_responds(true);
        assert_eq!(endpoint.state(), Ready);
        let later = Instant::now() + Duration::from_secs(1);
        assert!(
            endpoint.slow_start_share(later) >= 1.0,
            "it has lost no load that it would take back slowly"
        );
        // Both are given up.
        endpoint.connection_responds(false);
        endpoint.connection_closed(false, "the process is stopped");
        assert_eq!(known(), (Suspect, "PING unanswered on every connection (1)".into()));
        endpoint.connection_closed(false, "the process is stopped");
        assert_eq!(known(), (Connecting, "not connected: the process is stopped".into()));
        opened();
        assert_eq!(known(), (Connecting, "connected, /readyz not answered yet".into()));
    }
}
