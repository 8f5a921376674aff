//! `jackstay probe`: asks a running jackstay for its liveness or readiness; the exit code is the
//! answer.
//!
//! Kubelet's `exec` probes run it with the Unix socket of `admin.socket`. On the host network every
//! process can connect to the TCP port and exhaust its backlog; the socket is private to its user and group.

use std::io;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, ValueEnum};
use http::StatusCode;
use jackstay_config::format_duration;
use serde::Serialize;

use crate::admin_client::{AdminAddress, DEFAULT_ADMIN, TcpAddress, block_on, get};
use crate::options::{EXIT_NO_ANSWER, OutputArgs, parse_flag_duration};

const HELP: &str = "\
Exit codes: 0 alive or ready, 1 not alive or ready, 2 bad usage, 3 no
answer: jackstay does not run there, or is stopped.

Examples:
  jackstay probe livez --socket /run/jackstay/admin.sock
  jackstay probe readyz --admin 127.0.0.1:9643 --timeout 1s";

/// Arguments of `jackstay probe`.
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub struct ProbeArgs {
    /// The check to ask for.
    #[arg(value_name = "CHECK")]
    check: Check,
    /// Unix socket of the admin endpoint: `admin.socket` in the configuration.
    #[arg(long, value_name = "PATH", conflicts_with = "admin")]
    socket: Option<PathBuf>,
    /// Address of the admin endpoint: `admin.bind` in the configuration.
    #[arg(long, value_name = "ADDR", default_value_t = DEFAULT_ADMIN.into())]
    admin: TcpAddress,
    /// How long to wait for the answer; a number without a unit is seconds.
    #[arg(long, value_name = "DURATION", default_value = "2s", value_parser = parse_flag_duration)]
    timeout: Duration,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Check {
    /// The event loop of every worker runs.
    Livez,
    /// Every listener is bound and every upstream has a usable endpoint.
    Readyz,
}

impl Check {
    fn path(self) -> &'static str {
        match self {
            Self::Livez => "/livez",
            Self::Readyz => "/readyz",
        }
    }
}

/// The result in JSON and YAML.
#[derive(Debug, Serialize)]
struct ProbeResult<'a> {
    check: &'a str,
    address: String,
    ok: bool,
    /// The status code; `None` without an answer.
    status: Option<u16>,
    /// The body of the answer, or why there is none.
    message: String,
}

/// Runs the command.
pub fn run(args: &ProbeArgs) -> ExitCode {
    let path = args.check.path();
    let address = match &args.socket {
        Some(socket) => AdminAddress::Unix(socket.clone()),
        None => AdminAddress::Tcp(args.admin),
    };
    let (status, message) = match block_on(get(&address, path, args.timeout)) {
        Ok(response) => {
            (Some(response.status()), String::from_utf8_lossy(response.body()).into_owned())
        }
        Err(error) if error.kind() == io::ErrorKind::TimedOut => {
            (None, format!("no answer within {}", format_duration(args.timeout)))
        }
        Err(error) => (None, error.to_string()),
    };
    let result = ProbeResult {
        check: path,
        address: address.to_string(),
        ok: status == Some(StatusCode::OK),
        status: status.map(|status| status.as_u16()),
        message,
    };
    let text = || if result.ok { result.message.clone() } else { String::new() };
    args.output.format.print(&result, text);
    if result.ok {
        return ExitCode::SUCCESS;
    }
    let message = result.message.trim_end();
    if let Some(code) = result.status {
        eprintln!("{path} on {address} answers {code}: {message}");
        ExitCode::FAILURE
    } else {
        eprintln!("{path}: cannot ask {address}: {message}; is jackstay running there?");
        ExitCode::from(EXIT_NO_ANSWER)
    }
}
