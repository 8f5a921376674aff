//! `jackstay status`: prints the state of a running jackstay, once or repeatedly.
//!
//! On a terminal `--watch` draws in place ([`live`]); elsewhere it prints one table after the other.
//! Both continue while jackstay restarts.
//!
//! The exit code is 1 if requests cannot be served ([`serving`]), and 3 without an answer. `--wait` repeats
//! the query until requests can be served.

mod live;
pub(super) mod serving;
mod table;
mod view;

use std::io::{self, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use jackstay_config::format_duration;
use jackstay_sys::utc::Utc;
use serde_json::Value;

use self::table::Style;
use crate::admin_client::{
    DEFAULT_ADMIN, STATUS_TIMEOUT, TcpAddress, block_on, explain_no_status, fetch_status,
    get_status,
};
use crate::options::{
    DurationFlagError, EXIT_NO_ANSWER, OutputArgs, OutputFormat, has_cursor, parse_flag_duration,
};

/// How long `--wait` waits by default.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

/// Shortest interval of `--watch`, and the interval of `--wait`.
const MIN_INTERVAL: Duration = Duration::from_millis(100);

const HELP: &str = "\
Exit codes: 0 every upstream has a usable endpoint, 1 one has none, 2 bad
usage, 3 no answer: jackstay does not run there.

Examples:
  jackstay status
  jackstay status --watch
  jackstay status --timeout 2s
  jackstay status --wait --timeout 30s
  jackstay status -o json";

/// Arguments of `jackstay status`.
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub struct StatusArgs {
    /// Address of the admin endpoint: `admin.bind` in the configuration.
    #[arg(long, value_name = "ADDR", default_value_t = DEFAULT_ADMIN.into())]
    admin: TcpAddress,
    /// Repeat at this interval; a number without a unit is seconds [default interval: 1s].
    #[arg(long, short, value_name = "INTERVAL", num_args = 0..=1, default_missing_value = "1s",
          value_parser = parse_interval, require_equals = true, conflicts_with = "wait")]
    watch: Option<Duration>,
    /// Wait until every upstream has a usable endpoint, then print the status.
    #[arg(long)]
    wait: bool,
    /// How long to wait for the answer, or with --wait until every upstream has a usable endpoint, before it
    /// fails with exit code 1; a number without a unit is seconds [default: 5s, with --wait 60s].
    #[arg(long, value_name = "DURATION", value_parser = parse_flag_duration, conflicts_with = "watch")]
    timeout: Option<Duration>,
    #[command(flatten)]
    output: OutputArgs,
}

fn parse_interval(text: &str) -> Result<Duration, DurationFlagError> {
    let interval = parse_flag_duration(text).map_err(DurationFlagError::Unit)?;
    if interval < MIN_INTERVAL {
        return Err(DurationFlagError::OutsideLimits("at least 100ms"));
    }
    Ok(interval)
}

/// Runs the command.
pub fn run(args: &StatusArgs) -> ExitCode {
    let result = match args.watch {
        None if args.wait => return wait(args),
        None => {
            let limit = args.timeout.unwrap_or(STATUS_TIMEOUT);
            block_on(get_status(args.admin, limit)).map(|status| {
                print(args, &status);
                serving::unready_reason(&status)
            })
        }
        Some(interval) if args.output.format == OutputFormat::Text && has_cursor() => {
            live::run(args.admin, interval).map(|()| None)
        }
        Some(interval) => follow(args, interval).map(|()| None),
    };
    match result {
        Ok(None) => ExitCode::SUCCESS,
        Ok(Some(reason)) => {
            eprintln!("requests cannot be served: {reason}");
            ExitCode::FAILURE
        }
        // The reader, such as `head`, has closed the pipe.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{}", explain_no_status(args.admin, &error));
            ExitCode::from(EXIT_NO_ANSWER)
        }
    }
}

/// Queries the status until requests can be served, and prints the last status.
fn wait(args: &StatusArgs) -> ExitCode {
    let timeout = args.timeout.unwrap_or(WAIT_TIMEOUT);
    let deadline = Instant::now() + timeout;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        // A request that starts just before the deadline still gets MIN_INTERVAL.
        let limit = left.clamp(MIN_INTERVAL, STATUS_TIMEOUT);
        let result = block_on(get_status(args.admin, limit));
        let unready = match &result {
            Ok(status) => serving::unready_reason_for_new_clients(status),
            Err(error) => Some(explain_no_status(args.admin, error)),
        };
        let is_last = Instant::now() >= deadline;
        if let Ok(status) = &result
            && (is_last || unready.is_none())
        {
            print(args, status);
        }
        match unready {
            None => return ExitCode::SUCCESS,
            Some(reason) if is_last => {
                let limit = format_duration(timeout);
                eprintln!("requests cannot be served after {limit}: {reason}");
                return if result.is_ok() {
                    ExitCode::FAILURE
                } else {
                    ExitCode::from(EXIT_NO_ANSWER)
                };
            }
            Some(_) => {
                let left = deadline.saturating_duration_since(Instant::now());
                std::thread::sleep(left.min(MIN_INTERVAL));
            }
        }
    }
}

fn print(args: &StatusArgs, status: &Value) {
    args.output.format.print(status, || view::text(status, Style::of_stdout()));
}

/// Prints one status after the other: a blank line after each table, one line for each JSON object,
/// `---` before each YAML document.
fn follow(args: &StatusArgs, interval: Duration) -> io::Result<()> {
    loop {
        match fetch_status(args.admin) {
            Ok(status) => {
                let text = match args.output.format {
                    OutputFormat::Text => format!("{}\n", view::text(&status, Style::of_stdout())),
                    OutputFormat::Json => format!("{status}\n"),
                    OutputFormat::Yaml => {
                        format!("---\n{}", OutputFormat::Yaml.render(&status, String::new))
                    }
                };
                let mut out = io::stdout().lock();
                out.write_all(text.as_bytes())?;
                out.flush()?;
            }
            Err(error) => eprintln!("{} {}", Utc::now(), explain_no_status(args.admin, &error)),
        }
        std::thread::sleep(interval);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_interval_needs_100_ms() {
        assert_eq!(parse_interval("250ms"), Ok(Duration::from_millis(250)));
        assert_eq!(parse_interval("2"), Ok(Duration::from_secs(2)));
        assert!(parse_interval("10ms").is_err() && parse_interval("0").is_err());
    }
}
