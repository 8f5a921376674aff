//! Serves the pod subresources log, exec, attach and port-forward. No container runs: `exec` imitates a few
//! commands and echoes its input for all others.
//!
//! exec and attach over WebSocket use the protocols `channel.k8s.io` up to `v5`. After an upgrade to SPDY
//! the server echoes bytes, which suffices to test tunnels.

use crate::body::ResponseBody;
use crate::handler::{RequestContext, respond};
use crate::kinds::ObjectRef;
use crate::status_error::StatusError;
use crate::timestamps;
use bytes::Bytes;
use futures_util::{SinkExt, StreamExt};
use http::header::{CONNECTION, HeaderName, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_PROTOCOL, UPGRADE};
use http::{HeaderValue, Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use serde_json::json;
use std::io;
use std::time::{Duration, SystemTime};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Role, WebSocketConfig};
use tokio_tungstenite::tungstenite::{self, Message};

const STREAM_PROTOCOL: HeaderName = HeaderName::from_static("x-stream-protocol-version");
/// Time between two lines of a followed log.
const LOG_INTERVAL: Duration = Duration::from_secs(1);
/// The largest WebSocket message that is read, in bytes.
const MAX_MESSAGE: usize = 4 << 20;
/// Channels of `v5.channel.k8s.io`.
const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const ERROR: u8 = 3;
const CLOSE: u8 = 255;

/// The log of a pod: three lines, and with `follow` one more line every [`LOG_INTERVAL`].
pub(super) fn log(context: &RequestContext, object: ObjectRef<'_>) -> Response<ResponseBody> {
    let name = format!("{}/{}", object.namespace, object.name);
    let line = move |number: u64| format!("line {number} of {name}\n");
    let count = context.query.get("tailLines").parse().unwrap_or(3).min(3);
    let first: String = (3 - count + 1..=3).map(&line).collect();
    if !context.query.flag("follow") {
        return respond(200, "text/plain", ResponseBody::full(first));
    }
    let (sender, receiver) = mpsc::channel(16);
    tokio::task::spawn_local(async move {
        let mut next = first;
        for number in 4.. {
            if !next.is_empty() && sender.send(Ok(Bytes::from(next))).await.is_err() {
                return;
            }
            tokio::time::sleep(LOG_INTERVAL).await;
            next = line(number);
        }
    });
    respond(200, "text/plain", ResponseBody::Stream(receiver))
}

/// The subprotocols over SPDY, the preferred one first.
const SPDY_PROTOCOLS: [&str; 5] = [
    "v5.channel.k8s.io",
    "v4.channel.k8s.io",
    "v3.channel.k8s.io",
    "v2.channel.k8s.io",
    "portforward.k8s.io",
];

/// Switches to WebSocket or SPDY.
///
/// # Errors
/// 400 if the client offers no supported protocol.
pub(super) fn upgrade(
    context: &RequestContext,
    object: ObjectRef<'_>,
    subresource: &str,
    body: Incoming,
) -> Result<Response<ResponseBody>, StatusError> {
    let protocol = context.header(UPGRADE.as_str()).unwrap_or_default().to_ascii_lowercase();
    let mut response = Response::new(ResponseBody::Full(None));
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("Upgrade"));
    let choose = |name: &HeaderName, known: &[&'static str]| {
        let values = context.parts.headers.get_all(name).iter().filter_map(|v| v.to_str().ok());
        let offered: Vec<&str> = values.flat_map(|v| v.split(',')).map(str::trim).collect();
        known.iter().copied().find(|known| offered.contains(known))
    };
    let session = match protocol.as_str() {
        "websocket" => {
            let known = ["v5.channel.k8s.io", "v4.channel.k8s.io", "channel.k8s.io"];
            let version = (subresource != "portforward")
                .then(|| choose(&SEC_WEBSOCKET_PROTOCOL, &known))
                .flatten()
                .ok_or_else(|| StatusError::bad_request("no WebSocket protocol in common"))?;
            let key = context.header("sec-websocket-key").unwrap_or_default();
            let accept = HeaderValue::from_str(&derive_accept_key(key.as_bytes()));
            let headers = response.headers_mut();
            headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
            headers.insert(SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(version));
            headers.insert(SEC_WEBSOCKET_ACCEPT, accept.expect("base64 is a header value"));
            Session::Channels {
                command: match subresource {
                    "exec" => command(
                        &context.query.all("command").collect::<Vec<_>>(),
                        context.server.cluster.clock().now(),
                    ),
                    _ => Command::Echo,
                },
                stdin: context.query.flag("stdin"),
                greeting: match subresource {
                    "attach" => format!("attached to {}\n", object.name),
                    _ => String::new(),
                },
            }
        }
        "spdy/3.1" => {
            response.headers_mut().insert(UPGRADE, HeaderValue::from_static("SPDY/3.1"));
            if let Some(version) = choose(&STREAM_PROTOCOL, &SPDY_PROTOCOLS) {
                response.headers_mut().insert(STREAM_PROTOCOL, HeaderValue::from_static(version));
            }
            Session::Echo
        }
        _ => return Err(StatusError::bad_request("Upgrade request required")),
    };
    // hyper keeps the upgrade handle in the extensions of the request.
    let mut request = Request::from_parts(context.parts.clone(), body);
    let upgraded = hyper::upgrade::on(&mut request);
    let server = context.server.clone();
    tokio::task::spawn_local(async move {
        let Ok(upgraded) = upgraded.await else { return };
        let mut reset = server.reset.subscribe();
        tokio::select! {
            // The client reports errors.
            _ = session.run(TokioIo::new(upgraded)) => {}
            _ = reset.changed() => {}
        }
    });
    Ok(response)
}

