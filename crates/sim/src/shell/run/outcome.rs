//! What a run returns.

use crate::invariants::Findings;

/// The result of a run.
#[derive(Debug)]
pub struct ShellRun {
    /// What was found.
    pub findings: Findings,
    /// Packets of the network.
    pub packets: u64,
    /// The hash of the log.
    pub hash: u64,
    /// The log.
    pub log: String,
}
