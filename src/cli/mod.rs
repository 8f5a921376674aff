//! The command line: parses it, runs the command, and turns its end into an exit code.
//!
//! 0 ok, 1 runtime failure, 2 bad usage or bad configuration. Errors are lines on stderr.

pub mod check;
mod demo;
mod doctor;
mod kubeconfig;
mod manual;
mod probe;
mod run;
mod status;
mod upgrade;

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, CommandFactory, Parser, Subcommand};

use crate::config::{self, Overrides};
use crate::net::process::inherited_sockets;
use crate::observe::build;

/// Where the admin endpoint is unless it is told otherwise: the default of `admin.bind`.
const ADMIN: &str = "127.0.0.1:9643";

/// Whether a terminal may be written to in colours (<https://no-color.org>).
fn colour_is_wanted() -> bool {
    is_colour_wanted(std::env::var_os("NO_COLOR").as_deref())
}

fn is_colour_wanted(no_color: Option<&OsStr>) -> bool {
    no_color.is_none_or(OsStr::is_empty)
}

/// The line between a Kubernetes node and its control plane.
#[derive(Debug, Parser)]
#[command(name = "jackstay", version = build::LONG, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the proxy.
    Run(RunArgs),
    /// Parse and validate a configuration and load its certificates; reports every error at once.
    Check(CheckArgs),
    /// Show it at work: three small apiservers, jackstay in front, faults on a schedule.
    Demo(demo::DemoArgs),
    /// Write a kubeconfig that points at jackstay, and the configuration for it.
    Kubeconfig(kubeconfig::KubeconfigArgs),
    /// Examine the way to the apiservers, before installation and in trouble.
    Doctor(doctor::DoctorArgs),
    /// Show what a running jackstay knows: listeners, endpoints, sources, the last changes.
    Status(status::StatusArgs),
    /// Ask a running jackstay whether it is alive or ready: for exec probes.
    Probe(probe::ProbeArgs),
    /// Print a completion script for a shell.
    #[command(after_help = manual::COMPLETIONS_HELP)]
    Completions {
        /// For which one.
        shell: clap_complete::Shell,
    },
    /// Print the manual page, or write the pages of all commands.
    Man {
        /// Write jackstay.1, jackstay-run.1 and so on into this directory.
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
    },
}

#[derive(Debug, Args)]
struct RunArgs {
    /// Configuration file (YAML).
    #[arg(long, value_name = "FILE", required_unless_present = "listen")]
    config: Option<PathBuf>,
    /// Pass connections through (L4) from this address, without a file; may be repeated.
    #[arg(long, value_name = "ADDR", requires = "upstream", conflicts_with = "config")]
    listen: Vec<String>,
    /// An apiserver to pass connections to; may be repeated.
    #[arg(long, value_name = "ADDR", requires = "listen", conflicts_with = "config")]
    upstream: Vec<String>,
    /// Replace the jackstay that runs with the same `state_dir`: take its listening sockets over,
    /// begin to serve, and let it drain and end. Without one, start as usual.
    #[arg(long)]
    take_over: bool,
    /// Write a newline to this open descriptor once clients can connect, and close it. For what waits
    /// for an apiserver as well: `jackstay status --wait`.
    #[arg(long, value_name = "FD", value_parser = clap::value_parser!(i32).range(3..))]
    ready_fd: Option<i32>,
    #[command(flatten)]
    scalars: ScalarArgs,
}

impl RunArgs {
    /// Where the configuration is from.
    fn place(self) -> run::Place {
        let overrides = self.scalars.overrides();
        match self.config {
            Some(file) => run::Place {
                name: file.clone(),
                is_file: true,
                read: Box::new(move || config::draft(&file, config::environment(), &overrides)),
            },
            None => run::Place {
                name: PathBuf::from("command line"),
                is_file: false,
                read: Box::new(move || {
                    let env = config::environment();
                    config::draft_from_flags(&self.listen, &self.upstream, env, &overrides)
                }),
            },
        }
    }
}

#[derive(Debug, Args)]
struct CheckArgs {
    /// Configuration file (YAML).
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    #[command(flatten)]
    scalars: ScalarArgs,
}

/// Values outside of lists, which win over the file and the environment.
#[derive(Debug, Args)]
struct ScalarArgs {
    /// Overrides admin.bind.
    #[arg(long, value_name = "ADDR")]
    admin: Option<String>,
    /// Overrides workers: a number, or `auto`.
    #[arg(long, value_name = "N")]
    workers: Option<String>,
    /// Overrides log.level.
    #[arg(long, value_name = "LEVEL")]
    log_level: Option<String>,
    /// Overrides log.format.
    #[arg(long, value_name = "FORMAT")]
    log_format: Option<String>,
    /// Overrides log.access.
    #[arg(long, value_name = "WHICH")]
    access_log: Option<String>,
}

impl ScalarArgs {
    fn overrides(&self) -> Overrides {
        Overrides {
            admin_bind: self.admin.clone(),
            workers: self.workers.clone(),
            log_level: self.log_level.clone(),
            log_format: self.log_format.clone(),
            log_access: self.access_log.clone(),
            ..Overrides::default()
        }
    }
}

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { 2 } else { 0 });
        }
    };
    match cli.command {
        Command::Run(args) => {
            let given = inherited_sockets::from_service_manager();
            let ready = args.ready_fd.map(|number| {
                inherited_sockets::take_descriptor(number, &given)
                    .map_err(|error| format!("--ready-fd {number}: {error}"))
            });
            match ready.transpose() {
                Ok(ready) => {
                    let descriptors = run::ParentDescriptors { sockets: given, ready };
                    let take_over = args.take_over;
                    run::run(args.place(), descriptors, take_over)
                }
                Err(error) => {
                    eprintln!("{error}");
                    ExitCode::from(2)
                }
            }
        }
        Command::Check(args) => {
            let (mut out, mut err) = (std::io::stdout().lock(), std::io::stderr().lock());
            let env = config::environment();
            match check::run(&args.config, env, &args.scalars.overrides(), &mut out, &mut err) {
                Ok(code) => ExitCode::from(code),
                Err(_) => ExitCode::FAILURE,
            }
        }
        Command::Demo(args) => demo::run(&args),
        Command::Kubeconfig(args) => kubeconfig::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Status(args) => status::run(&args),
        Command::Probe(args) => probe::run(&args),
        Command::Completions { shell } => manual::completions(shell, Cli::command()),
        Command::Man { out } => manual::pages(out.as_deref(), Cli::command()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_color_switches_colours_off_unless_it_is_empty() {
        assert!(is_colour_wanted(None) && is_colour_wanted(Some(OsStr::new(""))));
        assert!(!is_colour_wanted(Some(OsStr::new("1"))));
    }
}
