//! Holds a response until the first part of its body, the prefix, has arrived. Before jackstay forwards
//! the first byte, it can send the request again, so that the client does not notice a lost connection. A write is not
//! sent again, but its client gets an error that explains the loss instead of a broken body.
//!
//! An apiserver writes most responses at once, in a few frames. Such a response fits into the prefix, so
//! the loss of the connection between two of its frames does not truncate it. Longer responses, and slow
//! responses on a working connection, are forwarded frame by frame after the prefix: [`HeadHold`] says when.

use std::future::poll_fn;
use std::task::Poll;
use std::time::Instant;

use bytes::{Bytes, BytesMut};
use h2::RecvStream;
use jackstay_core::request::head_hold::{Evidence, HeadHold};
use jackstay_sys::clock;
use tokio::time::timeout_at;

use crate::upstream::connection::{Connection, ConnectionState};

/// Returns the prefix of a response whose head has arrived at this time: at least `size` bytes, or what has arrived when the
/// body or the hold of the head ends. Returns `None` if that is nothing.
///
/// # Errors
/// The stream was reset, or its connection was lost.
pub async fn body_prefix(
    size: usize,
    arrived: Instant,
    recv: &mut RecvStream,
    connection: &Connection,
) -> Result<Option<Bytes>, h2::Error> {
    if recv.is_end_stream() {
        return Ok(None);
    }
    // Most bodies arrive with their head, and need no timer.
    let first = match poll_fn(|cx| Poll::Ready(recv.poll_data(cx))).await {
        Poll::Ready(Some(data)) => data?,
        Poll::Ready(None) => return Ok(None),
        Poll::Pending => Bytes::new(),
    };
    if first.len() >= size || recv.is_end_stream() {
        return Ok(Some(first));
    }
    // Boxed, so that the futures of other responses do not grow by its size.
    let prefix = Box::pin(read_prefix(first, size, arrived, (recv, connection))).await?;
    Ok(Some(prefix).filter(|prefix| !prefix.is_empty()))
}

/// Reads the frames that follow `first`, which is empty if none has arrived.
async fn read_prefix(
    first: Bytes,
    size: usize,
    arrived: Instant,
    (recv, connection): (&mut RecvStream, &Connection),
) -> Result<Bytes, h2::Error> {
    let mut hold = HeadHold::new(arrived);
    let mut is_over = !first.is_empty() && hold.received(clock::now());
    let mut prefix = BytesMut::from(first);
    while !is_over && prefix.len() < size && !recv.is_end_stream() {
        is_over = match timeout_at(hold.due().into(), recv.data()).await {
            Ok(Some(data)) => {
                prefix.extend_from_slice(&data?);
                hold.received(clock::now())
            }
            Ok(None) => true,
            Err(_) => hold.check(evidence(connection), clock::now()),
        };
    }
    Ok(prefix.freeze())
}

fn evidence(connection: &Connection) -> Evidence {
    Evidence {
        is_suspect: connection.state() == ConnectionState::Suspect || !connection.responds(),
        last_received: connection.last_received(),
    }
}
