//! The command line: dispatches to the commands, each of which returns the exit code. Those that need the data plane
//! are modules here, the others are in [`jackstay_operator::commands`].
//!
//! The codes are 0 for success, 1 for a failure at run time, 2 for bad usage or a bad configuration, and 3 if
//! what a command asks gives no answer. Errors are lines on stderr. The commands `demo` and `doctor` are cargo
//! features; a build without the feature accepts the command, reports that it is missing and exits with 2.

#[cfg(feature = "demo")]
mod demo;
mod manual;
mod run;
mod upgrade;

use std::env;
use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use jackstay_operator::commands::{check, kubeconfig, probe, status};
#[cfg(feature = "doctor")]
use jackstay_operator::commands::{doctor, install, removal};
use jackstay_operator::options::EXIT_USAGE;

use crate::observe::build;

const HELP: &str = "\
Exit codes: 0 success, 1 failure, 2 bad usage or bad configuration.

Examples:
  jackstay check --config jackstay.yaml
  jackstay run --config jackstay.yaml
  jackstay status --watch";

const KUBECONFIG_HELP: &str = "\
Exit codes: 0 written, 1 a file cannot be written, 2 bad usage or an input
that cannot be used.

Examples:
  jackstay kubeconfig --mode passthrough
  jackstay kubeconfig --mode terminate --endpoint 10.0.0.2:6443
  jackstay kubeconfig --mode passthrough --offline -o json
  jackstay kubeconfig --in-place
  jackstay kubeconfig --revert";

/// A proxy between the clients of a Kubernetes node and its apiservers.
#[derive(Debug, Parser)]
#[command(name = "jackstay", version = build::LONG, max_term_width = 100, after_help = HELP)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the proxy.
    Run(run::RunArgs),
    /// Validate a configuration and the files that it names; reports every error at once.
    Check(check::CheckArgs),
    /// Demonstrate jackstay with three small apiservers, clients, and scheduled faults.
    #[cfg(feature = "demo")]
    Demo(demo::DemoArgs),
    /// Not in this build.
    #[cfg(not(feature = "demo"))]
    #[command(hide = true)]
    Demo(MissingArgs),
    /// Write a kubeconfig that points at jackstay, and the configuration of that jackstay.
    #[command(after_help = KUBECONFIG_HELP)]
    Kubeconfig(kubeconfig::KubeconfigArgs),
    /// Diagnose the path to the apiservers, before installation or during an incident.
    #[cfg(feature = "doctor")]
    Doctor(doctor::DoctorArgs),
    /// Not in this build.
    #[cfg(not(feature = "doctor"))]
    #[command(hide = true)]
    Doctor(MissingArgs),
    /// Put jackstay beside the kubelet of this node; undone if the node does not become Ready.
    #[cfg(feature = "doctor")]
    Install(install::InstallArgs),
    /// Not in this build.
    #[cfg(not(feature = "doctor"))]
    #[command(hide = true)]
    Install(MissingArgs),
    /// Undo `jackstay install` on this node.
    #[cfg(feature = "doctor")]
    Uninstall(install::UninstallArgs),
    /// Not in this build.
    #[cfg(not(feature = "doctor"))]
    #[command(hide = true)]
    Uninstall(MissingArgs),
    /// Whether the package can be removed, for its scripts.
    #[cfg(feature = "doctor")]
    #[command(hide = true)]
    Removable(removal::RemovalArgs),
    /// Starts the process that takes over from a running one (SIGUSR2), which must not start programs.
    #[command(hide = true)]
    Launcher(upgrade::LauncherArgs),
    /// Show the state of a running jackstay: listeners, endpoints, sources, recent changes.
    Status(status::StatusArgs),
    /// Query the liveness or readiness of a running jackstay, for exec probes.
    Probe(probe::ProbeArgs),
    /// Print a completion script for a shell.
    #[command(alias = "completions")]
    Completion(manual::CompletionArgs),
    /// Print the manual page, or write the pages of all commands.
    Man(manual::ManArgs),
    /// Print the version and the commit.
    Version(manual::VersionArgs),
}

/// Accepts any arguments, for a command that is not in this build.
#[cfg(any(test, not(all(feature = "demo", feature = "doctor"))))]
#[derive(Debug, clap::Args)]
#[command(disable_help_flag = true)]
struct MissingArgs {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    _arguments: Vec<OsString>,
}

/// Reports on `stderr` that a command is not in this build.
#[cfg(any(test, not(all(feature = "demo", feature = "doctor"))))]
fn missing(command: &str, mut stderr: impl std::io::Write) -> ExitCode {
    let text = "not in this build, which was made without the cargo feature";
    let _ = writeln!(stderr, "jackstay {command}: {text} `{command}`");
    ExitCode::from(EXIT_USAGE)
}

/// The name of the program as a plug-in of kubectl, which calls it for `kubectl jackstay`.
const PLUGIN: &str = "kubectl-jackstay";

/// The name of the program by which kubectl asks for completions of `kubectl jackstay`.
const PLUGIN_COMPLETION: &str = "kubectl_complete-jackstay";

