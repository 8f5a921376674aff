//! What every server of a cluster was asked: the oracle of tests that say "at most once" and
//! "as whom".

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

/// How many records are kept; older ones fall out.
const KEPT: usize = 200_000;

/// One request, as one server saw it.
#[derive(Debug, Clone)]
pub struct Record {
    /// When its head had arrived.
    pub time: SystemTime,
    /// The name of the server.
    pub server: String,
    /// The connection it came on; unique within the process.
    pub connection: u64,
    /// The other end of that connection.
    pub remote: SocketAddr,
    /// `HTTP/1.1` or `HTTP/2.0`.
    pub version: http::Version,
    /// The Kubernetes verb.
    pub verb: &'static str,
    /// Path and query as received.
    pub path: String,
    /// Who it was taken for; empty if nobody (401).
    pub user: String,
    /// The groups of that user.
    pub groups: Vec<String>,
    /// The serial number (hex) of the certificate of the connection, verified or not.
    pub certificate_serial: Option<String>,
    /// The client's `Audit-ID`.
    pub audit_id: Option<String>,
    /// The names of all headers, repeated ones repeated.
    pub header_names: Vec<String>,
    /// Every `X-Forwarded-For`, joined with commas.
    pub forwarded_for: Option<String>,
    /// The status of the answer; `None` while there is none, and for ever if the client left.
    pub status: Option<u16>,
}

/// The records of all servers of a cluster, oldest first.
#[derive(Debug, Default)]
pub struct Audit {
    records: Mutex<Records>,
    off: AtomicBool,
}

#[derive(Debug, Default)]
struct Records {
    /// How many have fallen out or were cleared: the number of the first one still there.
    first: u64,
    kept: VecDeque<Record>,
}

impl Audit {
    /// A copy of everything kept.
    pub fn records(&self) -> Vec<Record> {
        self.lock().kept.iter().cloned().collect()
    }

    /// The records that a test is interested in.
    pub fn select(&self, wanted: impl Fn(&Record) -> bool) -> Vec<Record> {
        self.lock().kept.iter().filter(|r| wanted(r)).cloned().collect()
    }

    /// How many requests came with this `Audit-ID`.
    pub fn count_id(&self, id: &str) -> usize {
        self.lock().kept.iter().filter(|r| r.audit_id.as_deref() == Some(id)).count()
    }

    /// Forgets everything so far.
    pub fn clear(&self) {
        let mut records = self.lock();
        records.first += records.kept.len() as u64;
        records.kept.clear();
    }

    /// Stops or starts recording (benches need none).
    pub fn set_enabled(&self, enabled: bool) {
        self.off.store(!enabled, Ordering::Relaxed);
    }

    pub(super) fn enabled(&self) -> bool {
        !self.off.load(Ordering::Relaxed)
    }

    pub(super) fn push(&self, record: Record) -> u64 {
        let mut records = self.lock();
        if records.kept.len() == KEPT {
            records.kept.pop_front();
            records.first += 1;
        }
        records.kept.push_back(record);
        records.first + records.kept.len() as u64 - 1
    }

    pub(super) fn amend(&self, number: u64, change: impl FnOnce(&mut Record)) {
        let mut records = self.lock();
        let at = number.checked_sub(records.first).and_then(|at| usize::try_from(at).ok());
        if let Some(record) = at.and_then(|at| records.kept.get_mut(at)) {
            change(record);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Records> {
        self.records.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
