//! Log lines as text or JSON to stderr, without ever blocking the caller.
//!
//! The reader of stderr may stop (a stuck container runtime, a full disk behind journald), and a write to a
//! full pipe blocks. So a line goes into a bounded queue, and a thread of its own writes it. When the queue
//! is full, lines are dropped and counted, and the number is logged as soon as the reader continues.
//!
//! tracing-appender does the same but for two points: it does not report lost lines in the log, and if the
//! queue is still full when its guard is dropped it prints to a standard stream, which blocks the end of the
//! process on a stuck reader. It would also bring three crates.
//!
//! [`LogControl`] changes level and format while the process runs.

use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::FormatTime;
use tracing_subscriber::fmt::{self, MakeWriter};
use tracing_subscriber::layer::{Layer, Layered, SubscriberExt};
use tracing_subscriber::{Registry, reload};

use super::counted;
use super::utc::Utc;
use crate::config::{Level, Log, LogFormat};

/// Target of access log lines. `log.access` controls them, `log.level` does not.
pub const ACCESS_TARGET: &str = "jackstay::access";

/// Largest number of lines that wait: at about 300 bytes per line, some 600 KiB.
const QUEUE_LINES: usize = 2048;

/// How long the end of the process waits until queued lines are written.
const FLUSH_TIMEOUT: Duration = Duration::from_millis(500);

/// Dropping it waits up to 500 ms for queued lines.
#[must_use = "lines that are still queued are lost when the process ends without it"]
#[derive(Debug)]
pub struct LogGuard {
    shared: Arc<Shared>,
    control: Option<LogControl>,
}

impl LogGuard {
    /// Changes level and format of this log.
    pub fn control(&self) -> Option<LogControl> {
        self.control.clone()
    }
}

/// Changes level and format of a running log.
#[derive(Clone)]
pub struct LogControl {
    filter: reload::Handle<Targets, Registry>,
    format: reload::Handle<Format, Filtered>,
    lines: Lines,
}

/// Lines of one format.
type Format = Box<dyn Layer<Filtered> + Send + Sync>;
/// The registry with the filter that decides which lines exist.
type Filtered = Layered<reload::Layer<Targets, Registry>, Registry>;

impl std::fmt::Debug for LogControl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LogControl").finish_non_exhaustive()
    }
}

impl LogControl {
    /// Applies level and format of a configuration.
    ///
    /// # Errors
    /// The subscriber no longer exists.
    pub fn set(&self, log: &Log) -> io::Result<()> {
        self.filter.reload(filter(log)).map_err(io::Error::other)?;
        self.format.reload(format(log, self.lines.clone())).map_err(io::Error::other)
    }
}

/// Installs the process-wide subscriber as configured, writing to stderr.
///
/// # Errors
/// When one is installed already, or the writer's thread cannot be started.
pub fn init(log: &Log) -> io::Result<LogGuard> {
    init_to(log, io::stderr())
}

/// Installs the subscriber as [`init`] does, writing to `sink`.
///
/// # Errors
/// As [`init`].
pub fn init_to(log: &Log, sink: impl Write + Send + 'static) -> io::Result<LogGuard> {
    let (lines, mut guard) = Lines::start(sink)?;
    let (subscriber, filter, format) = subscriber(log, lines.clone());
    tracing::subscriber::set_global_default(subscriber).map_err(io::Error::other)?;
    guard.control = Some(LogControl { filter, format, lines });
    Ok(guard)
}

/// The subscriber as configured over any writer, and the handles that change its filter and format.
fn subscriber<W>(
    log: &Log,
    writer: W,
) -> (
    impl tracing::Subscriber + Send + Sync,
    reload::Handle<Targets, Registry>,
    reload::Handle<Format, Filtered>,
)
where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    let (filter, level) = reload::Layer::new(filter(log));
    let (format, shape) = reload::Layer::new(format(log, writer));
    (tracing_subscriber::registry().with(filter).with(format), level, shape)
}

