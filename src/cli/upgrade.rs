//! Starts the binary again on SIGUSR2, as a process that takes over (`--take-over`).
//!
//! The binary is the file at the path that started this process: a replaced file is the new version.
//! Arguments and environment are the same. The new process is a child of this one until this one
//! exits, in the same unit of the service manager, which learns the new main process by `MAINPID`
//! (`sd_notify(3)`).

use std::env;
use std::ffi::{OsStr, OsString};
use std::io;
use std::process::{Child, Command};
use std::thread;

/// The flag that makes a new process take over.
const TAKE_OVER: &str = "--take-over";
/// The flag that the new process does not get: the descriptor belongs to the parent of this process.
const READY_FD: &str = "--ready-fd";
/// Variables of the service manager that are meant for this process alone (`sd_listen_fds(3)`,
/// `sd_watchdog_enabled(3)`).
const OWN_VARIABLES: [&str; 4] = ["WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"];

/// Starts the new process and returns at once. Its outcome is logged; this process serves until it
/// is replaced.
pub fn begin() {
    match start() {
        Ok((pid, path)) => tracing::info!(pid, path = ?path, "SIGUSR2: takeover process started"),
        Err(error) => {
            tracing::error!(%error, "SIGUSR2: cannot start a takeover process; still serving");
        }
    }
}

fn start() -> io::Result<(u32, OsString)> {
    if std::process::id() == 1 {
        return Err(io::Error::other(
            "a container ends with its process 1, which is this process: replace the container",
        ));
    }
    let mut arguments = env::args_os();
    let path = arguments.next().filter(|path| !path.is_empty());
    let path = path.map_or_else(|| env::current_exe().map(Into::into), Ok)?;
    let mut command = Command::new(&path);
    command.args(takeover_arguments(arguments.collect()));
    for name in OWN_VARIABLES {
        command.env_remove(name);
    }
    let child = command.spawn()?;
    let pid = child.id();
    // An exited child remains a zombie until its parent waits for it.
    thread::Builder::new().name("upgrade".into()).spawn(move || wait(child))?;
    Ok((pid, path))
}

/// The arguments of the new process, made from those of this one.
fn takeover_arguments(mut arguments: Vec<OsString>) -> Vec<OsString> {
    if let Some(at) = arguments.iter().position(|argument| argument == OsStr::new(READY_FD)) {
        arguments.drain(at..arguments.len().min(at + 2));
    }
    let joined = format!("{READY_FD}=");
    arguments.retain(|argument| !argument.as_encoded_bytes().starts_with(joined.as_bytes()));
    if !arguments.iter().any(|argument| argument == OsStr::new(TAKE_OVER)) {
        arguments.push(TAKE_OVER.into());
    }
    arguments
}

fn wait(mut child: Child) {
    let pid = child.id();
    match child.wait() {
        // The logs of the two processes show whether the takeover had succeeded.
        Ok(status) => tracing::warn!(pid, %status, "takeover process exited"),
        Err(error) => tracing::warn!(pid, %error, "cannot wait for the takeover process"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takeover_arguments_have_the_flag_once_and_no_ready_fd() {
        let of = |arguments: &[&str]| {
            let arguments = arguments.iter().map(OsString::from).collect();
            let all: Vec<_> =
                takeover_arguments(arguments).into_iter().map(OsString::into_string).collect();
            all.into_iter().map(Result::unwrap).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(of(&["run", "--config", "f"]), "run --config f --take-over");
        assert_eq!(of(&["run", "--take-over", "--config", "f"]), "run --take-over --config f");
        assert_eq!(of(&["run", "--ready-fd", "3", "--config", "f"]), "run --config f --take-over");
        assert_eq!(of(&["run", "--config", "f", "--ready-fd=3"]), "run --config f --take-over");
    }
}
