//! What a run has shown, and the promises that it is compared with.

mod group;

use std::fmt;
use std::time::Duration;

use crate::checker::Collection;

pub use self::group::{GroupFindings, GroupPromises};

/// What a run has shown.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Findings {
    /// Reads that ended.
    pub reads: u64,
    /// Reads that failed.
    pub failed_reads: u64,
    /// The longest time that a read took.
    pub slowest_read: Duration,
    /// Lists of a large collection, and lists by watches, that ended.
    pub lists: u64,
    /// Responses to lists of a large collection that were compressed.
    pub compressed_lists: u64,
    /// Lists that failed.
    pub failed_lists: u64,
    /// The longest time that one of them took.
    pub slowest_list: Duration,
    /// Writes that ended.
    pub writes: u64,
    /// Writes that failed.
    pub failed_writes: u64,
    /// The longest time that a write took.
    pub slowest_write: Duration,
    /// Requests that were refused because the apiservers do not accept their token any more.
    pub unauthorized: u64,
    /// Events that informers received.
    pub events: u64,
    /// The longest time from a change to an informer.
    pub longest_silence: Duration,
    /// Lists after the first one.
    pub relists: u64,
    /// Watches whose stream or connection was lost.
    pub watches_broken: u64,
    /// Watches that ended cleanly.
    pub watches_ended: u64,
    /// The longest time between two renewals of a lease.
    pub longest_lease: Duration,
    /// Renewals that failed.
    pub failed_leases: u64,
    /// Leaders that have lost their lease. No promise has a bound for it: [`Self::longest_lease`] has one.
    pub leaders_lost: u64,
    /// The most connects of a node to apiservers within 10 s ([`crate::checker::traffic::CONNECTS_WITHIN`]).
    pub connects: u64,
    /// What clients of the aggregated group have seen. The figures above do not count it, except for lists and watches.
    pub group: GroupFindings,
    /// Clients that were stopped.
    pub clients_stopped: u64,
    /// Rules that hold in every scenario and were broken.
    pub violations: Vec<String>,
}

impl Findings {
    pub(crate) fn violation(&mut self, text: String) {
        self.violations.push(text);
    }

    pub(crate) fn read(&mut self, ok: bool, took: Duration) {
        self.reads += 1;
        self.failed_reads += u64::from(!ok);
        self.slowest_read = self.slowest_read.max(took);
    }

    pub(crate) fn read_open(&mut self, since: Duration) {
        self.slowest_read = self.slowest_read.max(since);
    }

    pub(crate) fn list(&mut self, ok: bool, took: Duration) {
        self.lists += 1;
        self.failed_lists += u64::from(!ok);
        self.list_open(took);
    }

    pub(crate) fn list_open(&mut self, since: Duration) {
        self.slowest_list = self.slowest_list.max(since);
    }

    pub(crate) fn write(&mut self, ok: bool, took: Duration) {
        self.writes += 1;
        self.failed_writes += u64::from(!ok);
        self.slowest_write = self.slowest_write.max(took);
    }

    pub(crate) fn write_open(&mut self, since: Duration) {
        self.slowest_write = self.slowest_write.max(since);
    }

    pub(crate) fn event(&mut self, of: &Collection, after: Duration) {
        self.events += 1;
        self.event_open(of, after);
    }

    pub(crate) fn event_open(&mut self, of: &Collection, since: Duration) {
        if of.is_aggregated() {
            self.group.silent(since);
        } else {
            self.longest_silence = self.longest_silence.max(since);
        }
    }

    pub(crate) fn lease_renewed(&mut self, after: Duration) {
        self.longest_lease = self.longest_lease.max(after);
    }

    pub(crate) fn lease_open(&mut self, since: Duration) {
        self.longest_lease = self.longest_lease.max(since);
    }

    pub(crate) fn lease_failed(&mut self) {
        self.failed_leases += 1;
    }
}

