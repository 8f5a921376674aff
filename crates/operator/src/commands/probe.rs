//! `jackstay probe`: asks a running jackstay for its liveness or readiness; the exit code is the
//! answer.
//!
//! Kubelet's `exec` probes run it with the Unix socket of `admin.socket`. On the host network every
//! process can connect to the TCP port and exhaust its backlog; the socket is private to its user and group.
//!
//! `--upstream` is the health check for a virtual IP address: keepalived moves the address to a node whose jackstay has a
//! usable apiserver.

use std::io;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, ValueEnum};
use http::StatusCode;
use jackstay_config::format_duration;
use serde::Serialize;
use serde_json::Value;

use super::status::serving::upstream_state;
use crate::admin_client::{AdminAddress, DEFAULT_ADMIN, TcpAddress, block_on, get};
use crate::options::{EXIT_NO_ANSWER, OutputArgs, parse_flag_duration};

const HELP: &str = "\
Exit codes: 0 alive or ready, 1 not alive or ready, 2 bad usage, 3 no
answer: jackstay does not run there, or is stopped. With --upstream: 0 an
apiserver is usable, 2 bad usage, 1 otherwise, also without an answer.

--upstream does not ask whether the listeners are bound, because a listener
on a virtual IP address may be bound only while the node has the address.

Examples:
  jackstay probe livez --socket /run/jackstay/admin.sock
  jackstay probe readyz --admin 127.0.0.1:9643 --timeout 1s
  jackstay probe --upstream --timeout 1s
  jackstay probe --upstream control-plane";

/// Arguments of `jackstay probe`.
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub struct ProbeArgs {
    /// The check to ask for.
    #[arg(value_name = "CHECK", required_unless_present = "upstream")]
    check: Option<Check>,
    /// Ask whether this upstream, or without a name each of them, has a usable apiserver, and jackstay accepts
    /// clients.
    #[arg(long, value_name = "NAME", num_args = 0..=1, conflicts_with = "check")]
    // The inner option is `None` without a name.
    #[allow(clippy::option_option)]
    upstream: Option<Option<String>>,
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
    /// The upstream that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    upstream: Option<&'a str>,
    address: String,
    ok: bool,
    /// The status code; `None` without an answer.
    status: Option<u16>,
    /// The body of the answer, or why there is none.
    message: String,
}

/// Runs the command.
pub fn run(args: &ProbeArgs) -> ExitCode {
    let address = match &args.socket {
        Some(socket) => AdminAddress::Unix(socket.clone()),
        None => AdminAddress::Tcp(args.admin),
    };
    let result = match args.check {
        Some(check) => ask(args, &address, check),
        None => ask_upstream(args, &address),
    };
    let text = || if result.ok { result.message.clone() } else { String::new() };
    args.output.format.print(&result, text);
    if result.ok {
        return ExitCode::SUCCESS;
    }
    let (check, message) = (result.check, result.message.trim_end());
    match (result.status, args.check) {
        (Some(code), Some(_)) => eprintln!("{check} on {address} answers {code}: {message}"),
        (Some(_), None) => eprintln!("{message}"),
        (None, _) => {
            eprintln!("{check}: cannot ask {address}: {message}; is jackstay running there?");
        }
    }
    match (result.status, args.check) {
        (None, Some(_)) => ExitCode::from(EXIT_NO_ANSWER),
        _ => ExitCode::FAILURE,
    }
}

/// The status code and body of a path, or why there is no answer.
fn fetch(args: &ProbeArgs, address: &AdminAddress, path: &str) -> (Option<StatusCode>, String) {
    match block_on(get(address, path, args.timeout)) {
        Ok(response) => {
            (Some(response.status()), String::from_utf8_lossy(response.body()).into_owned())
        }
        Err(error) if error.kind() == io::ErrorKind::TimedOut => {
            (None, format!("no answer within {}", format_duration(args.timeout)))
        }
        Err(error) => (None, error.to_string()),
    }
}

/// Asks for a health check.
fn ask(args: &ProbeArgs, address: &AdminAddress, check: Check) -> ProbeResult<'static> {
    let (status, message) = fetch(args, address, check.path());
    ProbeResult {
        check: check.path(),
        upstream: None,
        address: address.to_string(),
        ok: status == Some(StatusCode::OK),
        status: status.map(|status| status.as_u16()),
        message,
    }
}

