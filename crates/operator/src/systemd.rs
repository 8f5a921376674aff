//! Commands to systemd.

use std::io;
use std::process::{Command, Stdio};

/// A failed command.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// It could not be started.
    #[error("cannot run `{0}`: {1}")]
    Start(String, #[source] io::Error),
    /// It failed; the text is its output.
    #[error("`{0}` failed: {1}")]
    Failed(String, String),
}

/// What the installation needs of a service manager; tests have one of their own.
pub trait ServiceManager {
    /// Runs `systemctl` with these arguments and returns its output.
    ///
    /// # Errors
    /// It cannot be started or fails.
    fn systemctl(&self, arguments: &[&str]) -> Result<String, CommandError>;
}

/// The systemd of this machine.
#[derive(Debug, Clone, Copy)]
pub struct Systemd;

impl ServiceManager for Systemd {
    fn systemctl(&self, arguments: &[&str]) -> Result<String, CommandError> {
        let command = format!("systemctl {}", arguments.join(" "));
        let output = Command::new("systemctl")
            .arg("--no-pager")
            .arg("--no-ask-password")
            .args(arguments)
            .stdin(Stdio::null())
            .output()
            .map_err(|error| CommandError::Start(command.clone(), error))?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        if output.status.success() {
            return Ok(text(&output.stdout));
        }
        let reason = [text(&output.stderr), text(&output.stdout), output.status.to_string()];
        let reason = reason.into_iter().find(|text| !text.is_empty()).unwrap_or_default();
        Err(CommandError::Failed(command, reason))
    }
}

/// The value of one property of a unit; empty if the unit does not exist.
pub fn property(manager: &impl ServiceManager, unit: &str, name: &str) -> String {
    manager.systemctl(&["show", "--value", "--property", name, unit]).unwrap_or_default()
}
