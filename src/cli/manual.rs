//! `jackstay completion`, `man` and `version`: print text that clap generates from the command line,
//! and the version of the build. Completion of `kubectl jackstay`.

mod kubectl;
mod page;

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use clap_complete::Shell;
use jackstay_operator::options::OutputArgs;
use serde_json::json;

use crate::observe::build;

const COMPLETION_HELP: &str = "\
kubectl 1.26 and later completes `kubectl jackstay` if the program is in PATH
under the name kubectl_complete-jackstay, too.

Exit codes: 0 printed, 1 stdout cannot be written, 2 bad usage.

Examples:
  jackstay completion bash > /etc/bash_completion.d/jackstay
  jackstay completion zsh > \"${fpath[1]}/_jackstay\"
  jackstay completion fish > ~/.config/fish/completions/jackstay.fish
  ln -s kubectl-jackstay ~/.krew/bin/kubectl_complete-jackstay";

const MAN_HELP: &str = "\
Exit codes: 0 printed or written, 1 a page cannot be written, 2 bad usage.

Examples:
  jackstay man | man -l -
  jackstay man --out /usr/local/share/man/man1";

const VERSION_HELP: &str = "\
Exit codes: 0 printed, 1 stdout cannot be written, 2 bad usage.

Examples:
  jackstay version
  jackstay version -o json";

/// Arguments of `jackstay completion`.
#[derive(Debug, Args)]
#[command(after_help = COMPLETION_HELP)]
pub(super) struct CompletionArgs {
    /// The shell.
    shell: Shell,
}

/// Arguments of `jackstay man`.
#[derive(Debug, Args)]
#[command(after_help = MAN_HELP)]
pub(super) struct ManArgs {
    /// Write jackstay.1, jackstay-run.1 and so on into this directory, which is created if it is missing.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

/// Arguments of `jackstay version`.
#[derive(Debug, Args)]
#[command(after_help = VERSION_HELP)]
pub(super) struct VersionArgs {
    #[command(flatten)]
    output: OutputArgs,
}

/// Prints the completion script for a shell.
pub(super) fn completion(args: &CompletionArgs, mut command: clap::Command) -> ExitCode {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "jackstay", &mut script);
    exit_code(io::stdout().lock().write_all(&script))
}

/// Prints candidates for the last of `words`, as kubectl reads them from `kubectl_complete-jackstay`.
pub(super) fn complete_for_kubectl(words: &[OsString], command: clap::Command) -> ExitCode {
    exit_code(io::stdout().lock().write_all(kubectl::complete(command, words).as_bytes()))
}

/// Prints the manual page of the program, or writes the pages of all commands into a directory.
pub(super) fn man(args: &ManArgs, command: clap::Command) -> ExitCode {
    exit_code(match &args.out {
        None => page::write(command, &mut io::stdout().lock()),
        Some(directory) => write_pages(directory, command),
    })
}

fn write_pages(directory: &Path, command: clap::Command) -> io::Result<()> {
    page::write_all(command, directory)
        .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", directory.display())))
}

/// Prints the version and the commit.
pub(super) fn version(args: &VersionArgs) -> ExitCode {
    let value = json!({ "version": build::VERSION, "commit": build::COMMIT });
    let text = args.output.format.render(&value, || format!("jackstay {}\n", build::LONG));
    exit_code(io::stdout().lock().write_all(text.as_bytes()))
}

fn exit_code(result: io::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        // The reader, such as `head`, has closed the pipe.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cannot write: {error}");
            ExitCode::FAILURE
        }
    }
}
