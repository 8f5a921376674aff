//! Starts the binary again on SIGUSR2, as a process that takes over (`--take-over`).
//!
//! The binary is the file at the path that started this process: a replaced file is the new version.
//! Arguments and environment are the same. The new process is in the same unit of the service manager,
//! which learns the new main process by `MAINPID` (`sd_notify(3)`).
//!
//! A sandboxed process cannot start programs, and a program would inherit its restrictions. So it
//! starts a launcher before it enters the sandbox: a process without a configuration, a credential or
//! a listening socket, which can do nothing but start that one program, and ends with this process. It
//! starts no second one while the first runs, so that an attacker who controls this process cannot use the
//! launcher to exhaust the memory or the process ids of the node.
//!
//! ```text
//! this process                 launcher (hidden command)        new process
//!  │── one byte ───────────────▶│ starts ──────────────────────▶│ takes over
//!  │◀── started PID ────────────│                                │
//!  │◀── exited PID STATUS ──────│◀───────────────────────────────│ if it fails
//! ```

use std::env;
use std::ffi::{OsStr, OsString};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use clap::Args;
use jackstay_config::Config;
use jackstay_sys::process::code_pages;
use tokio::signal::unix::{SignalKind, signal};

use crate::observe::log::PidInLines;

/// The hidden command of the launcher.
const LAUNCHER: &str = "launcher";
/// The request for a new process.
const REQUEST: u8 = b'\n';
/// The first word of the launcher's reply when it has started a process.
const STARTED: &str = "started";
/// The first word of its reply when the process has exited.
const EXITED: &str = "exited";
/// The flag that makes a new process take over.
const TAKE_OVER: &str = "--take-over";
/// The flag that the new process does not get: the descriptor belongs to the parent of this process.
const READY_FD: &str = "--ready-fd";
/// Variables of the service manager that are meant for this process alone (`sd_listen_fds(3)`,
/// `sd_watchdog_enabled(3)`).
const OWN_VARIABLES: [&str; 4] = ["WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"];

/// The launcher, or why there is none.
#[derive(Debug)]
pub(super) struct Upgrade(io::Result<UnixStream>);

impl Upgrade {
    /// Starts the launcher. Must be called before the process enters the sandbox.
    pub(super) fn prepare(config: &Config) -> Self {
        Self(start_launcher(config))
    }

    /// Has the new process started, and returns at once. Its outcome is logged; this process serves until it
    /// is replaced.
    pub(super) fn begin(&self) {
        let begun = match &self.0 {
            Ok(launcher) => {
                request(launcher).map_err(|error| format!("the launcher has ended: {error}"))
            }
            Err(error) => Err(error.to_string()),
        };
        if let Err(error) = begun {
            tracing::error!(error, "SIGUSR2: cannot start a takeover process; still serving");
        }
    }
}

fn start_launcher(config: &Config) -> io::Result<UnixStream> {
    if std::process::id() == 1 {
        return Err(io::Error::other(
            "a container ends with its process 1, which is this process: replace the container",
        ));
    }
    if config.state_dir.is_none() {
        return Err(io::Error::other("state_dir is \"\": there is no socket to take over through"));
    }
    let mut arguments = env::args_os();
    let path = arguments.next().filter(|path| !path.is_empty());
    let path = path.map_or_else(|| env::current_exe().map(Into::into), Ok)?;
    let (own, launcher) = UnixStream::pair()?;
    // This program, even if its file is replaced meanwhile.
    let mut command = Command::new("/proc/self/exe");
    command
        .arg0("jackstay")
        .arg(LAUNCHER)
        .arg("--")
        .arg(path)
        .args(takeover_arguments(arguments.collect()));
    for name in OWN_VARIABLES {
        command.env_remove(name);
    }
    // This process does not wait for the launcher, which ends when this process does.
    drop(command.stdin(Stdio::from(OwnedFd::from(launcher))).spawn()?);
    Ok(own)
}

/// Asks the launcher for a new process. A thread logs what becomes of it.
fn request(launcher: &UnixStream) -> io::Result<()> {
    let mut stream = launcher.try_clone()?;
    stream.write_all(&[REQUEST])?;
    let replies = BufReader::new(stream);
    let overlap = PidInLines::start();
    let log = move || {
        log_replies(replies);
        drop(overlap);
    };
    thread::Builder::new().name("upgrade".into()).spawn(log)?;
    Ok(())
}

/// Logs the replies of the launcher to one request. The logs of the two processes show whether the takeover
/// has succeeded.
fn log_replies(replies: impl BufRead) {
    for reply in replies.lines().map_while(Result::ok) {
        match reply.split_once(' ') {
            Some((STARTED, process)) => {
                // The field `pid` is that of the process that writes the line.
                let (new_pid, program) = process.split_once(' ').unwrap_or((process, ""));
                tracing::info!(%new_pid, program, "SIGUSR2: takeover process started");
            }
            Some((EXITED, process)) => {
                let (new_pid, status) = process.split_once(' ').unwrap_or((process, ""));
                let status = status.strip_prefix("exit status: ").unwrap_or(status);
                // For example after SIGTERM to both processes.
                if status == "0" {
                    tracing::info!(%new_pid, status, "takeover process ended");
                } else {
                    tracing::warn!(%new_pid, status, "takeover process failed; still serving");
                }
                return;
            }
            _ => {
                tracing::error!(
                    error = reply,
                    "SIGUSR2: cannot start a takeover process; still serving"
                );
                return;
            }
        }
    }
}

/// Arguments of the launcher.
#[derive(Debug, Args)]
pub(super) struct LauncherArgs {
    /// The program to start, and its arguments.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<OsString>,
}

