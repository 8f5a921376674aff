//! The `sandbox` section: the restrictions that the process places on itself at the start.

use clap::ValueEnum;
use serde::Serialize;

/// The restrictions. Each can be switched off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Sandbox {
    /// No core dump and no debugger of the same user: `PR_SET_DUMPABLE`, `RLIMIT_CORE`.
    pub not_dumpable: Switch,
    /// No privileges by execve(2), for example of setuid files. `seccomp` and `landlock` need it.
    pub no_new_privs: Switch,
    /// Allow-list of system calls.
    pub seccomp: Seccomp,
    /// Allow-list of files.
    pub landlock: Switch,
}

/// Whether a restriction is in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Switch {
    /// In use.
    On,
    /// Not in use.
    Off,
}

/// What happens at a system call that is not on the allow-list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Seccomp {
    /// The call fails with `ENOSYS`.
    On,
    /// The call is made, and the kernel logs it (audit).
    Log,
    /// The kernel kills the process. For tests.
    Kill,
    /// There is no filter.
    Off,
}
