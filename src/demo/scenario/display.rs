//! Output of the demo: a table that is redrawn on a terminal, else a line for each change.

use crate::demo::lock;
use crate::demo::scenario::ledger::Counts;
use std::collections::VecDeque;
use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Longest line: a terminal has 80 columns.
const WIDTH: usize = 79;
/// Log lines below the table; all together fit into 24 rows.
const LOG_LINES: usize = 4;

/// How the demo prints its progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// A table that is redrawn.
    Live {
        /// Whether the marks are coloured.
        colour: bool,
    },
    /// A line for each change.
    Plain,
    /// Only the result.
    Quiet,
}

/// The row of an apiserver in the table, from the proxy's `/status`.
#[derive(Debug, Clone)]
pub struct Row {
    /// Name in the demo.
    pub name: String,
    /// Address that the proxy connects to.
    pub address: String,
    /// Endpoint state.
    pub state: String,
    /// Connections.
    pub connections: u64,
    /// Streams on all connections.
    pub streams: u64,
    /// Watches among the streams.
    pub watches: u64,
    /// The shortest PING round trip, in milliseconds.
    pub rtt_ms: Option<f64>,
}

/// A step of the schedule.
#[derive(Debug, Clone)]
pub struct Step {
    /// The fault.
    pub title: String,
    /// The state that jackstay reported first, and after how long.
    pub detected: String,
    /// Progress.
    pub stage: StepProgress,
    /// The counts of the clients.
    pub counts: Counts,
}

impl Step {
    /// A step without observations.
    pub(super) fn new(title: String, stage: StepProgress) -> Self {
        Self { title, detected: String::new(), stage, counts: Counts::default() }
    }
}

/// Progress of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepProgress {
    /// Not started.
    Waiting,
    /// Running.
    Running,
    /// Finished; every promise was kept.
    Passed,
    /// Finished; a promise was broken.
    Failed,
}

/// Writes the output. Shared by all threads.
pub struct ProgressDisplay {
    style: Style,
    began: Instant,
    screen: Mutex<Screen>,
}

#[derive(Default)]
struct Screen {
    steps: Vec<Step>,
    log: VecDeque<String>,
    /// Number of lines that the last frame has drawn.
    drawn: usize,
}

impl ProgressDisplay {
    /// Output in this style.
    pub fn new(style: Style) -> Self {
        Self { style, began: Instant::now(), screen: Mutex::default() }
    }

    /// Prints lines once, above the table.
    pub fn header(&self, lines: &[String]) {
        if self.style != Style::Quiet {
            print(&format!("{}\n\n", lines.join("\n")));
        }
    }

    /// Adds a log line.
    pub fn log(&self, line: &str) {
        let line = truncate(&format!("{:>6.2}  {line}", self.began.elapsed().as_secs_f64()));
        match self.style {
            Style::Quiet => {}
            Style::Plain => print(&format!("{line}\n")),
            Style::Live { .. } => {
                let log = &mut lock(&self.screen).log;
                log.push_back(line);
                if log.len() > LOG_LINES {
                    log.pop_front();
                }
            }
        }
    }

    /// Replaces all steps.
    pub(super) fn set_steps(&self, steps: Vec<Step>) {
        lock(&self.screen).steps = steps;
    }

    /// All steps.
    pub fn steps(&self) -> Vec<Step> {
        lock(&self.screen).steps.clone()
    }

    /// Replaces one step.
    pub(super) fn set_step(&self, index: usize, step: &Step) {
        lock(&self.screen).steps[index].clone_from(step);
    }

    /// Redraws the table.
    pub fn draw(&self, rows: &[Row]) {
        let Style::Live { colour } = self.style else { return };
        let mut screen = lock(&self.screen);
        let mut lines = server_table(rows);
        lines.push(String::new());
        lines.extend(step_table(&screen.steps));
        lines.push(String::new());
        lines.extend(screen.log.iter().cloned());
        let drawn = std::mem::replace(&mut screen.drawn, lines.len());
        print(&frame(&lines, drawn, colour));
    }

    /// Prints the results, unless the table shows them, and the verdict.
    pub fn end(&self, verdict: &[String]) {
        let mut out = String::new();
        if !matches!(self.style, Style::Live { .. }) {
            if self.style == Style::Plain {
                out.push('\n');
            }
            for line in step_table(&lock(&self.screen).steps) {
                let _ = writeln!(out, "{}", truncate(&line));
            }
        }
        let _ = writeln!(out, "\n{}", verdict.join("\n"));
        print(&out);
    }
}

/// The terminal output that replaces the last frame of `drawn` lines.
fn frame(lines: &[String], drawn: usize, colour: bool) -> String {
    let mut out = String::new();
    if drawn > 0 {
        let _ = write!(out, "\x1b[{drawn}A\r");
    }
    for line in lines {
        let line = truncate(line);
        let line = if colour { coloured(&line) } else { line };
        let _ = write!(out, "{line}\x1b[K\r\n");
    }
    out.push_str("\x1b[J");
    out
}

