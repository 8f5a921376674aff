//! Hosts, processes and connections by number.

/// A host.
pub type HostId = u16;
/// A process on a host.
pub type ProcessId = u16;
/// A connection. Numbers are not used again.
pub type ConnectionId = u32;

/// The state of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessState {
    /// It runs.
    Running,
    /// SIGSTOP.
    Stopped,
    /// SIGKILL: its kernel refuses connections.
    Dead,
}
