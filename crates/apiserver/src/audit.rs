//! Records every request that the servers of a cluster receive. Tests use the records to assert that a
//! request was executed at most once, and by which user.

use crate::lock;
use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

/// Largest number of records; a new one then replaces the oldest.
const MAX_RECORDS: usize = 200_000;

/// One request as one server received it.
#[derive(Debug, Clone)]
pub struct Record {
    /// When the server received its head.
    pub time: SystemTime,
    /// The name of the server.
    pub server: String,
    /// Identifies the connection; unique within the cluster.
    pub connection: u64,
    /// The HTTP version, 1.1 or 2.
    pub version: http::Version,
    /// The Kubernetes verb.
    pub verb: &'static str,
    /// Path and query as received.
    pub path: String,
    /// The authenticated user; empty for a 401.
    pub user: String,
    /// The groups of that user.
    pub groups: Vec<String>,
    /// Serial number (hex) of the client certificate, even if the certificate is not valid.
    pub certificate_serial: Option<String>,
    /// The client's `Audit-ID`.
    pub audit_id: Option<String>,
    /// The names of all headers; a repeated header appears several times.
    pub header_names: Vec<String>,
    /// All values of `X-Forwarded-For`, joined with commas.
    pub forwarded_for: Option<String>,
    /// The status of the response; `None` until the response is ready to be sent.
    pub status: Option<u16>,
}

/// The records of all servers of a cluster, oldest first.
#[derive(Debug, Default)]
pub struct Audit {
    records: Mutex<Records>,
    disabled: AtomicBool,
}

#[derive(Debug, Default)]
struct Records {
    /// The number of records removed so far, which is also the number of the first record in `list`.
    removed: u64,
    list: VecDeque<Record>,
}

impl Audit {
    /// A copy of all records, oldest first.
    pub fn records(&self) -> Vec<Record> {
        self.select(|_| true)
    }

    /// A copy of the records that match.
    pub fn select(&self, wanted: impl Fn(&Record) -> bool) -> Vec<Record> {
        lock(&self.records).list.iter().filter(|record| wanted(record)).cloned().collect()
    }

    /// Number of requests with this `Audit-ID`.
    pub fn count_id(&self, id: &str) -> usize {
        lock(&self.records).list.iter().filter(|r| r.audit_id.as_deref() == Some(id)).count()
    }

    /// Removes all records.
    pub fn clear(&self) {
        let mut records = lock(&self.records);
        records.removed += records.list.len() as u64;
        records.list.clear();
    }

    /// Turns recording on or off; benches turn it off.
    pub fn set_enabled(&self, enabled: bool) {
        self.disabled.store(!enabled, Ordering::Relaxed);
    }

    pub(super) fn enabled(&self) -> bool {
        !self.disabled.load(Ordering::Relaxed)
    }

    /// Adds a record and returns its number.
    pub(super) fn push(&self, record: Record) -> u64 {
        let mut records = lock(&self.records);
        if records.list.len() == MAX_RECORDS {
            records.list.pop_front();
            records.removed += 1;
        }
        records.list.push_back(record);
        records.removed + records.list.len() as u64 - 1
    }

    /// Changes the record with this number, unless it was removed.
    pub(super) fn amend(&self, number: u64, change: impl FnOnce(&mut Record)) {
        let mut records = lock(&self.records);
        let at = number.checked_sub(records.removed).and_then(|at| usize::try_from(at).ok());
        if let Some(record) = at.and_then(|at| records.list.get_mut(at)) {
            change(record);
        }
    }
}
