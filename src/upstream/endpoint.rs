//! One endpoint of an upstream: its identity, its health and its statistics.
//!
//! | state | entered when | effect |
//! |---|---|---|
//! | connecting | no connection is live, or `/readyz` was not answered yet | connects are tried |
//! | ready | connected, and `/readyz` is ok or is not asked | first choice |
//! | degraded | connected, but `/readyz` fails, or the watch cache lags behind another endpoint ([`jackstay_core::lag`]) | no new requests while another endpoint is ready; connections stay open, and watches move away ([`super::evacuation`]) |
//! | suspect | connected, but on every connection a PING has been unanswered for 500 ms | no new requests while another endpoint is usable, and none after 1 s; a fresh connection is tried |
//! | unverified | in an upstream of flows only: no connection is live, and a fresh TLS connection of the probe failed although the server answers | flows are forwarded, while none is ready also new ones; connects are retried with jittered backoff |
//! | ejected | no connection is live and a fresh connect failed; or the prober found that the process does not answer | no requests; connects are retried with jittered backoff |
//! | `no_h2` | no connection is live and the peer does not choose `h2` by ALPN | as ejected |
//! | leaving | removed from the set of endpoints | its connections drain |
//!
//! Workers and the prober report observations. The state machine [`EndpointHealth`] derives the state from
//! them. [`Endpoint`] publishes each transition in metrics, in the log and as an event.

mod connections;
mod flow_evidence;
mod line;
mod ping_limit;
mod probe_signals;
mod process_start;
mod slow_start;
mod statistics;
mod version;

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use arc_swap::{ArcSwap, Guard};
use jackstay_config::api_root::ApiRoot;
use jackstay_core::backends::Backend;
use jackstay_core::connect::ConnectBackoff;
pub use jackstay_core::connect::{ConnectFailure, ConnectFailureKind, ConnectTimeout};
use jackstay_core::discovery::address::EndpointAddress;
use jackstay_core::endpoint_condition::EndpointCondition;
use jackstay_core::endpoint_health::{EndpointHealth, EndpointTransition};
pub use jackstay_core::endpoint_health::{EndpointReadiness, Observation};
pub use jackstay_core::endpoint_state::EndpointState;
use jackstay_core::kubernetes_version::{MinorVersion, ServerVersion, VersionError};
use jackstay_core::line_pacing::{LinePacing, QueueBounds};
use jackstay_core::pool::EndpointKey;
use jackstay_core::probe::answers::{ProbeAnswers, RefusalMeaning};
pub use jackstay_core::probe::schedule::ProbeTrigger;
use jackstay_core::request::start_up::Uptime;
use jackstay_core::tcp_info::TcpInfo;
use jackstay_core::watch::shadow::opening::ShadowCount;
use jackstay_sys::clock;
use jackstay_sys::sockets::zone;
use jackstay_sys::utc::{Utc, wall_clock};
use rustls::pki_types::ServerName;
use tokio::sync::Notify;

pub use self::connections::{FlowGuard, HandshakeGuard, TunnelledWatchGuard};
pub use self::flow_evidence::FlowEvidence;
pub use self::line::HostLine;
use self::line::Line;
use self::ping_limit::PingLimit;
pub use self::probe_signals::ProbeSignals;
pub use self::process_start::ProbeCredential;
use self::process_start::ProcessStart;
use self::slow_start::SlowStart;
use self::statistics::EndpointStatistics;
use self::version::EndpointVersion;
use super::capabilities::ApiserverProcess;
use super::readyz::ReadyzCheck;
use super::stats::{Ejection, EndpointStatus};
use crate::observe::events::{Change, EventKind};
use crate::observe::{EndpointMetrics, Loss, OpenStreams, StateGauge};

/// The name to verify is neither a DNS name nor an IP address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` cannot be verified in a certificate")]
pub struct InvalidServerName(pub String);

/// The name of an endpoint in logs and metrics.
pub fn label(address: &EndpointAddress, backend: Option<&Backend>) -> String {
    match backend {
        Some(backend) => format!("{address}/{}", backend.name),
        None => address.to_string(),
    }
}

