//! The filter of system calls (seccomp(2)).
//!
//! A call that is not on the list fails with `ENOSYS`, as on a kernel without it. The libc and the libraries then
//! use an older call, where `EPERM` would end them with an error, and killing the process would take down the
//! control line of the node for a call that a newer libc merely tries. execve and ptrace fail in the same way.
//!
//! The kernel caches the verdict for calls whose arguments the filter does not read (5.11 and later), so the
//! length of the list costs nothing on the path of a request.

use std::collections::BTreeMap;
use std::io;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, sock_filter,
};

use super::system_calls::{Condition, Use, allowed};

/// `BPF_LD | BPF_W | BPF_ABS`: load a word of `seccomp_data` (`linux/bpf_common.h`).
const LOAD: u16 = 0x20;
/// `BPF_JMP | BPF_JEQ | BPF_K`: jump if the loaded word is equal.
const JUMP_IF_EQUAL: u16 = 0x15;
/// `BPF_RET | BPF_K`.
const RETURN: u16 = 0x06;

/// What happens at a system call that is not on the allow-list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Violation {
    /// The call fails with `ENOSYS`.
    Fails,
    /// The call is made, and the kernel logs it (audit).
    Logged,
    /// The kernel kills the process.
    Kills,
}

/// Why the filter is not installed.
#[derive(Debug, thiserror::Error)]
pub enum SeccompError {
    /// The filter cannot be compiled for this architecture, or not applied to all threads.
    #[error("{0}")]
    Program(#[source] seccompiler::Error),
    /// The kernel refuses it.
    #[error("{0}")]
    Kernel(#[source] io::Error),
}

/// Installs the filter in all threads. It also sets `no_new_privs`.
///
/// # Errors
/// The architecture or the kernel does not support filters. Nothing is restricted then.
pub fn install(violation: Violation) -> Result<(), SeccompError> {
    let action = match violation {
        Violation::Fails => SeccompAction::Errno(libc::ENOSYS as u32),
        Violation::Logged => SeccompAction::Log,
        Violation::Kills => SeccompAction::KillProcess,
    };
    let program = program(action).map_err(SeccompError::Program)?;
    seccompiler::apply_filter_all_threads(&program).map_err(|error| match error {
        seccompiler::Error::Prctl(error) | seccompiler::Error::Seccomp(error) => {
            SeccompError::Kernel(error)
        }
        other => SeccompError::Program(other),
    })
}

fn program(otherwise: SeccompAction) -> Result<BpfProgram, seccompiler::Error> {
    let architecture = TargetArch::try_from(std::env::consts::ARCH)?;
    let mut rules = BTreeMap::new();
    for call in allowed() {
        let uses = call.uses.iter().map(|one| rule(one)).collect::<Result<Vec<_>, _>>()?;
        rules.insert(call.number, uses);
    }
    let filter = SeccompFilter::new(rules, otherwise, SeccompAction::Allow, architecture)?;
    // In every mode clone3 fails with ENOSYS, because the libc expects it and has a fallback.
    let mut program = vec![
        sock_filter { code: LOAD, jt: 0, jf: 0, k: 0 },
        sock_filter { code: JUMP_IF_EQUAL, jt: 0, jf: 1, k: libc::SYS_clone3 as u32 },
        sock_filter {
            code: RETURN,
            jt: 0,
            jf: 0,
            k: libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32,
        },
    ];
    program.extend(BpfProgram::try_from(filter)?);
    Ok(program)
}

fn rule(conditions: Use) -> Result<SeccompRule, seccompiler::BackendError> {
    let conditions = conditions.iter().map(|condition| {
        let (index, operator, value) = match *condition {
            Condition::Is(index, value) => (index, SeccompCmpOp::Eq, value),
            Condition::Bits(index, mask, value) => {
                (index, SeccompCmpOp::MaskedEq(u64::from(mask as u32)), value)
            }
            Condition::OwnPid(index) => (index, SeccompCmpOp::Eq, std::process::id().cast_signed()),
        };
        let value = u64::from(value as u32);
        SeccompCondition::new(index, SeccompCmpArgLen::Dword, operator, value)
    });
    SeccompRule::new(conditions.collect::<Result<_, _>>()?)
}

#[cfg(test)]
mod tests {
    use super::super::system_calls::{COMMON, LEGACY, SystemCall};
    use super::*;

    #[test]
    fn program_compiles_and_each_call_is_listed_once() {
        let program = program(SeccompAction::KillProcess).unwrap();
        assert!(program.len() > allowed().count());
        let mut numbers: Vec<_> = allowed().map(|call| call.number).collect();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), allowed().count());
    }

    #[test]
    fn each_older_call_has_its_replacement_on_every_architecture() {
        let replacements: BTreeMap<_, _> = [
            ("epoll_wait", "epoll_pwait"),
            ("poll", "ppoll"),
            ("open", "openat"),
            ("stat", "newfstatat"),
            ("lstat", "newfstatat"),
            ("access", "faccessat"),
            ("readlink", "readlinkat"),
            ("chmod", "fchmodat"),
            ("mkdir", "mkdirat"),
            ("unlink", "unlinkat"),
            ("rmdir", "unlinkat"),
            ("rename", "renameat"),
            ("getrlimit", "prlimit64"),
            ("time", "clock_gettime"),
        ]
        .into();
        let names: Vec<_> = allowed().map(SystemCall::name).collect();
        for call in LEGACY {
            let replacement = replacements[call.name()];
            assert!(COMMON.iter().any(|call| call.name() == replacement), "{}", call.name());
        }
        for replacement in replacements.values() {
            assert!(names.contains(replacement), "{replacement}");
        }
        let has_older = cfg!(target_arch = "x86_64");
        for older in replacements.keys() {
            assert_eq!(names.contains(older), has_older, "{older}");
        }
        // The numbers are those of this architecture (asm/unistd_64.h, asm-generic/unistd.h).
        let number = |name| allowed().find(|call| call.name() == name).map(|call| call.number);
        let expected = match std::env::consts::ARCH {
            "x86_64" => [271, 281, 257, 0],
            _ => [73, 22, 56, 63],
        };
        assert_eq!(["ppoll", "epoll_pwait", "openat", "read"].map(number), expected.map(Some));
    }

    #[test]
    fn list_has_no_call_that_starts_a_program_or_reaches_another_process() {
        for forbidden in [
            "execve",
            "execveat",
            "fork",
            "vfork",
            "clone3",
            "ptrace",
            "process_vm_readv",
            "process_vm_writev",
            "pidfd_getfd",
            "kill",
            "tkill",
            "bpf",
            "perf_event_open",
            "mount",
            "unshare",
            "setns",
            "chroot",
            "pivot_root",
            "kexec_load",
            "init_module",
            "keyctl",
            "io_uring_setup",
            "userfaultfd",
            "memfd_create",
            "setuid",
            "capset",
            "chown",
            "seccomp",
        ] {
            assert!(allowed().all(|call| call.name() != forbidden), "{forbidden}");
        }
    }
}
