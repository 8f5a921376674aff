//! Log lines as text or JSON to stderr, without ever blocking the caller.
//!
//! The reader of stderr may stop (a stuck container runtime, a full disk behind journald), and a write to a
//! full pipe blocks. Callers therefore put lines into a bounded queue, which a separate thread writes. When
//! the queue is full, lines are dropped and counted, and the number is logged when the reader continues.
//!
//! tracing-appender would bring three crates and lacks two things. It does not report dropped lines in the
//! log. If its queue is still full when its guard is dropped, it prints to a standard stream, which blocks
//! the end of the process while the reader is stuck.
//!
//! [`LogControl`] changes level and format while the process runs.

mod pid;

use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use jackstay_config::{Level, Log, LogFormat};
use jackstay_sys::utc::Utc;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::FormatTime;
use tracing_subscriber::fmt::{self, MakeWriter};
use tracing_subscriber::layer::{Layer, Layered, SubscriberExt};
use tracing_subscriber::{Registry, reload};

use super::{lock, quantity};

pub use self::pid::PidInLines;

/// Target of access log lines. `log.access` controls them, `log.level` does not.
pub const ACCESS_TARGET: &str = "jackstay::access";

/// Maximum number of queued lines: about 600 KiB at 300 bytes per line.
const MAX_QUEUED_LINES: usize = 2048;

/// How long the drop of a [`LogGuard`] waits until queued lines are written.
const FLUSH_TIMEOUT: Duration = Duration::from_millis(500);

/// Waits up to [`FLUSH_TIMEOUT`] for queued lines when it is dropped.
#[must_use = "without the guard, lines that are still queued when the process ends are lost"]
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
    queue: LineQueue,
}

/// Writes lines in the configured format.
type Format = Box<dyn Layer<Filtered> + Send + Sync>;
/// The registry with the filter by level and target.
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
        self.format.reload(format(log, self.queue.clone())).map_err(io::Error::other)
    }
}

/// Installs the process-wide subscriber as configured, writing to `sink`.
///
/// # Errors
/// A subscriber is already installed, or the writer's thread cannot be started.
pub fn init(log: &Log, sink: impl Write + Send + 'static) -> io::Result<LogGuard> {
    let (queue, mut guard) = LineQueue::start(sink, &pid::OVERLAPS)?;
    let (subscriber, filter, format) = subscriber(log, queue.clone());
    tracing::subscriber::set_global_default(subscriber).map_err(io::Error::other)?;
    guard.control = Some(LogControl { filter, format, queue });
    Ok(guard)
}

/// The configured subscriber, which writes to `writer`, and the handles that change its filter and format.
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
    let (filter, filter_handle) = reload::Layer::new(filter(log));
    let (format, format_handle) = reload::Layer::new(format(log, writer));
    (tracing_subscriber::registry().with(filter).with(format), filter_handle, format_handle)
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
struct LineQueue {
    sender: Sender<Box<[u8]>>,
    shared: Arc<Shared>,
    /// Number of [`PidInLines`] of these lines.
    overlaps: &'static AtomicUsize,
}

#[derive(Debug, Default)]
struct Shared {
    /// Lines dropped since the last report.
    dropped: AtomicU64,
    /// Lines queued and not yet written.
    pending: Mutex<usize>,
    /// Notified when `pending` becomes 0.
    drained: Condvar,
}

impl LineQueue {
    fn start(
        sink: impl Write + Send + 'static,
        overlaps: &'static AtomicUsize,
    ) -> io::Result<(Self, LogGuard)> {
        // A bounded channel would allocate all its places at once; `write` enforces the limit instead.
        let (sender, lines) = channel();
        let shared = Arc::new(Shared::default());
        let writer = Arc::clone(&shared);
        std::thread::Builder::new()
            .name("log".to_owned())
            .stack_size(128 * 1024) // the thread only copies bytes
            .spawn(move || write_lines(&lines, sink, &writer))?;
        let queue = Self { sender, shared: Arc::clone(&shared), overlaps };
        Ok((queue, LogGuard { shared, control: None }))
    }
}