/// The key of the next endpoint.
static NEXT_KEY: AtomicUsize = AtomicUsize::new(0);

/// An endpoint, shared by the workers, the prober and the admin server.
#[derive(Debug)]
pub struct Endpoint {
    key: EndpointKey,
    /// The name of the upstream.
    pub upstream: Arc<str>,
    /// Host and port.
    pub address: EndpointAddress,
    /// The apiserver behind the address that its connections reach; `None` if it is not known to be one of several.
    pub backend: Option<Backend>,
    /// The address as text, with the name of the backend, for logs and metrics.
    pub label: Arc<str>,
    /// The name that is sent as SNI and verified in the certificate.
    pub server_name: ServerName<'static>,
    /// The metrics of the endpoint.
    pub metrics: Arc<EndpointMetrics>,
    /// The time from which the times of PINGs are counted.
    pub ping_grid: Instant,
    ping_limit: PingLimit,
    guarded: Mutex<Guarded>,
    /// A copy of the state of `guarded.health`, for readers that must not wait for the lock.
    state: AtomicU8,
    slow_start: SlowStart,
    process_start: ProcessStart,
    statistics: EndpointStatistics,
    version: EndpointVersion,
    process: ArcSwap<ApiserverProcess>,
    api_root: ArcSwap<ApiRoot>,
    /// Signals from requests to the prober.
    pub probe: ProbeSignals,
    /// What flows show about the endpoint.
    pub flow_evidence: FlowEvidence,
    /// The shadows of watches at the endpoint.
    pub shadows: ShadowCount,
    line: Line,
    fallback: AtomicBool,
    shared: AtomicBool,
    /// Notified when a connection is opened or closed.
    connections_changed: Notify,
    /// Notified when its process has died, and when the endpoint is removed from the set.
    ended: Notify,
}

/// The parts that change together, under one lock.
#[derive(Debug)]
struct Guarded {
    health: EndpointHealth,
    backoff: ConnectBackoff,
    /// Why the last connect failed, unless one has succeeded since.
    connect_error: Option<String>,
    /// When the state was entered.
    since: SystemTime,
    since_instant: Instant,
    /// When it was last ready, or the endpoint joined the set.
    ready_until: Instant,
    last_ejection: Option<Ejection>,
    downtime: Downtime,
    last_check: Option<ReadyzCheck>,
    gauge: StateGauge,
}

impl Endpoint {
    /// An endpoint in state connecting. `server_name` replaces the host of the address as SNI and as the
    /// name to verify.
    ///
    /// # Errors
    /// The name is neither a DNS name nor an IP address.
    pub fn new(
        upstream: &Arc<str>,
        address: &EndpointAddress,
        server_name: Option<&str>,
        metrics: Arc<EndpointMetrics>,
    ) -> Result<Arc<Self>, InvalidServerName> {
        Self::of_backend(upstream, (address, None), server_name, metrics, &Arc::default())
    }

    /// [`Self::new`] for one of the apiservers behind the address. The endpoints of an upstream share `line`.
    ///
    /// # Errors
    /// The name is neither a DNS name nor an IP address.
    pub fn of_backend(
        upstream: &Arc<str>,
        (address, backend): (&EndpointAddress, Option<Backend>),
        server_name: Option<&str>,
        metrics: Arc<EndpointMetrics>,
        line: &Arc<HostLine>,
    ) -> Result<Arc<Self>, InvalidServerName> {
        let name = server_name.unwrap_or(&address.host);
        let server_name = ServerName::try_from(name.to_owned())
            .map_err(|_| InvalidServerName(name.to_owned()))?;
        let key = EndpointKey(NEXT_KEY.fetch_add(1, Ordering::Relaxed));
        let mut gauge = metrics.state_gauge();
        gauge.set(EndpointState::Connecting.as_str());
        Ok(Arc::new(Self {
            key,
            upstream: Arc::clone(upstream),
            address: address.clone(),
            label: label(address, backend.as_ref()).into(),
            backend,
            server_name,
            metrics,
            ping_grid: clock::now(),
            ping_limit: PingLimit::default(),
            guarded: Mutex::new(Guarded {
                health: EndpointHealth::default(),
                backoff: ConnectBackoff::default(),
                connect_error: None,
                since: wall_clock(),
                since_instant: clock::now(),
                ready_until: clock::now(),
                last_ejection: None,
                downtime: Downtime::default(),
                last_check: None,
                gauge,
            }),
            state: AtomicU8::new(EndpointState::Connecting as u8),
            slow_start: SlowStart::new(clock::now()),
            process_start: ProcessStart::default(),
            statistics: EndpointStatistics::default(),
            version: EndpointVersion::default(),
            process: ArcSwap::default(),
            api_root: ArcSwap::default(),
            probe: ProbeSignals::default(),
            flow_evidence: FlowEvidence::new(clock::now()),
            shadows: ShadowCount::new(),
            line: Line::new(key, line),
            fallback: AtomicBool::new(false),
            shared: AtomicBool::new(false),
            connections_changed: Notify::new(),
            ended: Notify::new(),
        }))
    }

