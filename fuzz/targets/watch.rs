//! Bytes of an apiserver: frames of a watch, and the objects from which the endpoints are read.

use std::io::Read as _;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use jackstay::control::discovery::objects::{ObjectStore, WatchedResource};
use jackstay::control::discovery::requests::{RequestError, ResponseChunks};
use jackstay::control::discovery::watch_events::WatchEvents;
use jackstay_core::admission::ByteAccount;
use jackstay_core::kubernetes_features::FeatureReader;
use jackstay_core::watch::codec::frame::{FrameSplitter, Piece};
use jackstay_core::watch::codec::head::{
    cbor_head, cbor_tail, is_status, json_head, json_tail, protobuf_head,
};
use jackstay_core::watch::codec::{Encoding, parse};
use jackstay_core::watch::gzip::{GzipDecoder, GzipError, PIECE, STATE};
use jackstay_core::watch::parameters::Parameters;
use serde_json::Value;

const CAP: usize = 64;
/// Less than [`CAP`], so that both limits are reached.
const BUDGET: usize = 48;

/// A watch: the splitter buffers no more than its cap and returns every byte in order.
pub(super) fn watch(bytes: &[u8]) {
    let _ = (json_head(bytes), protobuf_head(bytes), cbor_head(bytes));
    let _ = Encoding::ALL.map(|encoding| is_status(encoding, bytes));
    let _ = (json_tail(bytes), cbor_tail(bytes));
    for encoding in Encoding::ALL {
        let _ = parse(encoding, bytes);
        for step in [1, 7, bytes.len().max(1)] {
            let account = ByteAccount::unmetered(BUDGET);
            let mut splitter = FrameSplitter::with_cap(encoding, CAP, account.clone());
            let mut out = Vec::new();
            for chunk in bytes.chunks(step) {
                let mut rest = chunk;
                while !rest.is_empty() {
                    let (frame, len) = match splitter.split(rest) {
                        Piece::Whole(len) | Piece::Whitespace(len) => {
                            (Bytes::copy_from_slice(&rest[..len]), len)
                        }
                        Piece::Completed(len, frame) => (frame, len),
                        Piece::Oversized { buffered: kept, len, .. } => {
                            out.extend_from_slice(&kept);
                            (Bytes::copy_from_slice(&rest[..len]), len)
                        }
                        Piece::Buffered => (Bytes::new(), rest.len()),
                    };
                    let _ = parse(encoding, &frame);
                    out.extend_from_slice(&frame);
                    rest = &rest[len..];
                    assert!(splitter.buffered() <= CAP);
                }
            }
            out.extend_from_slice(&splitter.reset());
            assert_eq!(out, bytes);
        }
    }
}

/// Metrics that name feature gates, and the parameters of a watch: the same gates are read, however the metrics are
/// split.
pub(super) fn features(bytes: &[u8]) {
    let read = |step: usize| {
        let mut reader = FeatureReader::default();
        let _ = bytes.chunks(step).any(|piece| reader.push(piece));
        reader.finish()
    };
    let whole = read(bytes.len().max(1));
    for step in [1, 7] {
        assert_eq!(read(step), whole);
    }
    if let Ok(query) = str::from_utf8(bytes) {
        let twice = format!("{query}&{query}");
        let of = |parameters: &str| Parameters::of(parameters, std::iter::once(query));
        assert_eq!(of(&twice), of(query));
    }
}

/// The body of a compressed watch: what a gzip library accepts has the same data, however it is split.
pub(super) fn gzip(bytes: &[u8]) {
    let whole = inflate(bytes, bytes.len().max(1));
    for step in [1, 7] {
        let split = inflate(bytes, step);
        assert_eq!(split.1, whole.1, "the end");
        // Of corrupt data, more or less is inflated before the corruption is found.
        let common = if whole.1.is_ok() { usize::MAX } else { split.0.len().min(whole.0.len()) };
        assert!(split.0.iter().take(common).eq(whole.0.iter().take(common)), "the data");
    }
    let mut expected = Vec::new();
    let is_valid = bytes.is_empty()
        || flate2::read::MultiGzDecoder::new(bytes).read_to_end(&mut expected).is_ok();
    if is_valid && whole.1 != Err(GzipError::Ratio) {
        assert_eq!(whole, (expected, Ok(true)));
    }
    assert!(is_valid || whole.1 != Ok(true));
}

/// Decodes chunks of `step` bytes. Returns the data, and whether the body may end after them.
fn inflate(bytes: &[u8], step: usize) -> (Vec<u8>, Result<bool, GzipError>) {
    let mut decoder = GzipDecoder::new(ByteAccount::unmetered(STATE));
    let mut out = Vec::new();
    for chunk in bytes.chunks(step) {
        decoder.push(Bytes::copy_from_slice(chunk));
        loop {
            match decoder.next_piece() {
                Ok(Some(piece)) => {
                    assert!(!piece.is_empty() && piece.len() <= PIECE);
                    out.extend_from_slice(&piece);
                }
                Ok(None) => break,
                Err(error) => return (out, Err(error)),
            }
        }
    }
    let ends = decoder.is_between_members();
    (out, Ok(ends))
}

/// Lines of an event (`L`isted, `A`dded, `D`eleted) and an object: no address is listed twice. The list is of version
/// 1.
pub(super) fn endpoint_objects(bytes: &[u8]) {
    for resource in WatchedResource::ALL {
        let lines = bytes.split(|byte| *byte == b'\n').filter_map(|line| line.split_first());
        let events = lines.filter_map(|(event, json)| {
            Some((*event, serde_json::from_slice::<Value>(json).ok()?))
        });
        let (list, events): (Vec<_>, Vec<_>) = events.partition(|(event, _)| *event == b'L');
        let list = list.into_iter().map(|(_, object)| object).collect();
        let mut store = ObjectStore::new(resource, list, "1");
        for (event, object) in events {
            store.apply(object, event == b'D');
        }
        let found = store.endpoints();
        let mut addresses: Vec<_> =
            found.candidates.iter().map(|candidate| candidate.address.to_string()).collect();
        let count = addresses.len();
        addresses.sort_unstable();
        addresses.dedup();
        assert_eq!(addresses.len(), count);
    }
}

/// The parts of a body, which have all arrived.
struct ArrivedParts<'a>(std::slice::Chunks<'a, u8>);

impl ResponseChunks for ArrivedParts<'_> {
    async fn next(&mut self, _: bool) -> Option<Result<Bytes, RequestError>> {
        Some(Ok(Bytes::copy_from_slice(self.0.next()?)))
    }
}

/// The body of discovery's watch: its events do not depend on how the bytes are split.
pub(super) fn watch_events(bytes: &[u8]) {
    let events = |size: usize| {
        let mut events = WatchEvents::new(ArrivedParts(bytes.chunks(size)));
        let read = async {
            let mut all = Vec::new();
            while let Some(event) = events.next().await {
                let is_last = event.is_err();
                all.push(event);
                if is_last {
                    break;
                }
            }
            all
        };
        match pin!(read).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(all) => all,
            Poll::Pending => panic!("all parts have arrived"),
        }
    };
    let whole = events(bytes.len().max(1));
    for size in [1, 2, 7] {
        assert_eq!(events(size), whole);
    }
}
