//! `jackstay probe`: one question to a running jackstay, and its answer as an exit code.
//!
//! For probes of kubelet that run inside the container (`exec`). Over the Unix socket of
//! `admin.socket` nothing else on the host can keep the answer away, as it can by filling a port of
//! the host's network.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, ValueEnum};
use socket2::{Domain, SockAddr, Socket, Type};

use super::ADMIN;
use crate::config::parse_duration;

/// Largest answer that is read.
const MAX_ANSWER: u64 = 1 << 20;

/// Arguments of `jackstay probe`.
#[derive(Debug, Args)]
pub struct ProbeArgs {
    /// What to ask for.
    #[arg(value_name = "CHECK")]
    check: Check,
    /// Its Unix socket: `admin.socket` in the configuration.
    #[arg(long, value_name = "PATH", conflicts_with = "admin")]
    socket: Option<PathBuf>,
    /// Address of its admin endpoint.
    #[arg(long, value_name = "ADDR", default_value = ADMIN)]
    admin: SocketAddr,
    /// How long an answer may take.
    #[arg(long, value_name = "DURATION", default_value = "2s", value_parser = parse_duration)]
    timeout: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Check {
    /// Every worker's event loop runs.
    Livez,
    /// Every listener is bound and an endpoint is usable.
    Readyz,
}

/// Asks; exit code 0 if the answer is yes.
pub fn run(args: &ProbeArgs) -> ExitCode {
    let path = match args.check {
        Check::Livez => "/livez",
        Check::Readyz => "/readyz",
    };
    let (place, answer) = if let Some(socket) = &args.socket {
        let answer = connect_unix(socket, args.timeout).and_then(|s| exchange(s, path));
        (socket.display().to_string(), answer)
    } else {
        let answer = connect(args.admin, args.timeout).and_then(|s| exchange(s, path));
        (args.admin.to_string(), answer)
    };
    match answer {
        Ok((200, body)) => {
            let _ = io::stdout().lock().write_all(body.as_bytes());
            ExitCode::SUCCESS
        }
        Ok((code, body)) => {
            eprintln!("{path} on {place} answers {code}: {}", body.trim_end());
            ExitCode::FAILURE
        }
        Err(error) => {
            let why = match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                    format!("no answer within {} ms", args.timeout.as_millis())
                }
                _ => error.to_string(),
            };
            eprintln!("{path} cannot be asked for on {place}: {why}; does jackstay run there?");
            ExitCode::FAILURE
        }
    }
}

fn connect(admin: SocketAddr, timeout: Duration) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&admin, timeout)?;
    stream.set_read_timeout(Some(timeout))?;
    stream.set_write_timeout(Some(timeout))?;
    Ok(stream)
}

/// Connects without waiting for room in the queue of the socket: connect(2) has no bound there.
fn connect_unix(path: &Path, timeout: Duration) -> io::Result<UnixStream> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    socket.connect(&SockAddr::unix(path)?)?;
    socket.set_nonblocking(false)?;
    let stream: UnixStream = OwnedFd::from(socket).into();
    stream.set_read_timeout(Some(timeout))?;
    stream.set_write_timeout(Some(timeout))?;
    Ok(stream)
}

/// Status code and body of one request.
fn exchange(mut stream: impl Read + Write, path: &str) -> io::Result<(u16, String)> {
    stream.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes())?;
    let mut answer = Vec::new();
    stream.take(MAX_ANSWER).read_to_end(&mut answer)?;
    let answer = String::from_utf8_lossy(&answer);
    let odd = || io::Error::new(io::ErrorKind::InvalidData, "the answer is not HTTP");
    let (head, body) = answer.split_once("\r\n\r\n").ok_or_else(odd)?;
    let code = head.split(' ').nth(1).and_then(|code| code.parse().ok()).ok_or_else(odd)?;
    Ok((code, body.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::sockets::unix_listener;

    /// A peer on a Unix socket that answers one connection with these bytes.
    fn answering(path: &Path, answer: &'static str) {
        let listener = unix_listener::listen(path).unwrap();
        listener.set_nonblocking(false).unwrap();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                stream.read_exact(&mut byte).unwrap();
                head.push(byte[0]);
            }
            stream.write_all(answer.as_bytes()).unwrap();
        });
    }

    #[test]
    fn exit_code_is_what_the_socket_answers() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("admin.sock");
        let ask = || {
            let timeout = Duration::from_secs(10);
            connect_unix(&path, timeout).and_then(|stream| exchange(stream, "/livez"))
        };
        assert_eq!(ask().unwrap_err().kind(), io::ErrorKind::NotFound);
        answering(&path, "HTTP/1.0 200 OK\r\n\r\nok\n");
        assert_eq!(ask().unwrap(), (200, "ok\n".to_owned()));
        answering(&path, "HTTP/1.0 503 Service Unavailable\r\n\r\nnot alive: worker 0\n");
        assert_eq!(ask().unwrap().0, 503);
        answering(&path, "what?");
        assert_eq!(ask().unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn a_socket_that_takes_no_connection_is_no_hang() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("admin.sock");
        let _listener = unix_listener::listen(&path).unwrap();
        let silent = connect_unix(&path, Duration::from_millis(50)).unwrap();
        let error = exchange(silent, "/livez").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    }
}