    /// The addresses to connect to. A host that is no IP address is `localhost`, which means both loopback
    /// addresses without a DNS query (RFC 6761 section 6.3).
    pub fn socket_addresses(&self) -> Vec<SocketAddr> {
        let port = self.address.port;
        match self.address.ip() {
            Some(ip) => vec![zone::socket_address(ip, port, self.address.zone())],
            None => vec![
                SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port),
                SocketAddr::new(Ipv6Addr::LOCALHOST.into(), port),
            ],
        }
    }

    /// Whether its connections reach different apiservers, which cannot be told apart.
    pub fn is_indistinct(&self) -> bool {
        self.backend.as_ref().is_some_and(Backend::is_indistinct)
    }

    /// Names the endpoint in the tables of core. No other one ever has this key.
    pub fn key(&self) -> EndpointKey {
        self.key
    }

    /// The endpoint in a decision of core.
    pub fn condition(&self) -> EndpointCondition {
        let (state, probe_fails) = (self.state(), self.probe.is_failing());
        EndpointCondition { key: self.key, state, probe_fails, is_starting: self.is_starting() }
    }

    /// The state. One atomic load, because it is read for every candidate of a pick.
    pub fn state(&self) -> EndpointState {
        EndpointState::ALL[usize::from(self.state.load(Ordering::Relaxed))]
    }

    /// Why the endpoint is in its state.
    pub fn reason(&self) -> String {
        self.guarded().health.state().1.to_owned()
    }

    /// Its address, its state and the reason, and why no connection can be opened, although others are in use.
    pub fn description(&self) -> String {
        let (state, guarded) = (self.state(), self.guarded());
        let reason = guarded.health.state().1;
        let description = format!("{} is {} ({reason})", self.label, state.as_str());
        match &guarded.connect_error {
            Some(error) if *error != reason => {
                format!("{description}, but no connection can be opened: {error}")
            }
            _ => description,
        }
    }

    /// Whether requests may be sent to the endpoint. This includes one that is connected but has not
    /// answered `/readyz` yet, and a suspect one until a connection is silent.
    pub fn is_usable(&self) -> bool {
        match self.state() {
            EndpointState::Ready | EndpointState::Degraded => true,
            EndpointState::Connecting | EndpointState::Suspect => {
                self.guarded().health.connections.accept_requests()
            }
            EndpointState::Unverified
            | EndpointState::Ejected
            | EndpointState::NoH2
            | EndpointState::Leaving => false,
        }
    }

    /// Whether clients of flows are served, as far as it is known. They make TLS connections of their own, so besides
    /// a usable endpoint one does that has answered the last connect of the probe, although it has failed, or a flow
    /// that began after the endpoint has entered its state ([`FlowEvidence`]).
    pub fn forwards_flows(&self) -> bool {
        if self.is_usable() {
            return true;
        }
        let guarded = self.guarded();
        let (since, now) = (guarded.since_instant, clock::now());
        self.state() != EndpointState::Leaving
            && (guarded.health.answers() || self.flow_evidence.shows_service(since, now))
    }

    /// Whether it is ready, or has only lost its connections since ([`EndpointHealth::is_ready_or_returns`]).
    pub fn is_ready_or_returns(&self) -> bool {
        self.guarded().health.is_ready_or_returns()
    }

    /// Since when it is not ready; `None` while it is.
    pub fn failing_since(&self) -> Option<Instant> {
        (self.state() != EndpointState::Ready).then(|| self.guarded().ready_until)
    }

    /// How long the endpoint has been ready; `None` while it is not.
    pub fn ready_for(&self, now: Instant) -> Option<Duration> {
        self.slow_start.ready_for(now)
    }

    /// Share of its usual picks that the endpoint gets, in 0..=1. It is below 1 for a while after a
    /// recovery ([`jackstay_core::balance::slow_start`]).
    pub fn slow_start_share(&self, now: Instant) -> f64 {
        self.slow_start.share(now)
    }

    /// Whether it is a fallback: a configured endpoint that discovery did not report, or one of another host while an
    /// endpoint on this host is preferred. A fallback is picked only if there is no other endpoint of the same state.
    pub fn is_fallback(&self) -> bool {
        self.fallback.load(Ordering::Relaxed)
    }

    /// Sets whether it is a fallback.
    pub fn set_fallback(&self, fallback: bool) {
        self.fallback.store(fallback, Ordering::Relaxed);
    }

    /// Whether its connections may reach several apiservers ([`super::shared_address`]).
    pub fn is_shared(&self) -> bool {
        self.shared.load(Ordering::Relaxed)
    }

    /// Sets whether its connections may reach several apiservers.
    pub fn set_shared(&self, shared: bool) {
        self.shared.store(shared, Ordering::Relaxed);
    }

    /// Major and minor version; `None` while unknown. One atomic load, because it is read for candidates of a pick.
    pub fn minor_version(&self) -> Option<MinorVersion> {
        self.version.minor()
    }

    /// The version; `None` while unknown.
    pub fn version(&self) -> Option<ServerVersion> {
        self.version.get()
    }

    /// Records what `/version` has answered, or why that is no version.
    pub fn record_version(&self, read: Result<ServerVersion, VersionError>) {
        if self.version.record(read, (&self.upstream, &self.label)) {
            self.metrics.kubernetes_minor(self.minor_version().map_or(0, MinorVersion::minor));
        }
    }

    /// Where jackstay's own requests go.
    pub fn api_root(&self) -> Guard<Arc<ApiRoot>> {
        self.api_root.load()
    }

    /// Sets where jackstay's own requests go.
    pub(super) fn set_api_root(&self, root: &Arc<ApiRoot>) {
        self.api_root.store(Arc::clone(root));
    }

    /// The process of the apiserver, and what is known about its capabilities.
    pub fn process(&self) -> Arc<ApiserverProcess> {
        self.process.load_full()
    }

    /// Called when the process may have been replaced by another one.
    pub fn replace_process(&self) {
        self.process.store(Arc::default());
    }

    /// Records that the endpoint was removed from the set. Its connections drain.
    pub fn remove(&self) {
        self.observe(Observation::Removed);
        self.metrics.kubernetes_minor(0);
        self.metrics.line_delay(Duration::ZERO);
        self.ended.notify_waiters();
    }

    /// Waits until the endpoint is removed from the set.
    pub async fn removed(&self) {
        self.until_ended(|| self.state() == EndpointState::Leaving).await;
    }

    /// Waits until `check` returns true, which depends on the death of the process or on the removal.
    async fn until_ended(&self, check: impl Fn() -> bool) {
        loop {
            let mut ended = std::pin::pin!(self.ended.notified());
            // Registered before the check, so that no change is missed.
            ended.as_mut().enable();
            if check() {
                return;
            }
            ended.await;
        }
    }

    /// Whether its process may have just started. One atomic load, if it has not.
    pub fn is_starting(&self) -> bool {
        let is_starting = &self.process_start.is_starting;
        is_starting.load(Ordering::Relaxed) && {
            // Locked until the result is stored, so that no `begin` is lost.
            let guarded = self.guarded();
            let still = self.uptime_of(&guarded).is_starting(clock::now());
            if !still {
                is_starting.store(false, Ordering::Relaxed);
            }
            still
        }
    }

    /// How long its process has been up, as far as is known.
    pub fn uptime(&self) -> Uptime {
        self.uptime_of(&self.guarded())
    }

    fn uptime_of(&self, guarded: &Guarded) -> Uptime {
        let is_probe_refused = self.process_start.is_probe_refused();
        Uptime { connected_since: guarded.health.connections.since, is_probe_refused }
    }

    /// What it has answered to probes with this credential.
    pub fn probe_answers(&self, credential: ProbeCredential) -> ProbeAnswers {
        self.process_start.answers()[credential as usize]
    }

    /// Changes what is known about its answers.
    pub fn update_probe_answers(
        &self,
        credential: ProbeCredential,
        update: impl FnOnce(&mut ProbeAnswers),
    ) {
        update(&mut self.process_start.answers()[credential as usize]);
    }

    /// A probe with this credential was refused. `others`: what the other endpoints have answered to it. Returns what
    /// the refusal means.
    pub fn probe_refused(
        &self,
        credential: ProbeCredential,
        others: impl IntoIterator<Item = ProbeAnswers>,
        now: Instant,
    ) -> RefusalMeaning {
        let _guarded = self.guarded();
        let meaning = self.process_start.answers()[credential as usize].refused(others, now);
        if meaning == RefusalMeaning::NotYet {
            self.process_start.begin();
        }
        meaning
    }

    /// The interval of PINGs on its connections, if it limits them.
    pub fn ping_limit(&self) -> Option<Duration> {
        self.ping_limit.get()
    }

    /// The endpoint has closed a connection because of its PINGs, which had the interval `used`. `reason` is the text
    /// of its GOAWAY.
    pub fn pings_refused(&self, used: Duration, reason: &str) {
        self.ping_limit.refused(used, reason, (&self.upstream, &self.label), &self.metrics);
    }

    /// Records that a `/readyz` failed or is overdue. Returns whether the previous one was ok.
    pub fn note_probe_failing(&self, now: Instant) -> bool {
        self.guarded().health.note_probe_failing(now);
        !self.probe.set_failing(true)
    }

    /// Records that the `/readyz` request of `asked_at` was ok.
    pub fn note_probe_ok(&self, asked_at: Instant) {
        self.guarded().health.note_probe_ok(asked_at);
        self.probe.set_failing(false);
    }

    /// Records the latest `/readyz` check, for `/status`.
    pub fn record_check(&self, check: ReadyzCheck) {
        self.guarded().last_check = Some(check);
    }

    /// The readiness of the endpoint, for evacuations.
    pub fn readiness(&self) -> EndpointReadiness {
        self.guarded().health.readiness()
    }

    /// Records that a response head with this status arrived.
    pub fn response_received(&self, status: u16) {
        self.metrics.answered(status);
        self.probe.response_received(status);
    }

    /// The endpoint in `/status`.
    pub fn status(&self) -> EndpointStatus {
        let usable = self.is_usable();
        let connections = self.statistics.connections();
        let (answers, errors) = self.metrics.history().totals();
        let (version, version_error) = self.version.status();
        let guarded = self.guarded();
        EndpointStatus {
            version,
            version_error,
            capabilities: self.process.load().status(),
            ping_limit_s: self.ping_limit().map(|interval| interval.as_secs_f64()),
            line_delay_s: self.line.shown_delay().map(|delay| delay.as_secs_f64()),
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
            readiness: guarded.health.readyz_result(),
            reason: guarded.health.state().1.to_owned(),
            since: Utc(guarded.since).seconds(),
            last_ejection: guarded.last_ejection.clone(),
            downtime_seconds: guarded.downtime.total(clock::now()).as_secs_f64(),
            ejections: guarded.downtime.ejections,
            last_check: guarded.last_check.clone(),
            connections,
            flows: self.flows(),
            tunnelled_watches: self.tunnelled_watches(),
        }
    }

    /// Looks at a connection to the endpoint, whose line may be slow. If its bounds have changed, they are set with `bound`.
    pub fn pace(
        &self,
        pacing: &mut LinePacing,
        info: &TcpInfo,
        now: Instant,
        bound: impl FnOnce(QueueBounds) -> io::Result<()>,
    ) {
        self.line.pace(pacing, info, &self.metrics, now, bound);
    }

    /// By how much answers may be late, because a line has a long queue ([`jackstay_core::line_delay`]).
    pub fn line_delay(&self, now: Instant) -> Duration {
        self.line.delay((&self.upstream, &self.label), &self.metrics, now)
    }

    fn guarded(&self) -> MutexGuard<'_, Guarded> {
        self.guarded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes in an observation: steps the health and publishes the transition. If a connect has succeeded,
    /// the backoff is reset.
    pub fn observe(&self, observation: Observation<'_>) {
        let mut guarded = self.guarded();
        let connected =
            matches!(observation, Observation::Connected | Observation::ConnectionOpened { .. });
        if matches!(observation, Observation::ConnectionOpened { .. }) {
            self.process_start.begin();
        }
        let closed = matches!(observation, Observation::ConnectionClosed { .. });
        if connected {
            guarded.backoff.succeeded();
            guarded.connect_error = None;
        }
        self.step(guarded, observation);
        if connected || closed {
            self.connections_changed.notify_waiters();
        }
    }

    /// Steps the health and publishes the transition, if there is one.
    fn step(&self, mut guarded: MutexGuard<'_, Guarded>, observation: Observation<'_>) {
        let Some(transition) = guarded.health.step(observation) else { return };
        let EndpointTransition { from, to, reason, died, slow_start, is_fault } = &transition;
        (guarded.since, guarded.since_instant) = (wall_clock(), clock::now());
        if *from == EndpointState::Ready {
            guarded.ready_until = guarded.since_instant;
        }
        let ejected = matches!(to, EndpointState::Ejected | EndpointState::NoH2);
        guarded.downtime.record(ejected, clock::now());
        if ejected {
            let at = Utc(guarded.since).seconds();
            guarded.last_ejection = Some(Ejection { at, reason: reason.clone() });
            self.metrics.ejected(guarded.ejection_label(*to));
        }
        if *died {
            self.statistics.deaths.fetch_add(1, Ordering::Relaxed);
        }
        match to {
            EndpointState::Ready => self.slow_start.ready(*slow_start, clock::now()),
            _ => self.slow_start.not_ready(),
        }
        self.state.store(*to as u8, Ordering::Relaxed);
        guarded.gauge.set(to.as_str());
        drop(guarded);
        let change = Change {
            kind: EventKind::Endpoint,
            upstream: Some(&self.upstream),
            name: &self.label,
            detail: "",
            from: from.as_str(),
            to: to.as_str(),
            reason,
            effect: to.effect(),
            bad: *is_fault,
        };
        // The flows of a process that died are reset.
        let flows = if *died { self.flows() } else { 0 };
        let lost = Loss { connections: flows as u64, open: OpenStreams::of_flows(flows) };
        self.metrics.events().endpoint_changed(&change, to.availability(), lost);
        if *died {
            self.ended.notify_waiters();
        }
    }
}

/// Time in which the endpoint was ejected since it joined the set, and number of ejections.
#[derive(Debug, Default)]
struct Downtime {
    total: Duration,
    since: Option<Instant>,
    ejections: u64,
}

impl Downtime {
    /// Records whether the endpoint is ejected at `now`.
    fn record(&mut self, ejected: bool, now: Instant) {
        if ejected && self.since.is_none() {
            self.since = Some(now);
            self.ejections += 1;
        } else if !ejected && let Some(since) = self.since.take() {
            self.total += now.saturating_duration_since(since);
        }
    }

    /// The total at `now`, including an ejection that has not ended.
    fn total(&self, now: Instant) -> Duration {
        self.total + self.since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since))
    }
}

impl Guarded {
    /// The value of the label `reason` of the ejection counter.
    fn ejection_label(&self, to: EndpointState) -> &'static str {
        if to == EndpointState::NoH2 {
            "no_h2"
        } else if self.health.unresponsive.is_some() {
            "silent"
        } else if self.backoff.has_timed_out() {
            "connect_timeout"
        } else {
            "connect_failed"
        }
    }
}

#[cfg(test)]
mod tests;
