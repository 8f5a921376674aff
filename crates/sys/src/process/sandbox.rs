//! Restrictions that the process places on itself before it serves: an attacker who controls the process through
//! a defect can then neither start programs, nor read files that the configuration does not name, nor debug
//! other processes, nor connect to sockets of processes that start programs, as far as the kernel restricts that
//! ([`landlock`]). Another process of the same user cannot read the keys in its memory.
//!
//! * [`forbid_dumps`] and [`forbid_new_privileges`] are attributes of the process.
//! * [`seccomp`] is an allow-list of system calls ([`system_calls`]).
//! * [`landlock`] is an allow-list of files; [`file_rules`] makes it from the paths of the configuration.
//!
//! The last two restrict the calling thread and the threads that it starts. They must be called before the
//! process starts its first thread, and cannot be revoked.

pub mod file_rules;
pub mod landlock;
pub mod seccomp;
pub mod system_calls;

use std::io;

use rustix::process::{
    DumpableBehavior, Resource, Rlimit, getrlimit, set_dumpable_behavior, setrlimit,
};

/// Forbids core dumps, which would hold keys and tokens, and access to the memory by other processes of the
/// same user (`PR_SET_DUMPABLE`, ptrace(2)). Processes with `CAP_SYS_PTRACE` keep their access. The files in
/// `/proc/PID` then belong to root.
///
/// # Errors
/// What `prctl(2)` or `setrlimit(2)` returns.
pub fn forbid_dumps() -> io::Result<()> {
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    let none = Rlimit { current: Some(0), maximum: Some(0) };
    // The service manager may have set the limit and forbidden the call.
    if getrlimit(Resource::Core) != none {
        setrlimit(Resource::Core, none)?;
    }
    Ok(())
}

/// Makes execve(2) ignore setuid bits and file capabilities, for this process and its children.
///
/// # Errors
/// What `prctl(2)` returns.
pub fn forbid_new_privileges() -> io::Result<()> {
    Ok(rustix::thread::set_no_new_privs(true)?)
}

#[cfg(test)]
mod tests;