enum Session {
    /// Echoes bytes.
    Echo,
    /// WebSocket messages, each on a channel.
    Channels { command: Command, stdin: bool, greeting: String },
}

/// Commands that `exec` runs.
#[derive(Debug, PartialEq, Eq)]
enum Command {
    /// Copies standard input to standard output.
    Echo,
    /// Reads standard input and discards it.
    Discard,
    /// Prints and exits with 0.
    Print(String),
    /// Exits with 0 after this time.
    Sleep(Duration),
    /// Exits with this code.
    Exit(u8),
}

/// The command that `exec` names. `now` is what `date` prints.
fn command(words: &[&str], now: SystemTime) -> Command {
    match words {
        ["sh" | "bash" | "/bin/sh", "-c", script] => {
            command(&script.split_whitespace().collect::<Vec<_>>(), now)
        }
        ["echo", words @ ..] => Command::Print(format!("{}\n", words.join(" "))),
        ["date"] => Command::Print(format!("{}\n", timestamps::rfc3339(now))),
        ["exit", code] => Command::Exit(code.parse().unwrap_or(1)),
        ["sleep", seconds] => Command::Sleep(Duration::from_secs(seconds.parse().unwrap_or(1))),
        ["true"] => Command::Exit(0),
        ["false"] | ["test", ..] => Command::Exit(1),
        ["tar", ..] => Command::Discard,
        _ => Command::Echo,
    }
}

impl Session {
    async fn run<T: AsyncRead + AsyncWrite + Unpin>(self, io: T) -> io::Result<()> {
        match self {
            Self::Echo => {
                let (mut reader, mut writer) = tokio::io::split(io);
                tokio::io::copy(&mut reader, &mut writer).await?;
                writer.shutdown().await
            }
            Self::Channels { command, stdin, greeting } => {
                let config = WebSocketConfig::default().max_message_size(Some(MAX_MESSAGE));
                let mut socket =
                    WebSocketStream::from_raw_socket(io, Role::Server, Some(config)).await;
                run_command(&mut socket, &command, stdin, &greeting).await.map_err(io::Error::other)
            }
        }
    }
}

async fn run_command<T: AsyncRead + AsyncWrite + Unpin>(
    socket: &mut WebSocketStream<T>,
    command: &Command,
    stdin: bool,
    greeting: &str,
) -> Result<(), tungstenite::Error> {
    if !greeting.is_empty() {
        socket.send(on_channel(STDERR, greeting.as_bytes())).await?;
    }
    let code = match command {
        Command::Print(text) => {
            socket.send(on_channel(STDOUT, text.as_bytes())).await?;
            0
        }
        Command::Sleep(time) => {
            tokio::time::sleep(*time).await;
            0
        }
        Command::Exit(code) => *code,
        Command::Echo | Command::Discard => {
            consume_stdin(socket, *command == Command::Echo, stdin).await?;
            0
        }
    };
    socket.send(on_channel(ERROR, exit_status(code).to_string().as_bytes())).await?;
    socket.close(Some(CloseFrame { code: CloseCode::Normal, reason: "".into() })).await?;
    // The client is to close the TCP connection; the server waits for that at most 1 s.
    let closed = async { while let Some(Ok(_)) = socket.next().await {} };
    let _ = tokio::time::timeout(Duration::from_secs(1), closed).await;
    Ok(())
}

/// Reads standard input until the client closes it, or only the first message without `stdin`. With `echo`
/// it is copied to standard output.
async fn consume_stdin<T: AsyncRead + AsyncWrite + Unpin>(
    socket: &mut WebSocketStream<T>,
    echo: bool,
    stdin: bool,
) -> Result<(), tungstenite::Error> {
    while let Some(message) = socket.next().await {
        match message? {
            Message::Close(_) => return Ok(()),
            Message::Ping(_) | Message::Pong(_) => continue,
            message => match &*message.into_data() {
                [STDIN, bytes @ ..] if echo && !bytes.is_empty() => {
                    socket.send(on_channel(STDOUT, bytes)).await?;
                }
                [CLOSE, STDIN] => return Ok(()),
                // The size of a terminal, or an empty message, which opens a channel.
                _ => {}
            },
        }
        if !stdin {
            return Ok(());
        }
    }
    Ok(())
}

/// A binary message whose first byte is the channel.
fn on_channel(channel: u8, bytes: &[u8]) -> Message {
    Message::binary([&[channel], bytes].concat())
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
    fn command_is_parsed_from_exec_arguments() {
        for (words, expected) in [
            (&["cat"][..], Command::Echo),
            (&["date"], Command::Print("1970-01-01T00:00:00Z\n".into())),
            (&["sh"], Command::Echo),
            (&["echo", "a", "b"], Command::Print("a b\n".into())),
            (&["sh", "-c", "exit 3"], Command::Exit(3)),
            (&["test", "-d", "/x"], Command::Exit(1)),
            (&["tar", "-xmf", "-"], Command::Discard),
        ] {
            assert_eq!(command(words, SystemTime::UNIX_EPOCH), expected, "{words:?}");
        }
    }
}
