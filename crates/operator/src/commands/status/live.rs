//! `jackstay status --watch` on a terminal: draws in place on the alternate screen until a signal.
//!
//! Each frame is one write, so it does not flicker. The scrollback of the shell is unchanged.

use std::io::{self, Write};
use std::time::Duration;

use jackstay_config::format_duration;
use jackstay_sys::utc::Utc;
use tokio::signal::unix::{SignalKind, signal};

use super::table::{self, Style};
use super::view;
use crate::admin_client::{STATUS_TIMEOUT, TcpAddress, explain_no_status, get_status};

/// Columns and rows of a terminal whose size is unknown.
const DEFAULT_SIZE: (usize, usize) = (80, 24);

/// Draws a frame at each interval and after each change of the window's size, until SIGINT or
/// SIGTERM.
pub(super) fn run(admin: TcpAddress, interval: Duration) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        let end = async {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
        };
        let _screen = AlternateScreen::enter()?;
        draw_until(end, admin, interval).await
    })
}

/// Draws until `end` completes, which also cancels a pending request.
async fn draw_until(
    end: impl Future<Output = ()>,
    admin: TcpAddress,
    interval: Duration,
) -> io::Result<()> {
    tokio::select! {
        result = draw_frames(admin, interval) => result,
        () = end => Ok(()),
    }
}

async fn draw_frames(admin: TcpAddress, interval: Duration) -> io::Result<()> {
    let mut resized = signal(SignalKind::window_change())?;
    let mut ticks = tokio::time::interval(interval);
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            _ = resized.recv() => {}
        }
        let text = match get_status(admin, STATUS_TIMEOUT).await {
            Ok(status) => view::text(&status, Style::of_stdout()),
            Err(error) => format!("{}\n", explain_no_status(admin, &error)),
        };
        let footer = format!("{}  every {}, Ctrl-C ends", Utc::now(), format_duration(interval));
        let mut out = io::stdout().lock();
        let size = table::terminal_size().unwrap_or(DEFAULT_SIZE);
        out.write_all(frame(&text, &footer, size).as_bytes())?;
        out.flush()?;
    }
}

/// The alternate screen of a terminal, with the cursor hidden. Dropping it restores both.
struct AlternateScreen;

impl AlternateScreen {
    fn enter() -> io::Result<Self> {
        let mut out = io::stdout().lock();
        out.write_all(b"\x1b[?1049h\x1b[?25l")?;
        out.flush()?;
        Ok(Self)
    }
}

impl Drop for AlternateScreen {
    fn drop(&mut self) {
        let mut out = io::stdout().lock();
        let _ = out.write_all(b"\x1b[?25h\x1b[?1049l");
        let _ = out.flush();
    }
}

/// A frame that overwrites the previous one: it clears each line to its end, and the screen below the
/// last line. Lines that do not fit are counted in the footer instead of scrolled.
fn frame(text: &str, footer: &str, (width, height): (usize, usize)) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let rows = height.saturating_sub(1).max(1);
    let mut out = String::from("\x1b[H");
    for line in lines.iter().take(rows) {
        out.push_str(&table::cut(line, width));
        out.push_str("\x1b[K\r\n");
    }
    let hidden = lines.len().saturating_sub(rows);
    let footer = match hidden {
        0 => footer.to_owned(),
        _ => format!("{footer}  ({hidden} more lines; a taller window shows them)"),
    };
    out.push_str(&table::cut(&footer, width));
    out.push_str("\x1b[K\x1b[J");
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frame_fits_the_terminal_and_clears_the_previous_one() {
        let text = "first line\nsecond\nthird\n";
        let drawn = frame(text, "foot", (6, 3));
        assert_eq!(drawn, "\x1b[Hfirst…\x1b[K\r\nsecond\x1b[K\r\nfoot …\x1b[K\x1b[J");
        assert!(!frame(text, "foot", (80, 24)).contains("more"));
        frame(text, "foot", (0, 0));
    }

    #[tokio::test]
    async fn draw_until_end_cancels_a_pending_request() {
        let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let admin = silent.local_addr().unwrap();
        let mut connection = None;
        let end = async { connection = silent.accept().await.ok() };
        let drawing = draw_until(end, admin.into(), Duration::from_secs(1));
        let result = tokio::time::timeout(STATUS_TIMEOUT / 2, drawing).await;
        result.expect("ends before the request times out").unwrap();
        assert!(connection.is_some());
    }
}