/// Runs the launcher: starts the program for each request on the standard input, until the process that
/// requests it has ended.
pub(super) fn launch(args: &LauncherArgs) -> ExitCode {
    match serve(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("the launcher of takeover processes has ended: {error}");
            ExitCode::FAILURE
        }
    }
}

fn serve(args: &LauncherArgs) -> io::Result<()> {
    let mut requests = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let _entered = runtime.enter();
    // Signals to all processes of the service are meant for the main process. Handlers, unlike ignored signals,
    // are not inherited by the program that the launcher starts.
    let kinds = [
        SignalKind::terminate(),
        SignalKind::interrupt(),
        SignalKind::hangup(),
        SignalKind::user_defined2(),
    ];
    let _handled = kinds.map(signal);
    // Most code that has run is that of the start. An error leaves it in memory.
    let _ = code_pages::release_startup_code();
    let started = StartedProcess::default();
    let mut byte = [0];
    loop {
        match requests.read(&mut byte) {
            Ok(0) => return Ok(()),
            Ok(_) => started.start(args, &requests)?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// The id of the process that the launcher has started and that has not ended; 0 without one.
#[derive(Default)]
struct StartedProcess(Arc<AtomicU32>);

impl StartedProcess {
    /// Starts the program unless the one before still runs, and a thread that waits for it: an exited child remains
    /// a zombie until then.
    fn start(&self, args: &LauncherArgs, requests: &UnixStream) -> io::Result<()> {
        let (program, arguments) = args.command.split_first().expect("a required argument");
        let mut replies = requests.try_clone()?;
        let running = self.0.load(Ordering::Acquire);
        if running != 0 {
            return writeln!(replies, "the takeover process {running} still runs");
        }
        match Command::new(program).args(arguments).stdin(Stdio::null()).spawn() {
            Ok(child) => {
                self.0.store(child.id(), Ordering::Release);
                writeln!(replies, "{STARTED} {} {}", child.id(), program.display())?;
                let running = Arc::clone(&self.0);
                let wait = move || wait(child, &running, replies);
                thread::Builder::new().name("wait".into()).spawn(wait)?;
                Ok(())
            }
            Err(error) => writeln!(replies, "{}: {error}", program.display()),
        }
    }
}

fn wait(mut child: Child, running: &AtomicU32, mut replies: UnixStream) {
    let pid = child.id();
    let end = child.wait().map_or_else(|error| error.to_string(), |status| status.to_string());
    running.store(0, Ordering::Release);
    // The process that requested it may have ended.
    let _ = writeln!(replies, "{EXITED} {pid} {end}");
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

    #[test]
    fn start_reports_the_process_and_its_end_or_why_it_cannot_be_started() {
        let replies = |command: &[&str]| {
            let (own, launcher) = UnixStream::pair().unwrap();
            let command = command.iter().map(OsString::from).collect();
            StartedProcess::default().start(&LauncherArgs { command }, &launcher).unwrap();
            drop(launcher);
            BufReader::new(own).lines().map(Result::unwrap).collect::<Vec<_>>()
        };
        let ended = replies(&["sh", "-c", "exit 3"]);
        assert_eq!(ended.len(), 2, "{ended:?}");
        assert!(ended[0].starts_with("started ") && ended[0].ends_with(" sh"), "{ended:?}");
        assert!(ended[1].starts_with("exited ") && ended[1].ends_with("status: 3"), "{ended:?}");
        let failed = replies(&["/nonexistent/jackstay"]);
        assert_eq!(failed.len(), 1, "{failed:?}");
        assert!(failed[0].starts_with("/nonexistent/jackstay: No such file"), "{failed:?}");
    }

    #[test]
    fn log_replies_warns_only_of_a_process_that_has_failed_and_names_pid_and_status() {
        use jackstay_config::LogFormat;

        use crate::observe::log::tests::Captured;
        for (reply, expected) in [
            ("exited 7 exit status: 0", " INFO takeover process ended new_pid=7 status=\"0\""),
            (
                "exited 7 exit status: 2",
                " WARN takeover process failed; still serving new_pid=7 status=\"2\"",
            ),
            (
                "exited 7 signal: 9 (SIGKILL)",
                " WARN takeover process failed; still serving new_pid=7 status=\"signal: 9 (SIGKILL)\"",
            ),
            (
                "started 7 /usr/bin/jackstay",
                " INFO SIGUSR2: takeover process started new_pid=7 program=\"/usr/bin/jackstay\"",
            ),
        ] {
            let captured = Captured::default();
            captured.during(LogFormat::Text, || log_replies(reply.as_bytes()));
            let lines = captured.lines();
            assert!(lines.len() == 1 && lines[0].ends_with(expected), "{lines:?}");
        }
    }

    #[test]
    fn start_refuses_a_second_process_until_the_first_has_exited() {
        let (own, launcher) = UnixStream::pair().unwrap();
        let mut replies = BufReader::new(own).lines().map(Result::unwrap);
        let command = ["sh", "-c", "kill -STOP $$; exit 3"].map(OsString::from).to_vec();
        let (args, started) = (LauncherArgs { command }, StartedProcess::default());
        for _ in 0..2 {
            started.start(&args, &launcher).unwrap();
            let reply = replies.next().unwrap();
            let pid = reply.split(' ').nth(1).unwrap();
            for _ in 0..100 {
                started.start(&args, &launcher).unwrap();
                let refused = replies.next().unwrap();
                assert_eq!(refused, format!("the takeover process {pid} still runs"));
            }
            let killed = Command::new("kill").args(["-KILL", pid]).status().unwrap();
            assert!(killed.success());
            assert!(replies.next().unwrap().starts_with(&format!("exited {pid} ")));
        }
    }
}
