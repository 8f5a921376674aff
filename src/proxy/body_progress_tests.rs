use super::*;
use std::convert::Infallible;
use std::future::poll_fn;
use std::sync::Arc;

use http_body_util::Empty;
use jackstay_core::admission::{MemoryBudget, MemoryKind, Shed};
use jackstay_core::request::path_prefix::PathPrefix;
use jackstay_sys::clock;
use jackstay_sys::sockets::source::Source;
use tokio::sync::mpsc;
use tokio::time::timeout;

use crate::proxy::admission::client_memory::ClientMemory;
use crate::proxy::admission::connection_slots::ConnectionSlots;

const LIMIT: Duration = Duration::from_secs(300);
const DAY: Duration = Duration::from_secs(86_400);

fn progress_within(budget: &Arc<MemoryBudget>) -> Rc<BodyProgress> {
    progress_of(budget, ClientRank::Unproven)
}

fn progress_of(budget: &Arc<MemoryBudget>, rank: ClientRank) -> Rc<BodyProgress> {
    let client = ClientMemory::of_local_client(budget.source(1), rank).unwrap();
    let request = http::Request::new(Empty::<Bytes>::new());
    let (slots, now) = (Rc::<ConnectionSlots>::default(), clock::now());
    let slot = Rc::new(slots.admit_proven(Source::User(1), now));
    BodyProgress::new(client.begin(&request, &PathPrefix::default()).unwrap(), slot.begin_request())
}

fn progress() -> Rc<BodyProgress> {
    progress_within(&MemoryBudget::new(1 << 30))
}

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

/// Serves a stream as hyper does: holds a piece until the stream has window.
async fn serve(mut body: TrackedBody<Pieces>, mut window: mpsc::UnboundedReceiver<()>) {
    while let Some(piece) = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
        window.recv().await.unwrap();
        let mut data = piece.unwrap().into_data().unwrap();
        data.advance(data.remaining());
    }
}

#[tokio::test(start_paused = true)]
async fn stream_ends_when_client_takes_no_piece_within_limit() {
    let (pieces, body) = mpsc::unbounded_channel();
    let (window, opened) = mpsc::unbounded_channel();
    let progress = progress();
    let serving =
        serve(TrackedBody::new(Pieces(body), progress.clone(), ResponseReserve::default()), opened);
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
    let start = clock::now();
    timeout(DAY, &mut bounded).await.unwrap();
    assert_eq!(clock::elapsed(start).as_secs(), LIMIT.as_secs());
}

#[tokio::test(start_paused = true)]
async fn stream_without_pieces_ends_at_once() {
    let (pieces, body) = mpsc::unbounded_channel();
    let (_window, opened) = mpsc::unbounded_channel();
    let progress = progress();
    drop(pieces);
    let serving =
        serve(TrackedBody::new(Pieces(body), progress.clone(), ResponseReserve::default()), opened);
    let start = clock::now();
    StallBoundStream::new(serving, progress, LIMIT).await;
    assert!(clock::elapsed(start).is_zero());
}

#[tokio::test(start_paused = true)]
async fn stream_of_a_reader_that_does_not_read_is_shed_when_memory_is_short() {
    let budget = MemoryBudget::new(16 << 20);
    let progress = progress_within(&budget);
    let (pieces, body) = mpsc::unbounded_channel();
    let (_window, opened) = mpsc::unbounded_channel();
    let serving =
        serve(TrackedBody::new(Pieces(body), progress.clone(), ResponseReserve::STREAM), opened);
    let mut bounded = StallBoundStream::new(serving, progress, LIMIT);
    pieces.send(Bytes::from_static(b"x")).unwrap();
    assert!(timeout(Duration::from_secs(60), &mut bounded).await.is_err());
    assert_eq!(budget.shed(Shed::StalledReader), 0, "memory is not short");
    let held = budget.source(1).charge(MemoryKind::Streams, 4 << 20);
    let start = clock::now();
    timeout(DAY, &mut bounded).await.unwrap();
    assert!(clock::elapsed(start) <= CHECK_INTERVAL);
    assert_eq!(budget.shed(Shed::StalledReader), 1);
    drop((bounded, held));
    assert_eq!(budget.used(), 0);
}

/// The judgement of a client that takes `rate` bytes a second, for `seconds`.
fn judge(rate: u64, seconds: u64, has_much_unread: bool, is_short: bool) -> Option<(u64, Verdict)> {
    let start = clock::now();
    let mut reader = Reader::new(1, 0, start);
    let piece = 64 << 10;
    for second in 0..=seconds {
        let taken = rate * second;
        let now = start + Duration::from_secs(second);
        let at = (1 + taken / piece, taken);
        match reader.check(at, LIMIT, (has_much_unread, || is_short), now) {
            Verdict::CheckAt(_) => {}
            verdict => return Some((second, verdict)),
        }
    }
    None
}

