//! How much of an answer is waited for before any of it is forwarded: until then it may be asked for
//! elsewhere, and the loss of its connection is no loss to the client.
//!
//! An apiserver writes most answers at once, in a few frames. They are waited for whole, so that a
//! connection that is lost between two of those frames breaks none. What is longer, or slow while its
//! connection is well, is forwarded as it comes.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use h2::RecvStream;
use tokio::time::{Instant, timeout, timeout_at};

use super::request_info::RequestKind;
use crate::upstream::connection::Connection;
use crate::upstream::connection::ConnectionState;

/// What is waited for of an answer in bytes: discovery, an object, a short list. It stays within the
/// stream's window, so nothing is held that a client could not make us hold by not reading.
const BEGINNING: usize = 64 * 1024;

/// How long it may take from its first frame on. A lost connection is suspected sooner where our own
/// timers run on time, and then waited for until it answers or is dead.
const PROMPT: Duration = Duration::from_secs(1);

/// How long the head of a log waits for the first line. One that is followed may be silent for as
/// long as its container is, and its client wants to know that it listens.
const LOG_HEAD: Duration = Duration::from_secs(1);

/// Whether the beginning of such an answer is awaited like its head: then silence on the connection is
/// as suspicious as before the head. A log or a watch may be silent.
pub fn waits_for_prefix(kind: RequestKind) -> bool {
    matches!(kind, RequestKind::Read | RequestKind::SafeCreate)
}

/// Waits for the beginning of an answer whose head is there, where it may be sent again.
///
/// # Errors
/// The stream ended before, by a reset or with its connection.
pub async fn body_prefix(
    kind: RequestKind,
    recv: &mut RecvStream,
    connection: &Connection,
) -> Result<Option<Bytes>, h2::Error> {
    match kind {
        _ if recv.is_end_stream() => Ok(None),
        _ if waits_for_prefix(kind) => {
            let Some(first) = recv.data().await.transpose()? else { return Ok(None) };
            if recv.is_end_stream() || first.len() >= BEGINNING {
                return Ok(Some(first));
            }
            // Boxed, so that no other answer carries room for it.
            Box::pin(rest(first, recv, connection)).await.map(Some)
        }
        RequestKind::Log => {
            Box::pin(timeout(LOG_HEAD, recv.data())).await.unwrap_or_default().transpose()
        }
        _ => Ok(None),
    }
}

async fn rest(
    first: Bytes,
    recv: &mut RecvStream,
    connection: &Connection,
) -> Result<Bytes, h2::Error> {
    let mut held = BytesMut::from(first);
    let mut latest = Instant::now();
    let mut end = latest + PROMPT;
    while held.len() < BEGINNING && !recv.is_end_stream() {
        match timeout_at(end, recv.data()).await {
            Ok(Some(data)) => {
                held.extend_from_slice(&data?);
                latest = Instant::now();
            }
            // While a request waits a PING goes out soon: where nothing has come since, not even its
            // answer, there is only no verdict yet.
            Err(_)
                if connection.state() == ConnectionState::Suspect
                    || connection.last_received() <= latest =>
            {
                end = Instant::now() + PROMPT;
            }
            Ok(None) | Err(_) => break,
        }
    }
    Ok(held.freeze())
}
