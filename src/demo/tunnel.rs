//! What leads into a pod: logs, exec, attach, port-forward. There is no pod; most of it echoes.
//!
//! WebSocket exec and attach speak `v5.channel.k8s.io` and `v4.channel.k8s.io`. SPDY is not
//! spoken: its connections are upgraded and echo bytes, which is what a test of tunnels needs.

use crate::demo::body::Payload;
use crate::demo::cluster::Place;
use crate::demo::failure::Failure;
use crate::demo::handler::{Call, respond};
use crate::demo::websocket::{self, Receiver};
use bytes::Bytes;
use http::header::{CONNECTION, HeaderName, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_PROTOCOL, UPGRADE};
use http::{HeaderValue, Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use serde_json::json;
use std::io;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, SystemTime};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::{Mutex, mpsc};

const STREAM_PROTOCOL: HeaderName = HeaderName::from_static("x-stream-protocol-version");
/// Channels of `v5.channel.k8s.io`.
const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const ERROR: u8 = 3;
const CLOSE: u8 = 255;

/// The log of a pod: three lines, and with `follow` one more every interval.
pub(super) fn log(call: &Call, place: Place<'_>) -> Response<Payload> {
    let name = format!("{}/{}", place.namespace, place.name);
    let line = move |number: u64| format!("line {number} of {name}\n");
    let past = call.query.get("tailLines").parse().unwrap_or(3).min(3);
    let first: String = (3 - past + 1..=3).map(&line).collect();
    if !call.query.flag("follow") {
        return respond(200, "text/plain", Payload::full(first));
    }
    let interval = call.server.log_interval;
    let (sender, receiver) = mpsc::channel(16);
    tokio::spawn(async move {
        let mut next = first;
        for number in 4.. {
            if !next.is_empty() && sender.send(Ok(Bytes::from(next))).await.is_err() {
                return;
            }
            tokio::time::sleep(interval).await;
            next = line(number);
        }
    });
    respond(200, "text/plain", Payload::Stream(receiver))
}

/// Switches to the protocol that the client asks for, if it is one of ours.
pub(super) fn upgrade(
    call: &Call,
    place: Place<'_>,
    subresource: &str,
    body: Incoming,
) -> Result<Response<Payload>, Failure> {
    let protocol = call.header(UPGRADE.as_str()).unwrap_or_default().to_ascii_lowercase();
    let mut response = Response::new(Payload::Full(None));
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("Upgrade"));
    let offered = |name: &HeaderName| -> Vec<String> {
        let values = call.parts.headers.get_all(name);
        let values = values.iter().filter_map(|v| v.to_str().ok());
        values.flat_map(|v| v.split(',')).map(|v| v.trim().to_owned()).collect()
    };
    let choose = |name: &HeaderName, known: &[&'static str]| {
        let offered = offered(name);
        known.iter().copied().find(|k| offered.iter().any(|o| o == k))
    };
    let session = match protocol.as_str() {
        "websocket" => {
            let known = ["v5.channel.k8s.io", "v4.channel.k8s.io", "channel.k8s.io"];
            let version = (subresource != "portforward")
                .then(|| choose(&SEC_WEBSOCKET_PROTOCOL, &known))
                .flatten()
                .ok_or_else(|| Failure::bad_request("no WebSocket protocol in common"))?;
            let key = call.header("sec-websocket-key").unwrap_or_default();
            let accept = HeaderValue::from_str(&websocket::accept(key));
            let headers = response.headers_mut();
            headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
            headers.insert(SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(version));
            headers.insert(SEC_WEBSOCKET_ACCEPT, accept.expect("base64 is a header value"));
            Session::Channels {
                command: match subresource {
                    "exec" => command(&call.query.all("command").collect::<Vec<_>>()),
                    _ => Command::Echo,
                },
                stdin: call.query.flag("stdin"),
                greeting: match subresource {
                    "attach" => format!("attached to {}\n", place.name),
                    _ => String::new(),
                },
            }
        }
        "spdy/3.1" => {
            let known = [
                "v5.channel.k8s.io",
                "v4.channel.k8s.io",
                "v3.channel.k8s.io",
                "v2.channel.k8s.io",
                "portforward.k8s.io",
            ];
            response.headers_mut().insert(UPGRADE, HeaderValue::from_static("SPDY/3.1"));
            if let Some(version) = choose(&STREAM_PROTOCOL, &known) {
                response.headers_mut().insert(STREAM_PROTOCOL, HeaderValue::from_static(version));
            }
            Session::Bytes
        }
        _ => return Err(Failure::bad_request("Upgrade request required")),
    };
    // hyper keeps what it needs for the switch in the extensions of the request.
    let mut request = Request::from_parts(call.parts.clone(), body);
    let upgraded = hyper::upgrade::on(&mut request);
    let server = call.server.clone();
    tokio::spawn(async move {
        let Ok(upgraded) = upgraded.await else { return };
        server.counters.tunnels.fetch_add(1, Relaxed);
        let mut reset = server.reset.subscribe();
        tokio::select! {
            // However it ends, it has ended.
            _ = session.run(TokioIo::new(upgraded)) => {}
            _ = reset.changed() => {}
        }
        server.counters.tunnels.fetch_sub(1, Relaxed);
    });
    Ok(response)
}

