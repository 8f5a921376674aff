//! The process id in log lines, for the time in which two processes write to one journal.
//!
//! | process | each line has `pid` |
//! |---|---|
//! | starts | in the first line, as one of its fields |
//! | old | from the connect of a new process, or from SIGUSR2, to its own end, or until the new process has failed |
//! | new | from `--take-over`, or from the answer of the old process or its absence, until that has ended, for at most 120 s |
//! | alone | never |

use std::sync::atomic::{AtomicUsize, Ordering};

/// Number of [`PidInLines`] that exist in this process.
pub(super) static OVERLAPS: AtomicUsize = AtomicUsize::new(0);

/// While it exists, each line of the log has the field `pid`.
#[derive(Debug)]
pub struct PidInLines(&'static AtomicUsize);

impl PidInLines {
    /// Starts to add the field.
    pub fn start() -> Self {
        Self::counted_in(&OVERLAPS)
    }

    /// Starts to add the field to the lines of the queues with this counter.
    pub(super) fn counted_in(counter: &'static AtomicUsize) -> Self {
        counter.fetch_add(1, Ordering::Relaxed);
        Self(counter)
    }

    /// Adds the field until the end of the process.
    pub fn until_exit(self) {
        std::mem::forget(self);
    }
}

impl Drop for PidInLines {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A line with the field `pid`: the first one of a JSON object, the last one of a text.
pub(super) fn with_pid(line: &[u8]) -> Box<[u8]> {
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
    use std::io::Write;

    use super::super::LineQueue;
    use super::super::tests::Captured;
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

    #[test]
    fn lines_have_the_pid_while_the_guard_exists() {
        static OVERLAPS: AtomicUsize = AtomicUsize::new(0);
        let captured = Captured::default();
        let (mut queue, guard) = LineQueue::start(captured.clone(), &OVERLAPS).expect("a thread");
        let shown = PidInLines::counted_in(&OVERLAPS);
        queue.write_all(b"during\n").expect("never fails");
        drop(shown);
        queue.write_all(b"after\n").expect("never fails");
        drop(guard);
        let during = format!("during pid={}", std::process::id());
        assert_eq!(captured.lines(), [during, "after".to_owned()]);
    }
}