/// Which lines are logged.
fn filter(log: &Log) -> Targets {
    let level = match log.level {
        Level::Error => LevelFilter::ERROR,
        Level::Warn => LevelFilter::WARN,
        Level::Info => LevelFilter::INFO,
        Level::Debug => LevelFilter::DEBUG,
        Level::Trace => LevelFilter::TRACE,
    };
    // At debug level h2 writes several lines per frame, so libraries log only at trace level.
    let libraries = if level == LevelFilter::TRACE { level } else { level.min(LevelFilter::WARN) };
    Targets::new()
        .with_default(libraries)
        .with_target("jackstay", level)
        .with_target(ACCESS_TARGET, LevelFilter::INFO)
}

/// How lines are formatted.
fn format<W>(log: &Log, writer: W) -> Format
where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    let layer = fmt::layer().with_writer(writer).with_ansi(false);
    match log.format {
        LogFormat::Text => layer.with_timer(Rfc3339).with_target(false).boxed(),
        LogFormat::Json => layer.json().flatten_event(true).with_timer(Rfc3339).boxed(),
    }
}

struct Rfc3339;

impl FormatTime for Rfc3339 {
    fn format_time(&self, out: &mut Writer<'_>) -> std::fmt::Result {
        write!(out, "{}", Utc::now())
    }
}

/// The queue between callers and the writer thread.
#[derive(Debug, Clone)]
struct Lines {
    queue: Sender<Box<[u8]>>,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    /// Lines dropped since the last report.
    dropped: AtomicU64,
    /// Lines queued and not yet written.
    pending: Mutex<usize>,
    drained: Condvar,
}

impl Lines {
    fn start(sink: impl Write + Send + 'static) -> io::Result<(Self, LogGuard)> {
        // Unbounded, because a bounded channel allocates all its places at once; `write` keeps the bound.
        let (queue, lines) = channel();
        let shared = Arc::new(Shared::default());
        let writer = Arc::clone(&shared);
        std::thread::Builder::new()
            .name("log".to_owned())
            .stack_size(128 * 1024) // it copies bytes
            .spawn(move || write_lines(&lines, sink, &writer))?;
        Ok((Self { queue, shared: Arc::clone(&shared) }, LogGuard { shared, control: None }))
    }
}

fn write_lines(lines: &Receiver<Box<[u8]>>, mut sink: impl Write, shared: &Shared) {
    for line in lines {
        // There is nowhere to report an error of stderr; the next line may succeed.
        let _ = sink.write_all(&line);
        let dropped = shared.dropped.swap(0, Ordering::Relaxed);
        if dropped > 0 {
            let _ = writeln!(
                sink,
                "log: {} lost: the reader of stderr was too slow",
                counted(dropped, "line")
            );
        }
        let mut pending = shared.pending.lock().unwrap_or_else(PoisonError::into_inner);
        *pending = pending.saturating_sub(1);
        if *pending == 0 {
            shared.drained.notify_all();
        }
    }
}

