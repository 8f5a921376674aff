//! The log of a network. Entries are small copies of numbers, which are hashed in every run; text is made only for a log
//! that is kept.

use std::fmt;
use std::time::Duration;

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // the text of a variant explains its fields
pub(super) enum Entry {
    Connect { connection: u32, from: u16, to: u16 },
    ConnectEnded { connection: u32, ok: bool },
    Closed { connection: u32, reset: bool },
    Retransmit { connection: u32, count: u8 },
    Listens { process: u16, port: u16 },
    Accepted { connection: u32, process: u16 },
    Process { process: u16, what: &'static str },
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
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

/// The entries, each with its virtual time.
#[derive(Debug, Default)]
pub(super) struct Log(Vec<(Duration, Entry)>);

impl Log {
    /// Adds an entry.
    pub(super) fn record(&mut self, at: Duration, entry: Entry) {
        self.0.push((at, entry));
    }
}

impl fmt::Display for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, entry) in &self.0 {
            writeln!(f, "{:>12.6} {entry}", at.as_secs_f64())?;
        }
        Ok(())
    }
}
