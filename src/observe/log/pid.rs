//! The process id in log lines, for the time in which two processes write to one journal.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Number of [`PidInLines`] that exist.
#[cfg(not(test))]
static PID_IN_LINES: AtomicUsize = AtomicUsize::new(0);

// Tests run in threads of one process.
#[cfg(test)]
thread_local! {
    static PID_IN_LINES: AtomicUsize = const { AtomicUsize::new(0) };
}

#[cfg(not(test))]
fn with_count<T>(act: impl FnOnce(&AtomicUsize) -> T) -> T {
    act(&PID_IN_LINES)
}

#[cfg(test)]
fn with_count<T>(act: impl FnOnce(&AtomicUsize) -> T) -> T {
    PID_IN_LINES.with(act)
}

/// While it exists, each line has the field `pid`: during a takeover two processes write to one journal.
#[derive(Debug)]
pub struct PidInLines(());

impl PidInLines {
    /// Starts to add the field.
    pub fn start() -> Self {
        with_count(|count| count.fetch_add(1, Ordering::Relaxed));
        Self(())
    }

    /// Adds the field until the end of the process.
    pub fn until_exit(self) {
        std::mem::forget(self);
    }
}

impl Drop for PidInLines {
    fn drop(&mut self) {
        with_count(|count| count.fetch_sub(1, Ordering::Relaxed));
    }
}

/// The line, with the field `pid` if it is shown now.
pub(super) fn add_if_shown(line: &[u8]) -> Box<[u8]> {
    if with_count(|count| count.load(Ordering::Relaxed)) > 0 { with_pid(line) } else { line.into() }
}

/// A line with the field `pid`: the first one of a JSON object, the last one of a text.
fn with_pid(line: &[u8]) -> Box<[u8]> {
    let pid = std::process::id();
    let text = line.strip_suffix(b"\n").unwrap_or(line);
    match text.strip_prefix(b"{") {
        Some(fields) => [format!("{{\"pid\":{pid},").as_bytes(), fields, b"\n"].concat(),
        None => [text, format!(" pid={pid}\n").as_bytes()].concat(),
    }
    .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn with_pid_adds_one_field_to_text_and_json() {
        let pid = std::process::id();
        let text = with_pid(b"2026-01-01T00:00:00.000Z  INFO drained open=1\n");
        let expected = format!("2026-01-01T00:00:00.000Z  INFO drained open=1 pid={pid}\n");
        assert_eq!(String::from_utf8_lossy(&text), expected);
        let json = with_pid(b"{\"level\":\"INFO\",\"message\":\"drained\"}\n");
        assert!(json.ends_with(b"}\n"));
        let json: serde_json::Value = serde_json::from_slice(&json).expect("JSON");
        assert_eq!((&json["pid"], &json["message"]), (&pid.into(), &"drained".into()));
    }
}
