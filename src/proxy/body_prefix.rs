//! Holds a response until the first part of its body, the prefix, has arrived. Before jackstay forwards
//! the first byte, it can send the request again, so that the client does not notice a lost connection. A write is not
//! sent again, but its client gets an error that explains the loss instead of a broken body.
//!
//! An apiserver writes most responses at once, in a few frames. Such a response fits into the prefix, so
//! the loss of the connection between two of its frames does not truncate it. Longer responses, and slow
//! responses on a working connection, are forwarded frame by frame after the prefix.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use h2::RecvStream;
use jackstay_core::request::info::RequestKind;
use jackstay_sys::clock;
use tokio::time::{timeout, timeout_at};

use crate::upstream::connection::{Connection, ConnectionState};

/// Size at which a prefix is forwarded, in bytes: enough for discovery, an object or a short list. It fits
/// into the receive window of the stream, so it needs no more memory than a client that reads nothing.
const PREFIX_SIZE: usize = 64 * 1024;

/// Time after its first frame at which an incomplete prefix is forwarded. If the connection is suspect then,
/// or has received nothing since the last frame, it may be lost, and the prefix waits for the same time again.
const PREFIX_TIMEOUT: Duration = Duration::from_secs(1);

/// How long the head of a log waits for the first line. The container of a followed log may write
/// nothing for hours, and the client needs the head before that.
const LOG_TIMEOUT: Duration = Duration::from_secs(1);

/// Whether a response is held until its prefix has arrived. Until then the request counts as waiting for
/// the response head, so the connection becomes suspect if nothing arrives. A log or a watch does not
/// count, because it may be silent.
pub fn waits_for_prefix(kind: RequestKind) -> bool {
    matches!(kind, RequestKind::Read | RequestKind::NonMutating | RequestKind::Write)
}

/// Returns the prefix of a response whose head has arrived; for a log, its first frame. Returns `None`
/// for an empty body, for a log without a line within [`LOG_TIMEOUT`], for a write without a frame within
/// [`PREFIX_TIMEOUT`] on a connection that receives, and at once for a watch or a tunnel.
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
        RequestKind::Read | RequestKind::NonMutating => {
            let Some(first) = recv.data().await.transpose()? else { return Ok(None) };
            if recv.is_end_stream() || first.len() >= PREFIX_SIZE {
                return Ok(Some(first));
            }
            // Boxed, so that the futures of other responses do not grow by its size.
            Box::pin(read_prefix(first, recv, connection)).await.map(Some)
        }
        RequestKind::Write => {
            let prefix = Box::pin(read_prefix(Bytes::new(), recv, connection)).await?;
            Ok(Some(prefix).filter(|prefix| !prefix.is_empty()))
        }
        RequestKind::Log => {
            Box::pin(timeout(LOG_TIMEOUT, recv.data())).await.unwrap_or_default().transpose()
        }
        _ => Ok(None),
    }
}

/// Reads the frames that follow `first`, which is empty if none has arrived.
async fn read_prefix(
    first: Bytes,
    recv: &mut RecvStream,
    connection: &Connection,
) -> Result<Bytes, h2::Error> {
    let mut prefix = BytesMut::from(first);
    let mut last_frame = clock::now();
    let mut deadline = last_frame + PREFIX_TIMEOUT;
    while prefix.len() < PREFIX_SIZE && !recv.is_end_stream() {
        match timeout_at(deadline.into(), recv.data()).await {
            Ok(Some(data)) => {
                prefix.extend_from_slice(&data?);
                last_frame = clock::now();
            }
            // The connection sends a PING while a request waits. If nothing has arrived since the last
            // frame, not even the PONG, the connection may be lost.
            Err(_)
                if connection.state() == ConnectionState::Suspect
                    || connection.last_received() <= last_frame =>
            {
                deadline = clock::now() + PREFIX_TIMEOUT;
            }
            Ok(None) | Err(_) => break,
        }
    }
    Ok(prefix.freeze())
}