fn write_lines(lines: &Receiver<Box<[u8]>>, mut sink: impl Write, shared: &Shared) {
    for line in lines {
        // An error of stderr cannot be reported anywhere; the next line may succeed.
        let _ = sink.write_all(&line);
        let dropped = shared.dropped.swap(0, Ordering::Relaxed);
        if dropped > 0 {
            let _ = writeln!(
                sink,
                "log: {} lost: the reader of stderr was too slow",
                quantity(dropped, "line")
            );
        }
        let mut pending = lock(&shared.pending);
        *pending = pending.saturating_sub(1);
        if *pending == 0 {
            shared.drained.notify_all();
        }
    }
}

impl Write for LineQueue {
    /// Queues one line, because the formatter writes each line in one call.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let overlaps = self.overlaps.load(Ordering::Relaxed);
        let queued = if overlaps > 0 { pid::with_pid(line) } else { line.into() };
        let mut pending = lock(&self.shared.pending);
        if *pending < MAX_QUEUED_LINES && self.sender.send(queued).is_ok() {
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

impl<'w> MakeWriter<'w> for LineQueue {
    type Writer = Self;

    fn make_writer(&'w self) -> Self {
        self.clone()
    }
}

impl Drop for LogGuard {
    fn drop(&mut self) {
        let pending = lock(&self.shared.pending);
        drop(self.shared.drained.wait_timeout_while(pending, FLUSH_TIMEOUT, |left| *left > 0));
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use jackstay_config::AccessLog;
    use std::sync::mpsc;

    /// The counter of queues without the field `pid`.
    static ALONE: AtomicUsize = AtomicUsize::new(0);

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
            tracing::warn!(endpoint = "10.0.0.11:6443", reason = "a\nforged\u{1b}[31m", "ejected");
            tracing::debug!("below the level");
            tracing::info!(target: "h2", "of a library");
        });
        let lines = captured.lines();
        assert_eq!(lines.len(), 1, "{lines:?}");
        // "2026-07-26T12:34:56.789Z  WARN ejected endpoint=…"
        assert_eq!(
            &lines[0][24..],
            r#"  WARN ejected endpoint="10.0.0.11:6443" reason="a\nforged\u{1b}[31m""#
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
        let (queue, guard) = LineQueue::start(captured.clone(), &ALONE).expect("a thread");
        let mut log =
            Log { level: Level::Info, format: LogFormat::Text, access: AccessLog::Errors };
        let (subscriber, filter, format) = subscriber(&log, queue.clone());
        let control = LogControl { filter, format, queue };
        tracing::subscriber::with_default(subscriber, || {
            tracing::debug!("debug before the change");
            tracing::info!("info before the change");
            log.level = Level::Debug;
            log.format = LogFormat::Json;
            control.set(&log).expect("the subscriber exists");
            tracing::debug!("debug after the change");
            log.level = Level::Error;
            control.set(&log).expect("the subscriber exists");
            tracing::warn!("below the level");
        });
        drop(guard);
        let lines = captured.lines();
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(lines[0].ends_with(" INFO info before the change"), "{lines:?}");
        assert!(lines[1].contains(r#""message":"debug after the change""#), "{lines:?}");
    }

    /// A sink whose writes block until the sender is dropped.
    struct BlockedSink(mpsc::Receiver<()>, Captured);

    impl Write for BlockedSink {
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
    fn write_to_blocked_sink_drops_lines_and_reports_their_number() {
        let (unblock, blocked) = mpsc::channel();
        let captured = Captured::default();
        let sink = BlockedSink(blocked, captured.clone());
        let (mut queue, guard) = LineQueue::start(sink, &ALONE).expect("a thread");
        for _ in 0..MAX_QUEUED_LINES + 1000 {
            queue.write_all(b"line\n").expect("never fails");
        }
        drop(unblock);
        drop(guard);
        let lines = captured.lines();
        let report = lines.iter().find(|line| line.starts_with("log: ")).expect("a report");
        let lost: usize = report.split(' ').nth(1).and_then(|n| n.parse().ok()).expect("a number");
        let written = lines.iter().filter(|line| *line == "line").count();
        assert!(lost >= 999, "{lost}");
        assert_eq!(written + lost, MAX_QUEUED_LINES + 1000);
    }

    #[test]
    fn guard_drop_waits_for_queued_lines() {
        let captured = Captured::default();
        let (mut queue, guard) = LineQueue::start(captured.clone(), &ALONE).expect("a thread");
        for _ in 0..100 {
            queue.write_all(b"line\n").expect("never fails");
        }
        drop(guard);
        assert_eq!(captured.lines().len(), 100);
    }
}