enum Session {
    /// Every byte comes back.
    Bytes,
    /// Channels in WebSocket messages.
    Channels { command: Command, stdin: bool, greeting: String },
}

/// What `exec` can do.
#[derive(Debug, PartialEq, Eq)]
enum Command {
    /// Standard input comes back on standard output, until it is closed.
    Echo,
    /// Standard input is read and forgotten.
    Swallow,
    /// Prints and ends.
    Print(String),
    /// Ends after that time.
    Sleep(Duration),
    /// Ends with that code.
    Exit(u8),
}

fn command(words: &[&str]) -> Command {
    match words {
        ["sh" | "bash" | "/bin/sh", "-c", script] => {
            command(&script.split_whitespace().collect::<Vec<_>>())
        }
        ["echo", words @ ..] => Command::Print(format!("{}\n", words.join(" "))),
        ["date"] => Command::Print(format!("{}\n", crate::demo::stamp::rfc3339(SystemTime::now()))),
        ["exit", code] => Command::Exit(code.parse().unwrap_or(1)),
        ["sleep", seconds] => Command::Sleep(Duration::from_secs(seconds.parse().unwrap_or(1))),
        ["true"] => Command::Exit(0),
        ["false"] | ["test", ..] => Command::Exit(1),
        ["tar", ..] => Command::Swallow,
        _ => Command::Echo,
    }
}

impl Session {
    async fn run<T: AsyncRead + AsyncWrite>(self, io: T) -> io::Result<()> {
        let (mut reader, mut writer) = tokio::io::split(io);
        match self {
            Self::Bytes => {
                let mut buffer = vec![0; 16 << 10];
                loop {
                    let size = reader.read(&mut buffer).await?;
                    if size == 0 {
                        return writer.shutdown().await;
                    }
                    writer.write_all(&buffer[..size]).await?;
                    writer.flush().await?;
                }
            }
            Self::Channels { command, stdin, greeting } => {
                let writer = Mutex::new(writer);
                let mut receiver = Receiver::new(reader);
                if !greeting.is_empty() {
                    let mut writer = writer.lock().await;
                    websocket::send_channel(&mut *writer, STDERR, greeting.as_bytes()).await?;
                }
                let code = perform(&command, stdin, &mut receiver, &writer).await?;
                let mut writer = writer.lock().await;
                let status = exit_status(code).to_string();
                websocket::send_channel(&mut *writer, ERROR, status.as_bytes()).await?;
                websocket::send_close(&mut *writer).await?;
                drop(writer);
                // The client closes first, or never mind.
                let rest = async { while receiver.skip().await {} };
                let _ = tokio::time::timeout(Duration::from_secs(1), rest).await;
                Ok(())
            }
        }
    }
}

async fn perform<R: AsyncRead + Unpin, W: AsyncWrite + Unpin>(
    command: &Command,
    stdin: bool,
    receiver: &mut Receiver<R>,
    writer: &Mutex<W>,
) -> io::Result<u8> {
    match command {
        Command::Print(text) => {
            let mut writer = writer.lock().await;
            websocket::send_channel(&mut *writer, STDOUT, text.as_bytes()).await?;
            Ok(0)
        }
        Command::Sleep(time) => {
            tokio::time::sleep(*time).await;
            Ok(0)
        }
        Command::Exit(code) => Ok(*code),
        Command::Echo | Command::Swallow => {
            while let Some(message) = receiver.next(writer).await? {
                match message.split_first() {
                    Some((&STDIN, bytes)) if *command == Command::Echo && !bytes.is_empty() => {
                        let mut writer = writer.lock().await;
                        websocket::send_channel(&mut *writer, STDOUT, bytes).await?;
                    }
                    Some((&CLOSE, [STDIN])) => return Ok(0),
                    // The size of a terminal, and the empty message that opens a channel.
                    _ => {}
                }
                if !stdin {
                    return Ok(0);
                }
            }
            Ok(0)
        }
    }
}

fn exit_status(code: u8) -> serde_json::Value {
    if code == 0 {
        return json!({ "metadata": {}, "status": "Success" });
    }
    json!({
        "metadata": {}, "status": "Failure", "reason": "NonZeroExitCode",
        "message": format!("command terminated with non-zero exit code: exit code {code}"),
        "details": { "causes": [{ "reason": "ExitCode", "message": code.to_string() }] },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands() {
        for (words, expected) in [
            (&["cat"][..], Command::Echo),
            (&["sh"], Command::Echo),
            (&["echo", "a", "b"], Command::Print("a b\n".into())),
            (&["sh", "-c", "exit 3"], Command::Exit(3)),
            (&["test", "-d", "/x"], Command::Exit(1)),
            (&["tar", "-xmf", "-"], Command::Swallow),
        ] {
            assert_eq!(command(words), expected, "{words:?}");
        }
    }
}
