//! Streams that make a proxy hold bytes.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use rustls::ClientConfig;
use tokio::io::{AsyncWriteExt, split};

use super::repeat;
use crate::hostile::raw::{Tls, connect_h2, drain, get, tls_config};
use crate::hostile::rig::{Target, VALID_TOKEN};
use crate::support::http2::{DATA, INITIAL_WINDOW_SIZE, WINDOW_UPDATE, frame, headers};
use crate::support::pause;

/// The path of a list of 1 MB.
pub const LARGE: &str = "/api/v1/namespaces/kube-system/configmaps";
/// The flow-control window of a stream before SETTINGS or `WINDOW_UPDATE`.
const DEFAULT_WINDOW: usize = 65_535;

/// The id of the n-th stream of a client.
fn id(n: usize) -> u32 {
    u32::try_from(2 * n + 1).unwrap()
}

/// Writes frames, and reads and discards what arrives until the connection closes.
async fn send(tls: Tls, frames: impl Iterator<Item = Vec<u8>>) -> io::Result<()> {
    let (reader, mut writer) = split(tls);
    let reading = tokio::spawn(drain(reader));
    for frame in frames {
        writer.write_all(&frame).await?;
    }
    writer.flush().await?;
    let _ = reading.await;
    Ok(())
}

/// Requests whose responses may not be sent.
pub async fn zero_window(target: &Target, connections: usize, streams: usize, path: &'static str) {
    let (server, config) = (target.server, tls_config("h2", None));
    let token = format!("Bearer {VALID_TOKEN}");
    repeat(connections, |_| {
        let (config, token) = (Arc::clone(&config), token.clone());
        async move {
            let tls = connect_h2(server, &config, &[(INITIAL_WINDOW_SIZE, 0)]).await?;
            let fields = [("authorization", token.as_str())];
            send(tls, (0..streams).map(|n| get(id(n), path, &fields))).await
        }
    })
    .await;
}

/// Large responses, with a window that opens by 1 KiB a second.
pub async fn slow_readers(target: &Target, connections: usize, streams: usize) {
    let (server, config) = (target.server, tls_config("h2", None));
    repeat(connections, |_| slow_reader(server, Arc::clone(&config), streams)).await;
}

async fn slow_reader(
    server: SocketAddr,
    config: Arc<ClientConfig>,
    streams: usize,
) -> io::Result<()> {
    let token = format!("Bearer {VALID_TOKEN}");
    let tls = connect_h2(server, &config, &[(INITIAL_WINDOW_SIZE, 1024)]).await?;
    let (reader, mut writer) = split(tls);
    tokio::spawn(drain(reader));
    for n in 0..streams {
        writer.write_all(&get(id(n), LARGE, &[("authorization", &token)])).await?;
    }
    loop {
        writer.flush().await?;
        pause(Duration::from_secs(1)).await;
        let more = 1024_u32.to_be_bytes();
        for n in 0..streams {
            writer.write_all(&frame(WINDOW_UPDATE, 0, id(n), &more)).await?;
            writer.write_all(&frame(WINDOW_UPDATE, 0, 0, &more)).await?;
        }
    }
}

/// Requests with many headers that wait for a response.
pub async fn large_headers(target: &Target, connections: usize, streams: usize) {
    let (server, config) = (target.server, tls_config("h2", None));
    let value = "x".repeat(3_000);
    repeat(connections, |_| {
        let (config, value) = (Arc::clone(&config), value.clone());
        async move {
            let names: Vec<String> = (0..19).map(|n| format!("x-filler-{n}")).collect();
            let fields: Vec<_> = names.iter().map(|name| (name.as_str(), value.as_str())).collect();
            let tls = connect_h2(server, &config, &[(INITIAL_WINDOW_SIZE, 0)]).await?;
            send(tls, (0..streams).map(|n| get(id(n), "/version", &fields))).await
        }
    })
    .await;
}

/// Request bodies that fill the window of their stream and do not end.
pub async fn endless_bodies(target: &Target, connections: usize, streams: usize) {
    let (server, config) = (target.server, tls_config("h2", None));
    let token = format!("Bearer {VALID_TOKEN}");
    repeat(connections, |_| {
        let (config, token) = (Arc::clone(&config), token.clone());
        async move {
            let tls = connect_h2(server, &config, &[]).await?;
            let head = |n| {
                headers(
                    id(n),
                    false,
                    &[
                        (":method", "POST"),
                        (":scheme", "https"),
                        (":authority", "api"),
                        (":path", "/api/v1/namespaces/default/configmaps"),
                        ("content-type", "application/json"),
                        ("authorization", &token),
                    ],
                )
            };
            // As many bytes as the default window of the connection allows; then as many as a server grants
            // is sent without waiting for it.
            let body = |n| {
                let piece = frame(DATA, 0, id(n), &[b' '; 16_000]);
                std::iter::repeat_n(piece, DEFAULT_WINDOW / 16_000)
            };
            send(tls, (0..streams).flat_map(|n| std::iter::once(head(n)).chain(body(n)))).await
        }
    })
    .await;
}
