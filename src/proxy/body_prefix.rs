//! Waits for the beginning of a response before any of it is forwarded. Until then the request can be
//! sent again, and the loss of its connection does the client no harm.
//!
//! An apiserver writes most responses at once, in a few frames. jackstay waits for all of such a
//! response, so that a connection lost between two of its frames breaks none. A response that is longer,
//! or slow on a connection that works, is forwarded as it comes.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use h2::RecvStream;
use tokio::time::{Instant, timeout, timeout_at};

use super::request_info::RequestKind;
use crate::upstream::connection::{Connection, ConnectionState};

/// Longest prefix, in bytes: discovery, an object or a short list. It is within the stream's window, so
/// it needs no more memory than a client that does not read.
const PREFIX: usize = 64 * 1024;

/// How long the prefix may take after its first frame. Usually a lost connection is suspected sooner;
/// then jackstay waits until it responds or is dead.
const PREFIX_TIMEOUT: Duration = Duration::from_secs(1);

/// How long the head of a log is held back for the first line. The container of a followed log may
/// write nothing for hours, and the client wants the head.
const LOG_TIMEOUT: Duration = Duration::from_secs(1);

/// Whether a request waits for the prefix of its response as for the head, so that a silent connection is
/// suspected as before the head. A log or a watch may be silent.
pub fn waits_for_prefix(kind: RequestKind) -> bool {
    matches!(kind, RequestKind::Read | RequestKind::NonMutating)
}

/// Waits for the prefix of a response whose head has arrived; `None` for a request that may not be sent
/// again, for a watch, and for an empty body.
///
/// # Errors
/// The stream was reset, or its connection was lost.
pub async fn body_prefix(
    kind: RequestKind,
    recv: &mut RecvStream,
    connection: &Connection,
) -> Result<Option<Bytes>, h2::Error> {
    match kind {
        _ if recv.is_end_stream() => Ok(None),
        _ if waits_for_prefix(kind) => {
            let Some(first) = recv.data().await.transpose()? else { return Ok(None) };
            if recv.is_end_stream() || first.len() >= PREFIX {
                return Ok(Some(first));
            }
            // Boxed, so that no other response carries room for it.
            Box::pin(rest(first, recv, connection)).await.map(Some)
        }
        RequestKind::Log => {
            Box::pin(timeout(LOG_TIMEOUT, recv.data())).await.unwrap_or_default().transpose()
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
    let mut end = latest + PREFIX_TIMEOUT;
    while held.len() < PREFIX && !recv.is_end_stream() {
        match timeout_at(end, recv.data()).await {
            Ok(Some(data)) => {
                held.extend_from_slice(&data?);
                latest = Instant::now();
            }
            // A PING is sent while a request waits. If nothing arrived since, not even its
            // acknowledgement, the connection is not judged yet.
            Err(_)
                if connection.state() == ConnectionState::Suspect
                    || connection.last_received() <= latest =>
            {
                end = Instant::now() + PREFIX_TIMEOUT;
            }
            Ok(None) | Err(_) => break,
        }
    }
    Ok(held.freeze())
}
