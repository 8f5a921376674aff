//! Resets an HTTP/2 stream whose client stopped reading the response.
//!
//! A client that reads from its socket but grants no window to one stream does not trigger
//! [`super::client_stream::StallTimeout`]. hyper then no longer polls the response body, and the body keeps
//! its upstream stream, even while the upstream connection drains.
//!
//! hyper hands each piece of a body to h2, and polls for the next piece when the stream has window. A
//! stream is therefore reset if hyper does not poll within the limit. The other streams of the connection
//! are not affected, and a client that takes one piece within each limit keeps its stream.

use std::cell::Cell;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use http_body::{Body, Frame, SizeHint};
use tokio::time::{Sleep, sleep};

/// Largest piece that a body should return, in bytes. A client that reads one such piece within the default
/// limit of five minutes, 220 bytes a second, keeps its stream.
pub const MAX_PIECE: usize = 64 * 1024;

/// The progress of one response, shared by its body and its stream.
#[derive(Debug, Default)]
pub struct BodyProgress {
    /// Pieces that the body has returned.
    pieces: Cell<u64>,
    /// Whether the last piece waits for window, because hyper has not polled since.
    waiting: Cell<bool>,
}

/// A body that records its progress.
#[derive(Debug)]
pub struct TrackedBody<B> {
    body: B,
    progress: Rc<BodyProgress>,
}

impl<B> TrackedBody<B> {
    /// Records the progress of `body` in `progress`.
    pub fn new(body: B, progress: Rc<BodyProgress>) -> Self {
        Self { body, progress }
    }
}

impl<B: Body + Unpin> Body for TrackedBody<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let result = Pin::new(&mut self.body).poll_frame(cx);
        let progress = &self.progress;
        let returned = matches!(result, Poll::Ready(Some(Ok(_))));
        progress.waiting.set(returned);
        if returned {
            progress.pieces.set(progress.pieces.get() + 1);
        }
        result
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The task that serves one stream. It ends when the stream is done, or when the client has taken no piece
/// within the limit; dropping the inner future then resets the stream.
pub struct StallBoundStream {
    serving: Pin<Box<dyn Future<Output = ()>>>,
    progress: Rc<BodyProgress>,
    limit: Duration,
    /// The number of the piece that waits, and the timer that was started for it.
    timer: Option<(u64, Pin<Box<Sleep>>)>,
}

impl StallBoundStream {
    /// Limits `serving`, whose progress is recorded in `progress`.
    pub fn new(
        serving: impl Future<Output = ()> + 'static,
        progress: Rc<BodyProgress>,
        limit: Duration,
    ) -> Self {
        Self { serving: Box::pin(serving), progress, limit, timer: None }
    }
}

impl Future for StallBoundStream {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if self.serving.as_mut().poll(cx).is_ready() {
            return Poll::Ready(());
        }
        if !self.progress.waiting.get() {
            self.timer = None;
            return Poll::Pending;
        }
        let (piece, limit) = (self.progress.pieces.get(), self.limit);
        let (_, timer) = match &mut self.timer {
            Some(timer) if timer.0 == piece => timer,
            timer => timer.insert((piece, Box::pin(sleep(limit)))),
        };
        timer.as_mut().poll(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use std::convert::Infallible;
    use std::future::poll_fn;
    use tokio::sync::mpsc;
    use tokio::time::{Instant, timeout};

    const LIMIT: Duration = Duration::from_secs(300);
    const DAY: Duration = Duration::from_secs(86_400);

    /// A body whose pieces come from a channel.
    struct Pieces(mpsc::UnboundedReceiver<Bytes>);

    impl Body for Pieces {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            self.0.poll_recv(cx).map(|piece| piece.map(|piece| Ok(Frame::data(piece))))
        }
    }

    /// Serves a stream as hyper does: polls for the next piece when the stream has window.
    async fn serve(mut body: TrackedBody<Pieces>, mut window: mpsc::UnboundedReceiver<()>) {
        loop {
            if poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await.is_none() {
                return;
            }
            window.recv().await.unwrap();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn stream_ends_when_client_takes_no_piece_within_limit() {
        let (pieces, body) = mpsc::unbounded_channel();
        let (window, opened) = mpsc::unbounded_channel();
        let progress = Rc::<BodyProgress>::default();
        let serving = serve(TrackedBody::new(Pieces(body), progress.clone()), opened);
        let mut bounded = StallBoundStream::new(serving, progress, LIMIT);
        // No piece waits, so no limit applies.
        assert!(timeout(DAY, &mut bounded).await.is_err());
        // The client takes each piece just within the limit.
        for _ in 0..10 {
            pieces.send(Bytes::from_static(b"x")).unwrap();
            pieces.send(Bytes::from_static(b"x")).unwrap();
            for _ in 0..2 {
                assert!(timeout(LIMIT * 9 / 10, &mut bounded).await.is_err());
                window.send(()).unwrap();
            }
        }
        assert!(timeout(DAY, &mut bounded).await.is_err());
        pieces.send(Bytes::from_static(b"x")).unwrap();
        let start = Instant::now();
        timeout(DAY, &mut bounded).await.unwrap();
        assert_eq!(start.elapsed().as_secs(), LIMIT.as_secs());
    }

    #[tokio::test(start_paused = true)]
    async fn stream_without_pieces_ends_at_once() {
        let (pieces, body) = mpsc::unbounded_channel();
        let (_window, opened) = mpsc::unbounded_channel();
        let progress = Rc::<BodyProgress>::default();
        drop(pieces);
        let serving = serve(TrackedBody::new(Pieces(body), progress.clone()), opened);
        let start = Instant::now();
        StallBoundStream::new(serving, progress, LIMIT).await;
        assert!(start.elapsed().is_zero());
    }
}
