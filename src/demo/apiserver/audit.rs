//! Every request that the servers of a cluster received, so that tests can assert "at most once" and the
//! identity of each request.

use crate::demo::lock;
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

/// Records kept; the oldest is dropped for a new one.
const MAX_RECORDS: usize = 200_000;

/// One request as one server received it.
#[derive(Debug, Clone)]
pub struct Record {
    /// When the server had received its head.
    pub time: SystemTime,
    /// The name of the server.
    pub server: String,
    /// Identifies the connection; unique within the process.
    pub connection: u64,
    /// The peer address of the connection.
    pub remote: SocketAddr,
    /// `HTTP/1.1` or `HTTP/2.0`.
    pub version: http::Version,
    /// The Kubernetes verb.
    pub verb: &'static str,
    /// Path and query as received.
    pub path: String,
    /// The authenticated user; empty for a 401.
    pub user: String,
    /// The groups of that user.
    pub groups: Vec<String>,
    /// Serial number (hex) of the client certificate, whether it could be verified or not.
    pub certificate_serial: Option<String>,
    /// The client's `Audit-ID`.
    pub audit_id: Option<String>,
    /// The names of all headers; a repeated header appears several times.
    pub header_names: Vec<String>,
    /// All values of `X-Forwarded-For`, joined with commas.
    pub forwarded_for: Option<String>,
    /// The status of the response; `None` until it is sent, and if the client left before.
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
    /// Number of the first record in `kept`: how many were dropped or cleared before it.
    first: u64,
    kept: VecDeque<Record>,
}

impl Audit {
    /// A copy of all records, oldest first.
    pub fn records(&self) -> Vec<Record> {
        self.select(|_| true)
    }

    /// A copy of the records that match.
    pub fn select(&self, wanted: impl Fn(&Record) -> bool) -> Vec<Record> {
        lock(&self.records).kept.iter().filter(|r| wanted(r)).cloned().collect()
    }

    /// Number of requests with this `Audit-ID`.
    pub fn count_id(&self, id: &str) -> usize {
        lock(&self.records).kept.iter().filter(|r| r.audit_id.as_deref() == Some(id)).count()
    }

    /// Removes all records.
    pub fn clear(&self) {
        let mut records = lock(&self.records);
        records.first += records.kept.len() as u64;
        records.kept.clear();
    }

    /// Turns recording on or off; benches turn it off.
    pub fn set_enabled(&self, enabled: bool) {
        self.off.store(!enabled, Ordering::Relaxed);
    }

    pub(super) fn enabled(&self) -> bool {
        !self.off.load(Ordering::Relaxed)
    }

    pub(super) fn push(&self, record: Record) -> u64 {
        let mut records = lock(&self.records);
        if records.kept.len() == MAX_RECORDS {
            records.kept.pop_front();
            records.first += 1;
        }
        records.kept.push_back(record);
        records.first + records.kept.len() as u64 - 1
    }

    pub(super) fn amend(&self, number: u64, change: impl FnOnce(&mut Record)) {
        let mut records = lock(&self.records);
        let at = number.checked_sub(records.first).and_then(|at| usize::try_from(at).ok());
        if let Some(record) = at.and_then(|at| records.kept.get_mut(at)) {
            change(record);
        }
    }
}