/// Whether `program`, the first argument, is a path of the file name `name`.
fn is_called(program: Option<&OsString>, name: &str) -> bool {
    program.is_some_and(|path| Path::new(path).file_name() == Some(OsStr::new(name)))
}

/// The command line for the program name `program`: as a plug-in of kubectl, usage lines and examples say `kubectl
/// jackstay`.
fn command_line(program: Option<&OsString>) -> clap::Command {
    if !is_called(program, PLUGIN) {
        return Cli::command();
    }
    let for_plugin = |command: clap::Command| {
        let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
        command.after_help(help.replace("  jackstay ", "  kubectl jackstay "))
    };
    for_plugin(Cli::command()).bin_name("kubectl jackstay").mut_subcommands(for_plugin)
}

/// Parses the arguments, of which the first is the program name.
fn parse(arguments: &[OsString]) -> Result<Cli, clap::Error> {
    let mut command = command_line(arguments.first());
    let mut matches = command.try_get_matches_from_mut(arguments)?;
    Cli::from_arg_matches_mut(&mut matches).map_err(|error| error.format(&mut command))
}

/// Checks arguments, of which the first is the program name, and runs no command.
///
/// # Errors
/// What the program prints for them: an error, or a help text.
pub fn check_arguments(arguments: &[OsString]) -> Result<(), String> {
    parse(arguments).map(drop).map_err(|error| error.to_string())
}

/// Makes the modes of written files exact. With a umask of 077, which hardening guides ask for, other users could not
/// run the program and a unit with `DynamicUser=yes` could not read the configuration. Files with keys are written with
/// 0600.
fn permit_reading() {
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
}

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    let arguments: Vec<_> = env::args_os().collect();
    if is_called(arguments.first(), PLUGIN_COMPLETION) {
        return manual::complete_for_kubectl(&arguments[1..], Cli::command());
    }
    let cli = match parse(&arguments) {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { EXIT_USAGE } else { 0 });
        }
    };
    match cli.command {
        Command::Run(args) => run::run(args),
        Command::Check(args) => check::run(&args),
        #[cfg(feature = "demo")]
        Command::Demo(args) => demo::run(&args),
        #[cfg(not(feature = "demo"))]
        Command::Demo(_) => missing("demo", std::io::stderr()),
        Command::Kubeconfig(args) => {
            permit_reading();
            kubeconfig::run(&args)
        }
        #[cfg(feature = "doctor")]
        Command::Removable(args) => removal::run(&args),
        #[cfg(feature = "doctor")]
        Command::Doctor(args) => doctor::run(&args),
        #[cfg(not(feature = "doctor"))]
        Command::Doctor(_) => missing("doctor", std::io::stderr()),
        #[cfg(feature = "doctor")]
        Command::Install(args) => {
            permit_reading();
            install::run(&args)
        }
        #[cfg(feature = "doctor")]
        Command::Uninstall(args) => install::run_uninstall(&args),
        #[cfg(not(feature = "doctor"))]
        Command::Install(_) | Command::Uninstall(_) => missing("doctor", std::io::stderr()),
        Command::Launcher(args) => upgrade::launch(&args),
        Command::Status(args) => status::run(&args),
        Command::Probe(args) => probe::run(&args),
        Command::Completion(args) => manual::completion(&args, Cli::command()),
        Command::Man(args) => manual::man(&args, Cli::command()),
        Command::Version(args) => manual::version(&args),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Parser)]
    struct AnyArguments {
        #[command(flatten)]
        _arguments: MissingArgs,
    }

    #[test]
    fn plugin_of_kubectl_names_itself_in_usage_lines_and_examples() {
        let help = |arguments: &[&str]| {
            let arguments: Vec<_> = arguments.iter().map(OsString::from).collect();
            parse(&arguments).unwrap_err().to_string()
        };
        for arguments in
            [&["--help"][..], &["status", "--help"], &["kubeconfig", "--help"], &["status", "--no"]]
        {
            let plugin = help(&[&["/opt/krew/bin/kubectl-jackstay"], arguments].concat());
            assert!(plugin.contains("Usage: kubectl jackstay"), "{arguments:?}: {plugin}");
            assert!(!plugin.contains("\n  jackstay "), "{arguments:?}: {plugin}");
            let program = help(&[&["/usr/bin/jackstay"], arguments].concat());
            assert!(program.contains("Usage: jackstay"), "{arguments:?}: {program}");
            assert!(!program.contains("kubectl jackstay"), "{arguments:?}: {program}");
        }
    }

    #[test]
    fn missing_command_takes_any_arguments_and_exits_with_2() {
        for arguments in [&["demo"][..], &["demo", "--help"], &["demo", "--faults", "2", "x"]] {
            let parsed = AnyArguments::try_parse_from(arguments);
            assert!(parsed.is_ok(), "{arguments:?}: {parsed:?}");
        }
        let mut stderr = Vec::new();
        let code = missing("demo", &mut stderr);
        assert_eq!(code, ExitCode::from(2));
        assert_eq!(
            String::from_utf8(stderr).unwrap(),
            "jackstay demo: not in this build, which was made without the cargo feature `demo`\n"
        );
    }
}