/// The promises that a scenario makes. The default promises nothing beyond the rules that hold always: each event once
/// and in order, each write at most once, nothing left over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Promises {
    /// Upper bound of [`Findings::failed_reads`].
    pub failed_reads: u64,
    /// Upper bound of [`Findings::slowest_read`].
    pub slowest_read: Duration,
    /// Upper bound of [`Findings::failed_lists`].
    pub failed_lists: u64,
    /// Upper bound of [`Findings::slowest_list`].
    pub slowest_list: Duration,
    /// Upper bound of [`Findings::failed_writes`].
    pub failed_writes: u64,
    /// Upper bound of [`Findings::slowest_write`].
    pub slowest_write: Duration,
    /// Upper bound of [`Findings::longest_silence`].
    pub silence: Duration,
    /// Upper bound of [`Findings::relists`].
    pub relists: u64,
    /// Upper bound of [`Findings::watches_broken`].
    pub watches_broken: u64,
    /// Upper bound of [`Findings::watches_ended`].
    pub watches_ended: u64,
    /// Upper bound of [`Findings::longest_lease`].
    pub lease: Duration,
    /// Upper bound of [`Findings::failed_leases`].
    pub failed_leases: u64,
    /// Upper bound of [`Findings::connects`].
    pub connects: u64,
    /// Those for clients of the aggregated group.
    pub group: GroupPromises,
}

impl Default for Promises {
    fn default() -> Self {
        Self {
            failed_reads: u64::MAX,
            slowest_read: Duration::MAX,
            failed_lists: u64::MAX,
            slowest_list: Duration::MAX,
            failed_writes: u64::MAX,
            slowest_write: Duration::MAX,
            silence: Duration::MAX,
            relists: u64::MAX,
            watches_broken: u64::MAX,
            watches_ended: u64::MAX,
            lease: Duration::MAX,
            failed_leases: u64::MAX,
            connects: u64::MAX,
            group: GroupPromises::NONE,
        }
    }
}

impl Promises {
    /// The promises that the findings break.
    pub fn broken_by(&self, found: &Findings) -> Vec<String> {
        let mut broken = found.violations.clone();
        let mut number = |name: &str, found: u64, limit: u64| {
            if found > limit {
                broken.push(format!("{found} {name}, at most {limit} promised"));
            }
        };
        number("failed reads", found.failed_reads, self.failed_reads);
        number("failed lists", found.failed_lists, self.failed_lists);
        number("failed writes", found.failed_writes, self.failed_writes);
        let (group, promised) = (&found.group, &self.group);
        number("failed reads of the group", group.failed_reads, promised.failed_reads);
        number("failed writes of the group", group.failed_writes, promised.failed_writes);
        number("failed renewals of a lease", found.failed_leases, self.failed_leases);
        number("connects of a node within 10 s", found.connects, self.connects);
        number("lists after the first", found.relists, self.relists);
        number("broken watches", found.watches_broken, self.watches_broken);
        number("watches that ended", found.watches_ended, self.watches_ended);
        let mut time = |name: &str, found: Duration, limit: Duration| {
            if found > limit {
                broken.push(format!("{name} {found:.3?}, at most {limit:?} promised"));
            }
        };
        time("slowest read", found.slowest_read, self.slowest_read);
        time("slowest list", found.slowest_list, self.slowest_list);
        time("slowest write", found.slowest_write, self.slowest_write);
        time("silence of a watch", found.longest_silence, self.silence);
        time("slowest read of the group", group.slowest_read, promised.slowest_read);
        time("slowest write of the group", group.slowest_write, promised.slowest_write);
        time("silence of a watch of the group", group.longest_silence, promised.silence);
        time("time between renewals of a lease", found.longest_lease, self.lease);
        broken
    }
}

impl fmt::Display for Findings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "reads {} ({} failed, slowest {:.3?}), lists {} ({} failed, slowest {:.3?}), writes {} ({} failed, slowest {:.3?}), events {} (silence {:.3?}), \
             relists {}, broken watches {}, leases {:.1?} apart ({} failed), connects {}",
            self.reads,
            self.failed_reads,
            self.slowest_read,
            self.lists,
            self.failed_lists,
            self.slowest_list,
            self.writes,
            self.failed_writes,
            self.slowest_write,
            self.events,
            self.longest_silence,
            self.relists,
            self.watches_broken,
            self.longest_lease,
            self.failed_leases,
            self.connects
        )?;
        if self.group == GroupFindings::default() { Ok(()) } else { write!(f, ", {}", self.group) }
    }
}
