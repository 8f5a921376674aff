//! What clients of the aggregated group have seen, apart from others: a failing group may not slow down built-in ones.

use std::fmt;
use std::time::Duration;

/// What clients of the aggregated group have seen.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct GroupFindings {
    /// Reads that ended.
    pub reads: u64,
    /// Reads that failed.
    pub failed_reads: u64,
    /// The longest time that a read took.
    pub slowest_read: Duration,
    /// Writes that ended.
    pub writes: u64,
    /// Writes that failed.
    pub failed_writes: u64,
    /// The longest time that a write took.
    pub slowest_write: Duration,
    /// The longest time from a change to an informer.
    pub longest_silence: Duration,
}

impl GroupFindings {
    pub(crate) fn read(&mut self, ok: bool, took: Duration) {
        self.reads += 1;
        self.failed_reads += u64::from(!ok);
        self.read_open(took);
    }

    pub(crate) fn read_open(&mut self, since: Duration) {
        self.slowest_read = self.slowest_read.max(since);
    }

    pub(crate) fn write(&mut self, ok: bool, took: Duration) {
        self.writes += 1;
        self.failed_writes += u64::from(!ok);
        self.write_open(took);
    }

    pub(crate) fn write_open(&mut self, since: Duration) {
        self.slowest_write = self.slowest_write.max(since);
    }

    pub(crate) fn silent(&mut self, since: Duration) {
        self.longest_silence = self.longest_silence.max(since);
    }
}

impl fmt::Display for GroupFindings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "group: reads {} ({} failed, slowest {:.3?}), writes {} ({} failed, slowest {:.3?}), silence {:.3?}",
            self.reads,
            self.failed_reads,
            self.slowest_read,
            self.writes,
            self.failed_writes,
            self.slowest_write,
            self.longest_silence
        )
    }
}

/// The promises for clients of the aggregated group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupPromises {
    /// Upper bound of [`GroupFindings::failed_reads`].
    pub failed_reads: u64,
    /// Upper bound of [`GroupFindings::slowest_read`].
    pub slowest_read: Duration,
    /// Upper bound of [`GroupFindings::failed_writes`].
    pub failed_writes: u64,
    /// Upper bound of [`GroupFindings::slowest_write`].
    pub slowest_write: Duration,
    /// Upper bound of [`GroupFindings::longest_silence`].
    pub silence: Duration,
}

impl GroupPromises {
    /// No promise.
    pub const NONE: Self = Self {
        failed_reads: u64::MAX,
        slowest_read: Duration::MAX,
        failed_writes: u64::MAX,
        slowest_write: Duration::MAX,
        silence: Duration::MAX,
    };
}