fn server_table(rows: &[Row]) -> Vec<String> {
    let mut lines = vec![format!(
        "   {:<2} {:<16} {:<11} {:>5} {:>7} {:>7} {:>9}",
        "", "APISERVER", "STATE", "CONNS", "STREAMS", "WATCHES", "RTT"
    )];
    lines.extend(rows.iter().map(|row| {
        format!(
            "   {:<2} {:<16} {:<11} {:>5} {:>7} {:>7} {:>9}",
            row.name,
            row.address,
            row.state,
            row.connections,
            row.streams,
            row.watches,
            row.rtt_ms.map_or("-".to_owned(), |rtt| format!("{rtt:.2} ms")),
        )
    }));
    lines
}

fn step_table(steps: &[Step]) -> Vec<String> {
    let format_row =
        |mark: &str, [title, detected, read, failed, broken, events, late]: [&str; 7]| {
            format!(
                "{mark:2} {title:<18} {detected:<17} {read:>7} {failed:>6} {broken:>7} {events:>8} {late:>7}"
            )
        };
    let mut lines = vec![
        format_row("", ["", "", "SLOWEST", "FAILED", "WATCHES", "EVENTS", "LATEST"]),
        format_row(
            "",
            ["FAULT", "JACKSTAY DETECTED", "READ", "RD/WR", "BROKEN", "LOST/DUP", "EVENT"],
        ),
    ];
    for step in steps {
        let mark = match step.stage {
            StepProgress::Waiting => {
                lines.push(format!("   {}", step.title));
                continue;
            }
            StepProgress::Running => "->",
            StepProgress::Passed => "ok",
            StepProgress::Failed => "!!",
        };
        let counts = &step.counts;
        lines.push(format_row(
            mark,
            [
                &step.title,
                &step.detected,
                &format!("{} ms", counts.slowest_read.as_millis()),
                &format!("{}/{}", counts.failed_reads, counts.failed_writes),
                &counts.broken.to_string(),
                &format!("{}/{}", counts.lost, counts.duplicated),
                &format_duration(counts.silence),
            ],
        ));
    }
    lines
}

/// A duration as `123 ms` or `1.2 s`.
pub fn format_duration(time: Duration) -> String {
    if time < Duration::from_secs(1) {
        format!("{} ms", time.as_millis())
    } else {
        format!("{:.1} s", time.as_secs_f64())
    }
}

fn truncate(line: &str) -> String {
    if line.chars().count() <= WIDTH {
        return line.trim_end().to_owned();
    }
    line.chars().take(WIDTH - 3).chain("...".chars()).collect()
}

/// Colours the mark at the beginning of a line.
fn coloured(line: &str) -> String {
    for (mark, code) in [("ok ", 32), ("!! ", 31), ("-> ", 33)] {
        if let Some(rest) = line.strip_prefix(mark) {
            return format!("\x1b[{code}m{mark}\x1b[0m{rest}");
        }
    }
    line.to_owned()
}

fn print(text: &str) {
    let mut out = io::stdout().lock();
    // A closed pipe is no failure of the demo, whose result is the exit code.
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frame_is_coloured_only_on_request() {
        let lines = ["ok killed a".to_owned(), "!! dropped b".to_owned()];
        assert_eq!(
            frame(&lines, 2, true),
            "\x1b[2A\r\x1b[32mok \x1b[0mkilled a\x1b[K\r\n\x1b[31m!! \x1b[0mdropped b\x1b[K\r\n\x1b[J"
        );
        assert_eq!(
            frame(&lines, 2, false),
            "\x1b[2A\rok killed a\x1b[K\r\n!! dropped b\x1b[K\r\n\x1b[J"
        );
    }

    #[test]
    fn tables_fit_into_80_columns() {
        let counts = Counts {
            slowest_read: Duration::from_millis(1234),
            failed_writes: 12,
            silence: Duration::from_millis(2345),
            ..Counts::default()
        };
        let step = Step {
            title: "dropped flows of b".into(),
            detected: "suspect, 310 ms".into(),
            stage: StepProgress::Passed,
            counts,
        };
        let row = Row {
            name: "a".into(),
            address: "127.0.0.1:40123".into(),
            state: "connecting".into(),
            connections: 12,
            streams: 1000,
            watches: 1000,
            rtt_ms: Some(1234.5),
        };
        let lines = [server_table(&[row]), step_table(&[step])].concat();
        for line in &lines {
            assert!(line.chars().count() <= WIDTH, "{line}");
        }
        assert!(lines.last().is_some_and(|line| line.ends_with("0/0   2.3 s")), "{lines:?}");
        assert_eq!(truncate(&"x".repeat(200)).len(), WIDTH);
    }
}
