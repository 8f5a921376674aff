//! What a shell and `man` want to know of the command line, made from its definition.

use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use clap_complete::Shell;
use clap_mangen::Man;

/// How to install a completion script.
pub(super) const COMPLETIONS_HELP: &str = "\
Examples:
  jackstay completions bash > /etc/bash_completion.d/jackstay
  jackstay completions zsh > \"${fpath[1]}/_jackstay\"
  jackstay completions fish > ~/.config/fish/completions/jackstay.fish";

/// Prints the completion script of a shell.
pub(super) fn completions(shell: Shell, mut command: clap::Command) -> ExitCode {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command, "jackstay", &mut script);
    code(io::stdout().lock().write_all(&script))
}

/// Prints the page of the program, or writes the pages of all commands into a directory.
pub(super) fn pages(directory: Option<&Path>, command: clap::Command) -> ExitCode {
    let result = match directory {
        None => Man::new(command).render(&mut io::stdout().lock()),
        Some(directory) => clap_mangen::generate_to(command, directory).map_err(|error| {
            io::Error::new(error.kind(), format!("{}: {error}", directory.display()))
        }),
    };
    code(result)
}

fn code(result: io::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        // Whoever read our output has seen enough (`| head`).
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cannot write: {error}");
            ExitCode::FAILURE
        }
    }
}
