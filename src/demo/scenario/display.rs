//! What a person sees of the demo: a table that is drawn anew where stdout is a terminal, a line for
//! each thing that happens where it is not.

use crate::demo::scenario::clients::Counts;
use std::collections::VecDeque;
use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Every line fits into a terminal of 80 columns.
const WIDTH: usize = 79;
/// Lines of the past that the table keeps; with the rest it fits into 24 rows.
const PAST: usize = 4;

/// How it is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// A table, drawn anew.
    Live {
        /// Whether its marks have colours.
        colour: bool,
    },
    /// Lines.
    Plain,
    /// Only how it ended.
    Quiet,
}

/// An apiserver as the proxy sees it.
#[derive(Debug, Clone)]
pub struct Row {
    /// Its name.
    pub name: String,
    /// Where the proxy finds it.
    pub address: String,
    /// Its state.
    pub state: String,
    /// Why it is in that state.
    pub reason: String,
    /// Connections to it.
    pub connections: u64,
    /// Streams on them.
    pub streams: u64,
    /// Watches among those.
    pub watches: u64,
    /// The shortest round trip.
    pub rtt_ms: Option<f64>,
}

/// A step of the schedule, as the table shows it.
#[derive(Debug, Clone)]
pub struct Step {
    /// What was done.
    pub what: String,
    /// Who noticed, and after how long.
    pub noticed: String,
    /// How far it is.
    pub stage: Stage,
    /// What clients felt.
    pub counts: Counts,
}

/// How far a step is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// To come.
    Waiting,
    /// Under way.
    Running,
    /// Over, and every promise held.
    Held,
    /// Over, and one did not.
    Broken,
}

/// Prints. Shared by whoever has something to say.
pub struct ProgressDisplay {
    style: Style,
    began: Instant,
    board: Mutex<Screen>,
}

#[derive(Default)]
struct Screen {
    steps: Vec<Step>,
    past: VecDeque<String>,
    /// Lines of the table on the screen now.
    drawn: usize,
}

impl ProgressDisplay {
    /// In a style.
    pub fn new(style: Style) -> Self {
        Self { style, began: Instant::now(), board: Mutex::default() }
    }

    /// Prints once, above everything.
    pub fn header(&self, lines: &[String]) {
        if self.style != Style::Quiet {
            print(&format!("{}\n\n", lines.join("\n")));
        }
    }

    /// Something happened.
    pub fn say(&self, line: &str) {
        let line = cut(&format!("{:>6.2}  {line}", self.began.elapsed().as_secs_f64()));
        match self.style {
            Style::Quiet => {}
            Style::Plain => print(&format!("{line}\n")),
            Style::Live { .. } => {
                let mut board = self.lock();
                board.past.push_back(line);
                if board.past.len() > PAST {
                    board.past.pop_front();
                }
            }
        }
    }

    /// The steps as they are now.
    pub fn steps(&self, steps: &[Step]) {
        steps.clone_into(&mut self.lock().steps);
    }

    /// Draws the table, if there is one.
    pub fn draw(&self, rows: &[Row]) {
        let Style::Live { colour } = self.style else { return };
        let mut board = self.lock();
        let mut lines = servers(rows);
        lines.push(String::new());
        lines.extend(results(&board.steps));
        lines.push(String::new());
        lines.extend(board.past.iter().cloned());
        // The table never shrinks: past lines only come.
        let drawn = std::mem::replace(&mut board.drawn, lines.len());
        print(&frame(&lines, drawn, colour));
    }

    /// Says how it ended: the results, unless they are on the screen already, and the verdict.
    pub fn end(&self, steps: &[Step], verdict: &[String]) {
        let mut out = String::new();
        if !matches!(self.style, Style::Live { .. }) {
            if self.style == Style::Plain {
                out.push('\n');
            }
            for line in results(steps) {
                let _ = writeln!(out, "{}", cut(&line));
            }
        }
        let _ = writeln!(out, "\n{}", verdict.join("\n"));
        print(&out);
    }

    fn lock(&self) -> MutexGuard<'_, Screen> {
        self.board.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The lines, over the `drawn` lines of the last frame.
fn frame(lines: &[String], drawn: usize, colour: bool) -> String {
    let mut out = String::new();
    if drawn > 0 {
        let _ = write!(out, "\x1b[{drawn}A\r");
    }
    for line in lines {
        let line = cut(line);
        let line = if colour { coloured(&line) } else { line };
        let _ = write!(out, "{line}\x1b[K\r\n");
    }
    out.push_str("\x1b[J");
    out
}

fn servers(rows: &[Row]) -> Vec<String> {
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

fn results(steps: &[Step]) -> Vec<String> {
    let head = |[what, noticed, read, failed, broken, events, late]: [&str; 7]| {
        format!(
            "   {what:<18} {noticed:<17} {read:>7} {failed:>6} {broken:>7} {events:>8} {late:>7}"
        )
    };
    let mut lines = vec![
        head(["", "", "SLOWEST", "FAILED", "WATCHES", "EVENTS", "LATEST"]),
        head(["FAULT", "JACKSTAY NOTICED", "READ", "RD/WR", "BROKEN", "LOST/DUP", "EVENT"]),
    ];
    for step in steps {
        let mark = match step.stage {
            Stage::Waiting => {
                lines.push(format!("   {}", step.what));
                continue;
            }
            Stage::Running => "->",
            Stage::Held => "ok",
            Stage::Broken => "!!",
        };
        let counts = &step.counts;
        lines.push(format!(
            "{mark} {:<18} {:<17} {:>7} {:>6} {:>7} {:>8} {:>7}",
            step.what,
            step.noticed,
            format!("{} ms", counts.slowest_read.as_millis()),
            format!("{}/{}", counts.failed_reads, counts.failed_writes),
            counts.broken,
            format!("{}/{}", counts.lost, counts.duplicated),
            seconds(counts.silence),
        ));
    }
    lines
}

/// A time as people say it.
pub fn seconds(time: Duration) -> String {
    if time < Duration::from_secs(1) {
        format!("{} ms", time.as_millis())
    } else {
        format!("{:.1} s", time.as_secs_f64())
    }
}

fn cut(line: &str) -> String {
    if line.chars().count() <= WIDTH {
        return line.trim_end().to_owned();
    }
    line.chars().take(WIDTH - 3).chain("...".chars()).collect()
}

/// The mark at the beginning of a line, in its colour.
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
    // Whoever closed the pipe wants no more; the exit code still says how it went.
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frame_has_colours_only_where_they_are_wanted() {
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
    fn every_line_fits() {
        let counts = Counts {
            slowest_read: Duration::from_millis(1234),
            failed_writes: 12,
            silence: Duration::from_millis(2345),
            ..Counts::default()
        };
        let step = Step {
            what: "dropped flows of b".into(),
            noticed: "suspect, 310 ms".into(),
            stage: Stage::Held,
            counts,
        };
        let row = Row {
            name: "a".into(),
            address: "127.0.0.1:40123".into(),
            state: "connecting".into(),
            reason: String::new(),
            connections: 12,
            streams: 1000,
            watches: 1000,
            rtt_ms: Some(1234.5),
        };
        let lines = [servers(&[row]), results(&[step])].concat();
        for line in &lines {
            assert!(line.chars().count() <= WIDTH, "{line}");
        }
        assert!(lines.last().is_some_and(|line| line.ends_with("0/0   2.3 s")), "{lines:?}");
        assert_eq!(cut(&"x".repeat(200)).len(), WIDTH);
    }
}
