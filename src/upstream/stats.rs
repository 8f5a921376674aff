//! Statistics of endpoints and connections for `/status`.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use jackstay_core::connection::{ConnectionMachine, ConnectionState};
use jackstay_sys::clock;
use serde::Serialize;

use super::capabilities::CapabilityStatus;
use super::credentials::CredentialClass;
use super::readyz::ReadyzCheck;
use crate::observe::history::RttQuantiles;

/// What `/status` shows of a connection. Its worker writes it and never reads it: the state belongs to
/// [`ConnectionMachine`].
#[derive(Debug)]
pub struct ConnectionStats {
    /// The class for which it was opened.
    opened_for: CredentialClass,
    /// Whether it was handed over to the class of proven tokens.
    handed_over: AtomicBool,
    /// Whether it serves heartbeats only.
    for_heartbeats: AtomicBool,
    /// Serial number of the client certificate, as hex.
    pub serial: Option<String>,
    /// The local address, which identifies the connection in `ss` and in packet captures.
    pub local: Option<SocketAddr>,
    opened: Instant,
    /// The discriminant of a [`ConnectionState`].
    state: AtomicU8,
    streams: AtomicUsize,
    watches: AtomicUsize,
    rtt_micros: AtomicU64,
    stream_window: AtomicU32,
}

impl ConnectionStats {
    /// Statistics of a new live connection.
    pub fn new(
        class: CredentialClass,
        serial: Option<String>,
        local: Option<SocketAddr>,
        now: Instant,
    ) -> Arc<Self> {
        Arc::new(Self {
            opened_for: class,
            handed_over: AtomicBool::new(false),
            for_heartbeats: AtomicBool::new(false),
            serial,
            local,
            opened: now,
            state: AtomicU8::new(ConnectionState::Live as u8),
            streams: AtomicUsize::new(0),
            watches: AtomicUsize::new(0),
            rtt_micros: AtomicU64::new(0),
            stream_window: AtomicU32::new(0),
        })
    }

    /// The connection serves the requests with proven tokens from now on.
    pub fn hand_over(&self) {
        self.handed_over.store(true, Ordering::Relaxed);
    }

    /// The connection serves heartbeats only.
    pub fn serve_heartbeats(&self) {
        self.for_heartbeats.store(true, Ordering::Relaxed);
    }

    /// Copies the present figures.
    pub fn publish(&self, machine: &ConnectionMachine) {
        self.state.store(machine.state() as u8, Ordering::Relaxed);
        self.streams.store(machine.streams(), Ordering::Relaxed);
        self.watches.store(machine.watches(), Ordering::Relaxed);
    }

    /// Number of watches.
    pub fn watches(&self) -> usize {
        self.watches.load(Ordering::Relaxed)
    }

    /// Sets the smoothed round-trip time.
    pub fn set_rtt(&self, rtt: Duration) {
        self.rtt_micros.store(rtt.as_micros() as u64, Ordering::Relaxed);
    }

    /// Sets the receive window of each stream.
    pub fn set_stream_window(&self, bytes: u32) {
        self.stream_window.store(bytes, Ordering::Relaxed);
    }

    pub fn status(&self) -> ConnectionStatus {
        let class = match self.opened_for {
            _ if self.handed_over.load(Ordering::Relaxed) => {
                CredentialClass::Token.as_str().to_owned()
            }
            class @ CredentialClass::Identity(number) => format!("{}-{number}", class.as_str()),
            class => class.as_str().to_owned(),
        };
        ConnectionStatus {
            class,
            for_heartbeats: self.for_heartbeats.load(Ordering::Relaxed),
            state: ConnectionState::ALL[usize::from(self.state.load(Ordering::Relaxed))].as_str(),
            local: self.local.map(|address| address.to_string()),
            age_s: clock::elapsed(self.opened).as_secs(),
            rtt_ms: self.rtt_micros.load(Ordering::Relaxed) as f64 / 1000.0,
            stream_window_bytes: self.stream_window.load(Ordering::Relaxed),
            streams: self.streams.load(Ordering::Relaxed),
            watches: self.watches(),
            serial: self.serial.clone(),
        }
    }
}

/// An endpoint in `/status`.
#[derive(Debug, Clone, Serialize)]
pub struct EndpointStatus {
    pub address: String,
    /// Name that is verified in its certificate.
    pub server_name: String,
    /// What it reports at `/version`, such as `v1.36.2`.
    pub version: Option<String>,
    /// Why its version is unknown, if `/version` was read.
    pub version_error: Option<String>,
    /// What is known about its capabilities; absent if no client has sent a watch that needs it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capabilities: Option<CapabilityStatus>,
    /// Whether it is picked only if there is no other endpoint of the same state.
    pub fallback: bool,
    pub state: &'static str,
    /// Whether it can be sent requests.
    pub usable: bool,
    /// Result of `/readyz`: `ok`, `failing` or `unknown`.
    pub readiness: &'static str,
    /// Why it is in this state.
    pub reason: String,
    /// When it entered this state, RFC 3339.
    pub since: String,
    pub last_ejection: Option<Ejection>,
    /// Seconds spent ejected (states `ejected` and `no_h2`) since the endpoint joined the set.
    pub downtime_seconds: f64,
    /// Number of ejections since the endpoint joined the set.
    pub ejections: u64,
    pub last_check: Option<ReadyzCheck>,
    /// Seconds between two PINGs, if the endpoint has closed connections because of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ping_limit_s: Option<f64>,
    /// By how many seconds deadlines are longer, because the queue of a slow line is long.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub line_delay_s: Option<f64>,
    /// The latest PING round trips on all connections, at most [`crate::observe::history::SAMPLES`].
    pub rtt: Option<RttQuantiles>,
    pub streams: usize,
    pub watches: usize,
    /// Number of received response heads.
    pub answers: u64,
    /// Number of those with a status of 500 or above.
    pub errors: u64,
    pub connections: Vec<ConnectionStatus>,
    /// Number of passthrough flows.
    pub flows: usize,
    /// Number of watches over WebSocket, which cannot be resumed.
    pub tunnelled_watches: usize,
}

/// An ejection in `/status`.
#[derive(Debug, Clone, Serialize)]
pub struct Ejection {
    /// When the endpoint was ejected, RFC 3339.
    pub at: String,
    /// Why it was ejected.
    pub reason: String,
}

/// A connection in `/status`.
#[derive(Debug, Clone, Serialize)]
pub struct ConnectionStatus {
    pub class: String,
    /// Whether it serves the heartbeats of the class, and nothing else.
    pub for_heartbeats: bool,
    pub state: &'static str,
    pub local: Option<String>,
    pub age_s: u64,
    /// Smoothed PING round-trip time in milliseconds.
    pub rtt_ms: f64,
    /// Receive window of each stream, which follows the line.
    pub stream_window_bytes: u32,
    pub streams: usize,
    pub watches: usize,
    /// Serial number of the client certificate, as hex.
    pub serial: Option<String>,
}
