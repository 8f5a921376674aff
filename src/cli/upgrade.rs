//! Starts the binary again beside the running one, on SIGUSR2, to take its place (`--take-over`).
//!
//! The path is the one that this process was started by, so a file that was replaced there is the
//! new binary. Arguments and environment are the same. The new process is a child of this one until
//! this one ends, and in the same unit of a service manager, which hears of its new main process by
//! `MAINPID` (`sd_notify(3)`).

use std::env;
use std::ffi::{OsStr, OsString};
use std::io;
use std::process::{Child, Command};
use std::thread;

/// The flag that makes a new process take over.
const FLAG: &str = "--take-over";
/// The option with the descriptor that the parent of this process waits on: the new process has
/// another parent.
const READY_FD: &str = "--ready-fd";
/// What the service manager says to one process alone.
const OURS_ALONE: [&str; 4] = ["WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"];

/// Starts the new process. What becomes of it is logged; this one goes on until it is replaced.
pub fn begin() {
    match start() {
        Ok((pid, path)) => {
            tracing::info!(pid, path = ?path, "SIGUSR2: a new process is to take over");
        }
        Err(error) => {
            tracing::error!(%error, "SIGUSR2: cannot start a new process; this one goes on");
        }
    }
}

fn start() -> io::Result<(u32, OsString)> {
    if std::process::id() == 1 {
        return Err(io::Error::other(
            "this is the first process of a container, which ends with it: replace the container",
        ));
    }
    let mut arguments = env::args_os();
    let path = arguments.next().filter(|path| !path.is_empty());
    let path = path.map_or_else(|| env::current_exe().map(Into::into), Ok)?;
    let mut command = Command::new(&path);
    command.args(with_flag(arguments.collect()));
    for name in OURS_ALONE {
        command.env_remove(name);
    }
    let child = command.spawn()?;
    let pid = child.id();
    // A process whose end nobody waits for stays as a zombie.
    thread::Builder::new().name("upgrade".into()).spawn(move || attend(child))?;
    Ok((pid, path))
}

/// The arguments of a process that takes over.
fn with_flag(mut arguments: Vec<OsString>) -> Vec<OsString> {
    if let Some(at) = arguments.iter().position(|argument| argument == OsStr::new(READY_FD)) {
        arguments.drain(at..arguments.len().min(at + 2));
    }
    let joined = format!("{READY_FD}=");
    arguments.retain(|argument| !argument.as_encoded_bytes().starts_with(joined.as_bytes()));
    if !arguments.iter().any(|argument| argument == OsStr::new(FLAG)) {
        arguments.push(FLAG.into());
    }
    arguments
}

fn attend(mut child: Child) {
    let pid = child.id();
    match child.wait() {
        // Whether it had taken over before says the log of the two.
        Ok(status) => tracing::warn!(pid, %status, "the new process has ended"),
        Err(error) => tracing::warn!(pid, %error, "cannot wait for the new process"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn take_over_is_there_once_and_the_ready_descriptor_stays_behind() {
        let of = |arguments: &[&str]| {
            let arguments = arguments.iter().map(OsString::from).collect();
            let all: Vec<_> = with_flag(arguments).into_iter().map(OsString::into_string).collect();
            all.into_iter().map(Result::unwrap).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(of(&["run", "--config", "f"]), "run --config f --take-over");
        assert_eq!(of(&["run", "--take-over", "--config", "f"]), "run --take-over --config f");
        assert_eq!(of(&["run", "--ready-fd", "3", "--config", "f"]), "run --config f --take-over");
        assert_eq!(of(&["run", "--config", "f", "--ready-fd=3"]), "run --config f --take-over");
    }
}
