//! `jackstay status`: asks a running jackstay what it knows, once or again and again.
//!
//! On a terminal `--watch` draws in place, on the alternate screen, each picture in one write, so
//! that nothing flickers and the shell's history stays. Elsewhere it prints one picture after the
//! other. A jackstay that goes away and comes back is followed through.
//!
//! The exit code says whether requests can be served: 1 also where an upstream has no usable
//! endpoint. `--wait` asks until they can.

mod grid;
mod usable;
mod view;

use std::io::{self, IsTerminal, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use serde_json::Value;

use super::{ADMIN, colour_is_wanted};
use crate::config::{format_duration, parse_duration};
use crate::observe::utc::Utc;

/// A local answer that takes longer is none.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Largest answer that is read: 256 endpoints with all their connections have less.
const MAX_ANSWER: u64 = 16 << 20;

/// Shortest pause between two pictures, and the pause of `--wait`.
const SHORTEST: Duration = Duration::from_millis(100);

/// Arguments of `jackstay status`.
#[derive(Debug, Args)]
pub struct StatusArgs {
    /// Address of its admin endpoint.
    #[arg(long, value_name = "ADDR", default_value = ADMIN)]
    admin: SocketAddr,
    /// Ask again and again; the default pause is 1s.
    #[arg(long, short, value_name = "EVERY", num_args = 0..=1, default_missing_value = "1s",
          value_parser = every, require_equals = true, conflicts_with = "wait")]
    watch: Option<Duration>,
    /// Wait until it runs and an apiserver of every upstream can be used, then print its status.
    #[arg(long)]
    wait: bool,
    /// How long to wait before giving up with exit code 1.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = parse_duration,
          requires = "wait")]
    timeout: Duration,
    /// How to print it.
    #[arg(long, short, value_name = "FORMAT", default_value = "table")]
    output: Output,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Output {
    /// For people.
    Table,
    /// For machines: what `/status` answers; one line each with --watch.
    Json,
}

fn every(text: &str) -> Result<Duration, String> {
    let pause = parse_duration(text)?;
    if pause < SHORTEST { Err("at least 100ms".to_owned()) } else { Ok(pause) }
}

/// Asks the admin endpoint and prints what it says.
pub fn run(args: &StatusArgs) -> ExitCode {
    let result = match args.watch {
        None if args.wait => return wait(args),
        None => fetch(args.admin, "/status").map(|status| {
            print(args, &status);
            usable::complaint(&status)
        }),
        Some(pause) if args.output == Output::Table && io::stdout().is_terminal() => {
            live(args, pause).map(|()| None)
        }
        Some(pause) => follow(args, pause).map(|()| None),
    };
    match result {
        Ok(None) => ExitCode::SUCCESS,
        Ok(Some(complaint)) => {
            eprintln!("requests cannot be served: {complaint}");
            ExitCode::FAILURE
        }
        // Whoever read our output has seen enough (`| head`).
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{}", explain(args.admin, &error));
            ExitCode::FAILURE
        }
    }
}

/// Asks until requests can be served, and prints the last answer.
fn wait(args: &StatusArgs) -> ExitCode {
    let until = Instant::now() + args.timeout;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        // The last request may start just before the deadline, so it gets a short timeout of its own.
        let answer = fetch_within(args.admin, "/status", left.clamp(SHORTEST, TIMEOUT));
        let complaint = match &answer {
            Ok(status) => usable::complaint_of_newcomer(status),
            Err(error) => Some(explain(args.admin, error)),
        };
        let over = Instant::now() >= until;
        if let Ok(status) = &answer
            && (over || complaint.is_none())
        {
            print(args, status);
        }
        match complaint {
            None => return ExitCode::SUCCESS,
            Some(complaint) if over => {
                let limit = format_duration(args.timeout);
                eprintln!("requests cannot be served after {limit}: {complaint}");
                return ExitCode::FAILURE;
            }
            Some(_) => {
                let left = until.saturating_duration_since(Instant::now());
                std::thread::sleep(left.min(SHORTEST));
            }
        }
    }
}