#[test]
fn readers_are_judged_by_what_they_take() {
    for (rate, has_much_unread, is_short, expected) in [
        (0, false, false, Some((300, Verdict::Stalled))),
        (1_000, false, false, None),
        // However it dribbles.
        (1_000, true, false, Some((300, Verdict::Stalled))),
        (5_000, true, false, None),
        (0, false, true, Some((2, Verdict::Shed))),
        (4_000, false, true, Some((2, Verdict::Shed))),
        (5_000, true, true, None),
    ] {
        let verdict = judge(rate, 2_000, has_much_unread, is_short);
        assert_eq!(verdict, expected, "{rate} {has_much_unread} {is_short}");
    }
}

#[test]
fn pieces_are_charged_until_they_are_taken_or_dropped() {
    let budget = MemoryBudget::new(1 << 30);
    let progress = progress_within(&budget);
    let waker = Waker::noop();
    let (pieces, body) = mpsc::unbounded_channel();
    let mut body = TrackedBody::new(Pieces(body), Rc::clone(&progress), ResponseReserve::default());
    let mut poll = || Pin::new(&mut body).poll_frame(&mut Context::from_waker(waker));
    let piece = Bytes::from(vec![0; MAX_PIECE / 2]);
    for _ in 0..3 {
        pieces.send(piece.clone()).unwrap();
    }
    let mut take = || match poll() {
        Poll::Ready(Some(Ok(frame))) => Some(frame.into_data().unwrap()),
        _ => None,
    };
    let (mut first, second) = (take().unwrap(), take().unwrap());
    assert!(take().is_none(), "the client must take bytes first");
    assert!(progress.waiting.get());
    assert_eq!(progress.unread.get(), MAX_PIECE + 2 * PIECE_COST);
    let taken = 2 * PIECE_COST + 1;
    first.advance(taken);
    let third = take().unwrap();
    let unread = MAX_PIECE * 3 / 2 + PIECE_COST - 1;
    assert_eq!((progress.unread.get(), progress.taken.get()), (unread, taken as u64));
    drop((first, second, third));
    assert_eq!(progress.unread.get(), 0);
    assert_eq!(budget.used_for(MemoryKind::Responses), 0);
}

#[test]
fn client_without_an_identity_gets_one_piece_after_the_other_when_memory_is_short() {
    for (rank, pieces_at_once) in [(ClientRank::Unproven, 1), (ClientRank::Identity, 3)] {
        let budget = MemoryBudget::new(16 << 20);
        let progress = progress_of(&budget, rank);
        let (pieces, body) = mpsc::unbounded_channel();
        let mut body =
            TrackedBody::new(Pieces(body), Rc::clone(&progress), ResponseReserve::default());
        let mut take = || {
            let polled = Pin::new(&mut body).poll_frame(&mut Context::from_waker(Waker::noop()));
            match polled {
                Poll::Ready(Some(Ok(frame))) => Some(frame.into_data().unwrap()),
                _ => None,
            }
        };
        let _short = budget.source(1).charge(MemoryKind::Streams, 14 << 20);
        for _ in 0..3 {
            pieces.send(Bytes::from_static(b"x")).unwrap();
        }
        let taken: Vec<_> = std::iter::from_fn(&mut take).collect();
        assert_eq!(taken.len(), pieces_at_once, "{rank:?}");
        drop(taken);
        assert_eq!(take().is_some(), pieces_at_once == 1, "{rank:?}");
    }
}

#[test]
fn waiting_bytes_are_bounded_by_what_the_client_is_and_has_taken() {
    use ClientRank::{Identity, Token, Unproven};
    // Bytes taken before, charged of 16 MiB, and pieces of 64 KiB that then wait.
    for (rank, taken, charged, expected) in [
        (Identity, 0, 0, 2),
        (Identity, 0, 14 << 20, 2),
        (Token, 0, 0, 1),
        (Token, MUCH, 0, 2),
        (Token, MUCH, 9 << 20, 1),
        (Unproven, MUCH, 0, 2),
        (Unproven, MUCH, 5 << 20, 1),
    ] {
        let budget = MemoryBudget::new(16 << 20);
        let progress = progress_of(&budget, rank);
        progress.taken.set(taken);
        let (pieces, body) = mpsc::unbounded_channel();
        let mut body =
            TrackedBody::new(Pieces(body), Rc::clone(&progress), ResponseReserve::default());
        let _charged = budget.source(1).charge(MemoryKind::Streams, charged);
        for _ in 0..10 {
            pieces.send(Bytes::from(vec![0; MAX_PIECE])).unwrap();
        }
        let mut cx = Context::from_waker(Waker::noop());
        let waiting: Vec<_> =
            std::iter::from_fn(|| match Pin::new(&mut body).poll_frame(&mut cx) {
                Poll::Ready(frame) => frame,
                Poll::Pending => None,
            })
            .collect();
        assert_eq!(waiting.len(), expected, "{rank:?} {taken} {charged}");
    }
}