/// Asks whether the upstreams have a usable apiserver.
fn ask_upstream<'a>(args: &'a ProbeArgs, address: &AdminAddress) -> ProbeResult<'a> {
    let upstream = args.upstream.as_ref().and_then(Option::as_deref);
    let (status, body) = fetch(args, address, "/status");
    let (ok, message) = match status {
        Some(StatusCode::OK) => match serde_json::from_str::<Value>(&body) {
            Ok(value) => match upstream_state(&value, upstream) {
                Ok(usable) => (true, format!("{usable}\n")),
                Err(reason) => (false, reason),
            },
            Err(error) => (false, format!("/status on {address} is not JSON: {error}")),
        },
        Some(status) => (false, format!("/status on {address} answers {}", status.as_u16())),
        None => (false, body),
    };
    ProbeResult {
        check: "/status",
        upstream,
        address: address.to_string(),
        ok,
        status: status.map(|status| status.as_u16()),
        message,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{Command, FromArgMatches};
    use std::io::{Read, Write};
    use std::net::{Ipv4Addr, TcpListener};
    use std::thread;

    fn parse(args: &[&str]) -> Result<ProbeArgs, clap::Error> {
        let command = ProbeArgs::augment_args(Command::new("probe")).no_binary_name(true);
        ProbeArgs::from_arg_matches(&command.try_get_matches_from(args)?)
    }

    /// Answers one request with this status line and body.
    fn answering(status: &str, body: &str) -> (String, thread::JoinHandle<()>) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (length, body) = (body.len(), body.to_owned());
        let answer = format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\n\r\n{body}");
        let thread = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let _ = stream.read(&mut [0; 4096]);
            stream.write_all(answer.as_bytes()).unwrap();
        });
        (address, thread)
    }

    #[test]
    fn args_need_a_check_or_an_upstream() {
        for args in [&["livez"][..], &["--upstream"], &["--upstream", "u"], &["--upstream=u"]] {
            assert!(parse(args).is_ok(), "{args:?}");
        }
        assert_eq!(parse(&["--upstream", "readyz"]).unwrap().upstream, Some(Some("readyz".into())));
        for args in [&[][..], &["livez", "--upstream"], &["healthz"]] {
            assert!(parse(args).is_err(), "{args:?}");
        }
    }

    #[test]
    fn ask_upstream_reads_the_status_within_the_limit() {
        let ask = |address: &str, upstream: &[&str]| {
            let args =
                [&["--admin", address, "--timeout", "5s", "--upstream"][..], upstream].concat();
            let args = parse(&args).unwrap();
            let result = ask_upstream(&args, &AdminAddress::Tcp(args.admin));
            (result.ok, result.status, result.message)
        };
        let status = r#"{"upstreams": [
            {"name": "u", "endpoints": [{"address": "a:1", "usable": true}, {"address": "b:1", "usable": false}]},
            {"name": "v", "endpoints": [{"address": "c:1", "state": "ejected", "reason": "refused"}]}]}"#;
        let unusable = "0 of 1 endpoints of v are usable; c:1 is ejected (refused)";
        for (answer, body, upstream, expected) in [
            ("200 OK", status, &["u"][..], (true, Some(200), "1 of 2 endpoints of u usable\n")),
            ("200 OK", status, &[], (false, Some(200), unusable)),
            ("403 Forbidden", "", &[], (false, Some(403), "answers 403")),
            ("200 OK", "x", &[], (false, Some(200), "is not JSON")),
        ] {
            let (address, thread) = answering(answer, body);
            let (ok, code, message) = ask(&address, upstream);
            assert_eq!((ok, code), (expected.0, expected.1), "{message}");
            assert!(message.contains(expected.2), "{message}");
            thread.join().unwrap();
        }
        // Connections are accepted by the kernel and not answered.
        let silent = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = silent.local_addr().unwrap().to_string();
        let args = parse(&["--upstream", "--admin", &address, "--timeout", "100ms"]).unwrap();
        let result = ask_upstream(&args, &AdminAddress::Tcp(args.admin));
        assert_eq!((result.status, &*result.message), (None, "no answer within 100ms"));
    }
}
