//! Bounds how long an HTTP/2 client may take nothing of one answer.
//!
//! A client that reads its socket but opens no window on a stream looks well to [`super::stall_timeout`].
//! Meanwhile hyper asks the answer's body for nothing, so that it holds an upstream stream, and
//! does not even leave a connection that ends. hyper hands a piece to h2 whole, and asks for the
//! next one when there is window: a stream whose piece is out for the limit is reset, and the
//! others of its connection go on. One that takes a piece now and then is only slow.

use std::cell::Cell;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use http_body::{Body, Frame, SizeHint};
use tokio::time::{Sleep, sleep};

/// Largest piece that a body should hand over, so that a slow client is seen to take something:
/// with the default limit, 220 bytes a second.
pub const PIECE: usize = 64 * 1024;

/// What one answer waits for.
#[derive(Debug, Default)]
struct Progress {
    /// Pieces handed over.
    pieces: Cell<u64>,
    /// The last of them is out: no more was asked for.
    out: Cell<bool>,
}

/// Follows one answer, for those who look at it from both sides.
#[derive(Debug, Clone, Default)]
pub struct BodyProgress(Rc<Progress>);

impl BodyProgress {
    /// Number of the piece that waits for the client, if one does.
    fn waiting(&self) -> Option<u64> {
        self.0.out.get().then(|| self.0.pieces.get())
    }
}

/// A body that tells when a piece of it is out.
#[derive(Debug)]
pub struct TrackedBody<B> {
    body: B,
    progress: BodyProgress,
}

impl<B> TrackedBody<B> {
    /// Tells `progress` about `body`.
    pub fn new(body: B, progress: BodyProgress) -> Self {
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
        let progress = &self.progress.0;
        let out = matches!(result, Poll::Ready(Some(Ok(_))));
        progress.out.set(out);
        if out {
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

/// What serves one stream, until it is done or its client has taken nothing for too long; dropping
/// it resets the stream.
pub struct StallBoundStream {
    serving: Pin<Box<dyn Future<Output = ()>>>,
    progress: BodyProgress,
    limit: Duration,
    /// Runs while a piece is out: which, and until when it may be.
    timer: Option<(u64, Pin<Box<Sleep>>)>,
}

impl StallBoundStream {
    /// Bounds `serving` by what `progress` tells.
    pub fn new(
        serving: impl Future<Output = ()> + 'static,
        progress: BodyProgress,
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
        let Some(piece) = self.progress.waiting() else {
            self.timer = None;
            return Poll::Pending;
        };
        let limit = self.limit;
        match &mut self.timer {
            Some((of, timer)) if *of == piece => timer.as_mut().poll(cx),
            timer => {
                let (_, timer) = timer.insert((piece, Box::pin(sleep(limit))));
                timer.as_mut().poll(cx)
            }
        }
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

    /// Pieces from a channel.
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

    /// As hyper serves a stream: a piece is asked for where there is window.
    async fn serve(mut body: TrackedBody<Pieces>, mut window: mpsc::UnboundedReceiver<()>) {
        loop {
            if poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await.is_none() {
                return;
            }
            window.recv().await.unwrap();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn who_takes_nothing_of_what_waits_is_cut_off() {
        let (pieces, body) = mpsc::unbounded_channel();
        let (window, opened) = mpsc::unbounded_channel();
        let progress = BodyProgress::default();
        let serving = serve(TrackedBody::new(Pieces(body), progress.clone()), opened);
        let mut bounded = StallBoundStream::new(serving, progress, LIMIT);
        // Nothing waits for it: it may be silent for as long as it likes.
        assert!(timeout(DAY, &mut bounded).await.is_err());
        // It takes a piece now and then, and more are always there.
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
    async fn the_end_is_the_end() {
        let (pieces, body) = mpsc::unbounded_channel();
        let (_window, opened) = mpsc::unbounded_channel();
        let progress = BodyProgress::default();
        drop(pieces);
        let serving = serve(TrackedBody::new(Pieces(body), progress.clone()), opened);
        let start = Instant::now();
        StallBoundStream::new(serving, progress, LIMIT).await;
        assert!(start.elapsed().is_zero());
    }
}