fn print(args: &StatusArgs, status: &Value) {
    let text = match args.output {
        Output::Json => format!("{status:#}\n"),
        Output::Table => view::text(status, style()),
    };
    let _ = io::stdout().lock().write_all(text.as_bytes());
}

/// Colours and width for whatever stdout is.
fn style() -> grid::Style {
    let terminal = io::stdout().is_terminal();
    grid::Style { colour: terminal && colour_is_wanted(), width: size().map(|(width, _)| width) }
}

/// Columns and rows of the terminal that stdout is.
fn size() -> Option<(usize, usize)> {
    let (width, height) = terminal_size::terminal_size_of(io::stdout())?;
    Some((usize::from(width.0), usize::from(height.0)))
}

/// One picture after the other, for pipes and files.
fn follow(args: &StatusArgs, pause: Duration) -> io::Result<()> {
    loop {
        let text = match (fetch(args.admin, "/status"), args.output) {
            (Ok(status), Output::Json) => format!("{status}\n"),
            (Ok(status), Output::Table) => format!("{}\n", view::text(&status, style())),
            (Err(error), _) => {
                eprintln!("{} {}", Utc::now(), explain(args.admin, &error));
                String::new()
            }
        };
        let mut out = io::stdout().lock();
        out.write_all(text.as_bytes())?;
        out.flush()?;
        drop(out);
        std::thread::sleep(pause);
    }
}

/// Pictures in place until a signal comes.
fn live(args: &StatusArgs, pause: Duration) -> io::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        let mut resized = signal(SignalKind::window_change())?;
        let _screen = Screen::enter()?;
        let mut ticks = tokio::time::interval(pause);
        loop {
            tokio::select! {
                _ = ticks.tick() => {}
                _ = resized.recv() => {}
                _ = interrupt.recv() => return Ok(()),
                _ = terminate.recv() => return Ok(()),
            }
            let text = match fetch(args.admin, "/status") {
                Ok(status) => view::text(&status, style()),
                Err(error) => format!("{}\n", explain(args.admin, &error)),
            };
            let foot = format!("{}  every {} s, ^C ends", Utc::now(), pause.as_secs_f64());
            let mut out = io::stdout().lock();
            out.write_all(picture(&text, &foot, size()).as_bytes())?;
            out.flush()?;
        }
    })
}

/// The alternate screen of a terminal; the old one is back when this is dropped.
struct Screen;

impl Screen {
    fn enter() -> io::Result<Self> {
        let mut out = io::stdout().lock();
        out.write_all(b"\x1b[?1049h\x1b[?25l")?;
        out.flush()?;
        Ok(Self)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let mut out = io::stdout().lock();
        let _ = out.write_all(b"\x1b[?25h\x1b[?1049l");
        let _ = out.flush();
    }
}

/// One picture for a terminal: over the old one, each line cleared to its end, none that scrolls.
fn picture(text: &str, foot: &str, size: Option<(usize, usize)>) -> String {
    let (width, height) = size.unwrap_or((80, 24));
    let lines: Vec<&str> = text.lines().collect();
    let room = height.saturating_sub(1).max(1);
    let mut out = String::from("\x1b[H");
    for line in lines.iter().take(room) {
        out.push_str(&grid::cut(line, width));
        out.push_str("\x1b[K\r\n");
    }
    let hidden = lines.len().saturating_sub(room);
    let foot = match hidden {
        0 => foot.to_owned(),
        _ => format!("{foot}  ({hidden} more below; a higher window shows them)"),
    };
    out.push_str(&grid::cut(&foot, width));
    out.push_str("\x1b[K\x1b[J");
    out
}

/// What went wrong and what to do, in one line.
fn explain(admin: SocketAddr, error: &io::Error) -> String {
    let what = match error.kind() {
        io::ErrorKind::ConnectionRefused => format!(
            "nothing listens on {admin}: jackstay does not run there, or its admin.bind is another \
             address (--admin ADDR; `ss -ltnp` shows who listens where)"
        ),
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => format!(
            "{admin} does not answer in time: it is stopped or overloaded, or a firewall drops \
             packets"
        ),
        io::ErrorKind::InvalidData => {
            format!("{admin} answers, but not as jackstay's admin endpoint does: {error}")
        }
        _ => format!("cannot ask {admin}: {error}"),
    };
    format!("no status: {what}")
}

