//! The log of a run. Entries are small copies of numbers, so that every run can keep its log; text is made only for the
//! log of a seed that failed. The hash of the entries shows whether two runs were the same.

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use jackstay_core::connection::ConnectionState;
use jackstay_core::endpoint_state::EndpointState;

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // the text of a variant explains its fields
pub enum Entry {
    Fault {
        number: u32,
    },
    Connect {
        connection: u32,
        from: u16,
        to: u16,
    },
    ConnectEnded {
        connection: u32,
        ok: bool,
    },
    Closed {
        connection: u32,
        reset: bool,
    },
    Retransmit {
        connection: u32,
        count: u8,
    },
    Connection {
        node: u16,
        connection: u32,
        endpoint: u8,
        state: ConnectionState,
        reason: &'static str,
    },
    Endpoint {
        node: u16,
        endpoint: u8,
        state: EndpointState,
    },
    Attempt {
        node: u16,
        request: u32,
        connection: u32,
        number: u32,
        hedge: bool,
    },
    AttemptEnded {
        node: u16,
        request: u32,
        connection: u32,
        reason: &'static str,
    },
    Answered {
        node: u16,
        request: u32,
        status: u16,
    },
    WatchLost {
        node: u16,
        request: u32,
        reason: &'static str,
    },
    WatchResumed {
        node: u16,
        request: u32,
        connection: u32,
        moved: bool,
    },
    WatchHeld {
        node: u16,
        request: u32,
    },
    WatchEnded {
        node: u16,
        request: u32,
        reason: &'static str,
    },
    Commit {
        revision: u64,
        token: u64,
    },
    Sent {
        client: u16,
        request: u64,
    },
    Reply {
        client: u16,
        request: u64,
        status: u16,
    },
    Failed {
        client: u16,
        request: u64,
        reason: &'static str,
    },
    Delivered {
        client: u16,
        revision: u64,
    },
    Relist {
        client: u16,
    },
    Server {
        server: u8,
        what: &'static str,
    },
    Listens {
        process: u16,
        port: u16,
    },
    Accepted {
        connection: u32,
        process: u16,
    },
    Process {
        process: u16,
        what: &'static str,
    },
}

impl fmt::Display for Entry {
    #[allow(clippy::too_many_lines, reason = "a table of texts")]
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Fault { number } => write!(f, "fault {number}"),
            Self::Connect { connection, from, to } => {
                write!(f, "connection {connection}: process {from} connects to host {to}")
            }
            Self::ConnectEnded { connection, ok } => {
                write!(
                    f,
                    "connection {connection}: {}",
                    if ok { "established" } else { "not established" }
                )
            }
            Self::Closed { connection, reset } => {
                write!(f, "connection {connection}: {}", if reset { "reset" } else { "closed" })
            }
            Self::Retransmit { connection, count } => {
                write!(f, "connection {connection}: retransmission {count} in a row")
            }
            Self::Connection { node, connection, endpoint, state, reason } => write!(
                f,
                "node {node}: connection {connection} to endpoint {endpoint} is {} ({reason})",
                state.as_str()
            ),
            Self::Endpoint { node, endpoint, state } => {
                write!(f, "node {node}: endpoint {endpoint} is {}", state.as_str())
            }
            Self::Attempt { node, request, connection, number, hedge } => write!(
                f,
                "node {node}: request {request} attempt {number}{} on connection {connection}",
                if hedge { " (hedge)" } else { "" }
            ),
            Self::AttemptEnded { node, request, connection, reason } => {
                write!(
                    f,
                    "node {node}: request {request} failed on connection {connection}: {reason}"
                )
            }
            Self::Answered { node, request, status } => {
                write!(f, "node {node}: request {request} answered with {status}")
            }
            Self::WatchLost { node, request, reason } => {
                write!(f, "node {node}: watch {request} lost its stream: {reason}")
            }
            Self::WatchResumed { node, request, connection, moved } => {
                let how = if moved { "moves to" } else { "continues on" };
                write!(f, "node {node}: watch {request} {how} connection {connection}")
            }
            Self::WatchHeld { node, request } => write!(f, "node {node}: watch {request} is held"),
            Self::WatchEnded { node, request, reason } => {
                write!(f, "node {node}: watch {request} ends: {reason}")
            }
            Self::Commit { revision, token } => {
                write!(f, "store: revision {revision}, write {token:x}")
            }
            Self::Sent { client, request } => write!(f, "client {client}: sends request {request}"),
            Self::Reply { client, request, status } => {
                write!(f, "client {client}: request {request} has status {status}")
            }
            Self::Failed { client, request, reason } => {
                write!(f, "client {client}: request {request} failed: {reason}")
            }
            Self::Delivered { client, revision } => {
                write!(f, "client {client}: event of revision {revision}")
            }
            Self::Relist { client } => write!(f, "client {client}: lists again"),
            Self::Server { server, what } => write!(f, "server {server}: {what}"),
            Self::Listens { process, port } => {
                write!(f, "process {process}: listens on port {port}")
            }
            Self::Accepted { connection, process } => {
                write!(f, "connection {connection}: process {process} may accept it")
            }
            Self::Process { process, what } => write!(f, "process {process}: {what}"),
        }
    }
}

/// The entries of a run, each with its virtual time.
#[derive(Debug, Default)]
pub struct Trace {
    entries: Vec<(Duration, Entry)>,
    is_off: bool,
}

impl Trace {
    /// Adds no entry from now on: the log of a fleet is too long.
    pub fn turn_off(&mut self) {
        self.is_off = true;
    }

    /// Adds an entry.
    pub fn record(&mut self, at: Duration, entry: Entry) {
        if !self.is_off {
            self.entries.push((at, entry));
        }
    }

    /// The entries, oldest first.
    pub fn entries(&self) -> &[(Duration, Entry)] {
        &self.entries
    }

    /// A number that differs if the entries differ.
    pub fn hash(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.entries.hash(&mut hasher);
        hasher.finish()
    }
}

impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, entry) in &self.entries {
            writeln!(f, "{:>12.6} {entry}", at.as_secs_f64())?;
        }
        Ok(())
    }
}