impl Write for Lines {
    /// Queues one line: the formatter writes each line in one call.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut pending = self.shared.pending.lock().unwrap_or_else(PoisonError::into_inner);
        if *pending < QUEUE_LINES && self.queue.send(line.into()).is_ok() {
            *pending += 1;
        } else {
            self.shared.dropped.fetch_add(1, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'w> MakeWriter<'w> for Lines {
    type Writer = Self;

    fn make_writer(&'w self) -> Self {
        self.clone()
    }
}

impl Drop for LogGuard {
    fn drop(&mut self) {
        let pending = self.shared.pending.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.shared.drained.wait_timeout_while(pending, FLUSH_TIMEOUT, |left| *left > 0));
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::config::AccessLog;
    use std::sync::mpsc;

    /// Collects the lines that this thread logs while a closure runs.
    #[derive(Debug, Clone, Default)]
    pub(crate) struct Captured(Arc<Mutex<Vec<u8>>>);

    impl Captured {
        pub(crate) fn during(&self, format: LogFormat, body: impl FnOnce()) {
            self.with(&Log { level: Level::Info, format, access: AccessLog::All }, body);
        }

        pub(crate) fn with(&self, log: &Log, body: impl FnOnce()) {
            tracing::subscriber::with_default(subscriber(log, self.clone()).0, body);
        }

        pub(crate) fn lines(&self) -> Vec<String> {
            let bytes = self.0.lock().expect("no panic").clone();
            String::from_utf8(bytes).expect("text").lines().map(str::to_owned).collect()
        }
    }

    impl Write for Captured {
        fn write(&mut self, line: &[u8]) -> io::Result<usize> {
            assert!(line.ends_with(b"\n"), "the formatter hands over whole lines");
            self.0.lock().expect("no panic").extend_from_slice(line);
            Ok(line.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl<'w> MakeWriter<'w> for Captured {
        type Writer = Self;

        fn make_writer(&'w self) -> Self {
            self.clone()
        }
    }

    #[test]
    fn text_format_escapes_control_characters() {
        let captured = Captured::default();
        captured.during(LogFormat::Text, || {
            tracing::warn!(endpoint = "10.0.0.11:6443", why = "a\nforged\u{1b}[31m", "ejected");
            tracing::debug!("too fine");
            tracing::info!(target: "h2", "a library");
        });
        let lines = captured.lines();
        assert_eq!(lines.len(), 1, "{lines:?}");
        // "2026-07-26T12:34:56.789Z  WARN ejected endpoint=…"
        assert_eq!(
            &lines[0][24..],
            r#"  WARN ejected endpoint="10.0.0.11:6443" why="a\nforged\u{1b}[31m""#
        );
    }

    #[test]
    fn json_format_is_one_flat_object_per_line() {
        let captured = Captured::default();
        captured.during(LogFormat::Json, || tracing::info!(n = 3, "ready"));
        let lines = captured.lines();
        let line: serde_json::Value = serde_json::from_str(&lines[0]).expect("JSON");
        assert_eq!((&line["message"], &line["n"]), (&"ready".into(), &3.into()), "{line}");
        let time = line["timestamp"].as_str().expect("a time");
        assert!(time.len() == 24 && time.ends_with('Z'), "{time}");
    }

    #[test]
    fn set_changes_level_and_format() {
        let captured = Captured::default();
        let (lines, guard) = Lines::start(captured.clone()).expect("a thread");
        let mut log =
            Log { level: Level::Info, format: LogFormat::Text, access: AccessLog::Errors };
        let (subscriber, filter, format) = subscriber(&log, lines.clone());
        let control = LogControl { filter, format, lines };
        tracing::subscriber::with_default(subscriber, || {
            tracing::debug!("one");
            tracing::info!("two");
            log.level = Level::Debug;
            log.format = LogFormat::Json;
            control.set(&log).expect("it runs");
            tracing::debug!("three");
            log.level = Level::Error;
            control.set(&log).expect("it runs");
            tracing::warn!("four");
        });
        drop(guard);
        let lines = captured.lines();
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(lines[0].ends_with(" INFO two"), "{lines:?}");
        assert!(lines[1].contains(r#""message":"three""#), "{lines:?}");
    }

    /// A sink whose writes block until the sender is dropped.
    struct Stuck(mpsc::Receiver<()>, Captured);

    impl Write for Stuck {
        fn write(&mut self, line: &[u8]) -> io::Result<usize> {
            let _ = self.0.recv();
            self.1.0.lock().expect("no panic").extend_from_slice(line);
            Ok(line.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn write_with_stuck_reader_drops_lines_and_reports_their_number() {
        let (unstick, stuck) = mpsc::channel();
        let captured = Captured::default();
        let (mut lines, guard) = Lines::start(Stuck(stuck, captured.clone())).expect("a thread");
        for _ in 0..QUEUE_LINES + 1000 {
            lines.write_all(b"line\n").expect("never fails");
        }
        drop(unstick);
        drop(guard);
        let got = captured.lines();
        let lost = got.iter().find(|line| line.starts_with("log: ")).expect("a report");
        let lost: usize = lost.split(' ').nth(1).and_then(|n| n.parse().ok()).expect("a number");
        let written = got.iter().filter(|line| *line == "line").count();
        assert!(lost >= 999, "{lost}");
        assert_eq!(written + lost, QUEUE_LINES + 1000);
    }

    #[test]
    fn guard_drop_waits_for_queued_lines() {
        let captured = Captured::default();
        let (mut lines, guard) = Lines::start(captured.clone()).expect("a thread");
        for _ in 0..100 {
            lines.write_all(b"line\n").expect("never fails");
        }
        drop(guard);
        assert_eq!(captured.lines().len(), 100);
    }
}