/// Asks the admin endpoint for a JSON page.
///
/// # Errors
/// As the connection goes; `InvalidData` when something else than jackstay answers.
pub fn fetch(admin: SocketAddr, path: &str) -> io::Result<Value> {
    fetch_within(admin, path, TIMEOUT)
}

/// The same, where each step may take `limit`.
fn fetch_within(admin: SocketAddr, path: &str, limit: Duration) -> io::Result<Value> {
    let odd = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
    let mut stream = TcpStream::connect_timeout(&admin, limit)?;
    stream.set_read_timeout(Some(limit))?;
    stream.set_write_timeout(Some(limit))?;
    let request = format!("GET {path} HTTP/1.0\r\nHost: {admin}\r\n\r\n");
    let mut answer = Vec::new();
    stream
        .write_all(request.as_bytes())
        .and_then(|()| stream.take(MAX_ANSWER).read_to_end(&mut answer))
        .map_err(|error| match error.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => odd(error.to_string()),
            _ => error,
        })?;
    let end = answer
        .windows(4)
        .position(|window| window == b"\r\n\r\n")
        .ok_or_else(|| odd("no HTTP".to_owned()))?;
    let head = String::from_utf8_lossy(&answer[..end]);
    let code = head.split(' ').nth(1).unwrap_or("");
    if code != "200" {
        let line = head.lines().next().unwrap_or("");
        return Err(odd(format!("{path} is answered with `{line}`")));
    }
    serde_json::from_slice(&answer[end + 4..]).map_err(|error| odd(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    /// A peer that answers one connection with these bytes.
    fn peer(answer: &'static str) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let addr = listener.local_addr().expect("an address");
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a client");
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                stream.read_exact(&mut byte).expect("a request");
                head.push(byte[0]);
            }
            let _ = stream.write_all(answer.as_bytes());
        });
        addr
    }

    #[test]
    fn an_answer_is_read_and_anything_else_is_explained() {
        let ok = peer("HTTP/1.0 200 OK\r\n\r\n{\"version\": \"1\"}");
        assert_eq!(fetch(ok, "/status").expect("an answer")["version"], "1");

        for (answer, part) in [
            ("HTTP/1.1 404 Not Found\r\n\r\nno", "`HTTP/1.1 404 Not Found`"),
            ("HTTP/1.1 200 OK\r\n\r\n<html>", "not as jackstay's admin endpoint does"),
            ("SSH-2.0-OpenSSH_9.2\r\n", "no HTTP"),
        ] {
            let addr = peer(answer);
            let text = explain(addr, &fetch(addr, "/status").expect_err("not ours"));
            assert!(text.contains(part), "{text}");
            assert!(text.contains(&addr.to_string()) && !text.contains('\n'), "{text}");
        }
    }

    #[test]
    fn nothing_listens() {
        // Bound, so that nobody else is given it, and not listening.
        let held = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None);
        let held = held.expect("a socket");
        held.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).expect("a port");
        let at = held.local_addr().expect("an address").as_socket().expect("of IPv4");
        let text = explain(at, &fetch(at, "/status").expect_err("nobody is there"));
        assert!(text.starts_with(&format!("no status: nothing listens on {at}: ")), "{text}");
        assert!(text.contains("--admin"), "{text}");
    }

    #[test]
    fn a_picture_never_scrolls_and_leaves_nothing_of_the_old_one() {
        let text = "first line\nsecond\nthird\n";
        let drawn = picture(text, "foot", Some((6, 3)));
        assert_eq!(drawn, "\x1b[Hfirst…\x1b[K\r\nsecond\x1b[K\r\nfoot …\x1b[K\x1b[J");
        assert!(!picture(text, "foot", Some((80, 24))).contains("more"));
        picture(text, "foot", Some((0, 0)));
    }

    #[test]
    fn pauses_have_a_unit() {
        assert_eq!(every("250ms"), Ok(Duration::from_millis(250)));
        assert!(every("10ms").is_err() && every("2").is_err());
    }
}
