//! Property tests of splitter, parser and relay with random histories, chunks and losses of streams, and
//! tests of the splitter's limits.

use super::super::codec::Encoding::{self, Cbor, Json};
use super::super::codec::frame::{FRAME_CAP, FrameSplitter, Piece};
use super::super::relay::Relay;
use super::super::session::{Ending, NotResumable, SessionEffect as Effect, SessionInput as Input};
use super::events::{check_split_and_parse, cursor, encode, json_event, request, split};
use crate::admission::ByteAccount;
use bytes::Bytes;
use proptest::prelude::*;
use std::time::{Duration, Instant};

/// The effect of a loss on a watch that was delivering events.
const REQUEST: Effect =
    Effect::Request { max_jitter: Duration::from_millis(50), pause: Duration::ZERO };

const TYPES: [&str; 6] = ["ADDED", "MODIFIED", "MODIFIED", "DELETED", "BOOKMARK", "NEWS"];

fn encodings() -> impl Strategy<Value = Encoding> {
    prop::sample::select(&Encoding::ALL[..])
}

fn paddings() -> impl Strategy<Value = Vec<String>> {
    prop::collection::vec("[ -~]{0,60}", 1..12)
}

/// Splits bytes at these offsets.
fn chunks(bytes: &[u8], cuts: &[prop::sample::Index]) -> Vec<Bytes> {
    let mut offsets: Vec<_> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
    offsets.extend([0, bytes.len()]);
    offsets.sort_unstable();
    offsets.windows(2).map(|w| Bytes::copy_from_slice(&bytes[w[0]..w[1]])).collect()
}

fn cuts() -> impl Strategy<Value = Vec<prop::sample::Index>> {
    prop::collection::vec(any::<prop::sample::Index>(), 0..12)
}

proptest! {
    #[test]
    fn splitter_returns_the_frames_it_is_given(encoding in encodings(), paddings in paddings(), cuts in cuts()) {
        let frames: Vec<_> =
            paddings.iter().zip(1..).map(|(p, v)| encode(encoding, "ADDED", v, p)).collect();
        let stream = frames.concat();
        let mut splitter = FrameSplitter::new(encoding, ByteAccount::unmetered(usize::MAX));
        let out = split(&mut splitter, &chunks(&stream, &cuts), usize::MAX);
        // A newline that arrives in a later chunk than its object is returned alone.
        let out: Vec<_> = out.iter().map(|f| f.trim_ascii_end()).filter(|f| !f.is_empty()).collect();
        let frames: Vec<_> = frames.iter().map(|f| f.trim_ascii_end()).collect();
        prop_assert_eq!(out, frames);
        prop_assert!(splitter.at_boundary());
    }

    #[test]
    fn splitter_and_parser_accept_any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        check_split_and_parse(&bytes);
    }

    #[test]
    fn splitter_and_parser_accept_malformed_json(text in r#"[{}\[\]",:\\\n a1]{0,200}"#) {
        check_split_and_parse(text.as_bytes());
    }

    #[test]
    fn splitter_and_parser_accept_damaged_events(
        encoding in encodings(),
        padding in "[ -~]{0,30}",
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
    ) {
        let mut bytes = encode(encoding, "BOOKMARK", 12, &padding);
        for (offset, byte) in changes {
            let at = offset.index(bytes.len());
            bytes[at] = byte;
        }
        check_split_and_parse(&bytes);
    }

    #[test]
    fn relay_decides_equally_in_each_encoding(
        history in prop::collection::vec(
            (prop::sample::select(&TYPES[..]), 0..9_u64, "[ -~]{0,40}"), 1..20),
        cuts in cuts(),
        loss in any::<prop::sample::Index>(),
    ) {
        let start = Instant::now();
        let loss = loss.index(history.len());
        let decisions = Encoding::ALL.map(|encoding| {
            let mut relay = Relay::new(encoding, request("3"), start, ByteAccount::unmetered(usize::MAX));
            let frames: Vec<_> =
                history.iter().map(|(event, version, p)| encode(encoding, event, *version, p)).collect();
            let mut decisions = Vec::new();
            for (at, frames) in [&frames[..loss], &frames[loss..]].into_iter().enumerate() {
                let mut sent = Vec::new();
                let mut effect = Effect::None;
                let (mut objects, mut bookmarks, mut shown) = (0, 0, 0);
                for chunk in chunks(&frames.concat(), &cuts) {
                    let pushed = relay.push(&chunk, start, |bytes| sent.push(bytes));
                    objects = pushed.versions.objects.max(objects);
                    bookmarks = pushed.versions.bookmarks.max(bookmarks);
                    shown = pushed.versions.shown.max(shown);
                    effect = pushed.effect;
                    if effect != Effect::None {
                        break;
                    }
                }
                let sent = sent.concat();
                // The frames that were forwarded, by their place in the history.
                let mut rest = sent.trim_ascii_start();
                let mut forwarded = Vec::new();
                for (n, frame) in frames.iter().enumerate() {
                    if let Some(after) = rest.strip_prefix(frame.trim_ascii_end()) {
                        forwarded.push(n);
                        rest = if encoding == Json { after.trim_ascii_start() } else { after };
                    }
                }
                assert!(rest.is_empty(), "{encoding:?}: {rest:?} was forwarded");
                decisions.push(format!("{forwarded:?} {effect:?} {objects} {bookmarks} {shown}"));
                if at == 0 {
                    let lost = relay.stream_lost(false, start);
                    let at = cursor(relay.session(), start);
                    decisions.push(format!("{lost:?} {at:?}"));
                    if !matches!(lost, Effect::Request { .. }) {
                        break;
                    }
                    relay.session_mut().step(Input::Accepted, start);
                }
            }
            decisions
        });
        prop_assert_eq!(&decisions[0], &decisions[1]);
        prop_assert_eq!(&decisions[0], &decisions[2]);
    }

    #[test]
    fn relay_delivers_every_event_once_and_in_order_despite_losses(
        encoding in encodings(),
        history in prop::collection::vec(("[ -~]{0,40}", any::<bool>()), 1..30),
        losses in prop::collection::vec(
            (any::<prop::sample::Index>(), cuts(), any::<bool>()), 0..10),
    ) {
        // Events and bookmarks with the versions 101, 103, …. The client has not asked for bookmarks.
        let events: Vec<(u64, Vec<u8>, bool)> = history.iter().zip(0..).map(|((padding, bookmark), n)| {
            let version = 101 + 2 * n;
            let event_type = if *bookmark { "BOOKMARK" } else { "MODIFIED" };
            (version, encode(encoding, event_type, version, padding), *bookmark)
        }).collect();
        // The response to a request at this version. Some servers repeat the last event.
        let serve = |cursor: u64, repeat: bool| -> Vec<u8> {
            let from = events.iter().position(|(v, ..)| *v > cursor).unwrap_or(events.len());
            let from = if repeat && cursor > 100 { from.saturating_sub(1) } else { from };
            events[from..].iter().flat_map(|(_, bytes, _)| bytes.clone()).collect()
        };
        let start = Instant::now();
        let mut relay = Relay::new(encoding, request("100"), start, ByteAccount::unmetered(usize::MAX));
        let mut client = Vec::new();
        let mut from = 100;
        let mut repeat_next = false;
        for (end, cuts, repeat) in &losses {
            let stream = serve(from, repeat_next);
            for chunk in chunks(&stream[..end.index(stream.len() + 1)], cuts) {
                let pushed = relay.push(&chunk, start, |bytes| client.push(bytes));
                prop_assert_eq!(pushed.effect, Effect::None);
            }
            let requests = matches!(relay.stream_lost(false, start), Effect::Request { .. });
            prop_assert!(requests);
            let session = relay.session_mut();
            from = cursor(session, start).unwrap().parse().unwrap();
            prop_assert_eq!(session.step(Input::Accepted, start), Effect::None);
            repeat_next = *repeat;
        }
        let rest = Bytes::from(serve(from, repeat_next));
        let pushed = relay.push(&rest, start, |bytes| client.push(bytes));
        prop_assert_eq!(pushed.effect, Effect::None);
        let expected: Vec<u8> =
            events.iter().filter(|(.., b)| !b).flat_map(|(_, bytes, _)| bytes.clone()).collect();
        let without_newlines = |bytes: &[u8]| -> Vec<u8> {
            if encoding != Json { return bytes.to_vec(); }
            bytes.iter().copied().filter(|b| *b != b'\n').collect()
        };
        prop_assert_eq!(without_newlines(&client.concat()), without_newlines(&expected));
    }
}

#[test]
fn splitter_joins_frames_that_are_cut_at_any_byte() {
    for encoding in Encoding::ALL {
        let frames: Vec<_> = (1..4).map(|v| encode(encoding, "ADDED", v, "a{}\\\"\n}")).collect();
        let stream = frames.concat();
        for at in 0..=stream.len() {
            let chunks =
                [Bytes::copy_from_slice(&stream[..at]), Bytes::copy_from_slice(&stream[at..])];
            let mut splitter = FrameSplitter::new(encoding, ByteAccount::unmetered(usize::MAX));
            let out = split(&mut splitter, &chunks, usize::MAX);
            assert_eq!(out.concat(), stream, "{at}");
            assert!(splitter.at_boundary());
        }
    }
}

#[test]
fn splitter_returns_pretty_and_unseparated_objects_whole() {
    let pretty = "{\n  \"type\": \"ADDED\",\n  \"object\": {\n    \"a\": \"}\\n\"\n  }\n}\n";
    let terse = r#"{"type":"ADDED","object":{"a":"}{"}}"#;
    for (stream, count) in
        [(pretty.repeat(3), 3), (terse.repeat(3), 3), (format!("{terse}\r\n\r\n{terse}\n"), 2)]
    {
        for step in [1, 2, 5, 1000] {
            let chunks: Vec<_> =
                stream.as_bytes().chunks(step).map(Bytes::copy_from_slice).collect();
            let mut splitter = FrameSplitter::new(Json, ByteAccount::unmetered(usize::MAX));
            let out = split(&mut splitter, &chunks, usize::MAX);
            assert_eq!(out.concat(), stream.as_bytes());
            assert!(splitter.at_boundary());
            let objects = out.iter().filter(|f| f.starts_with(b"{")).count();
            assert_eq!(objects, count, "{stream} {step}");
        }
    }
}

#[test]
fn relay_forwards_a_burst_as_one_slice_of_its_chunk() {
    let start = Instant::now();
    let mut relay = Relay::new(Json, request("1"), start, ByteAccount::unmetered(usize::MAX));
    let events: Vec<_> = (2..50).map(|v| json_event("MODIFIED", v, "x")).collect();
    let chunk = Bytes::from(events.concat());
    let mut out = Vec::new();
    let pushed = relay.push(&chunk, start, |bytes| out.push(bytes));
    assert_eq!((pushed.absorbed, pushed.effect), (0, Effect::None));
    assert_eq!(out.len(), 1);
    assert_eq!(out[0].as_ptr(), chunk.as_ptr());
    assert_eq!(cursor(relay.session(), start).as_deref(), Some("49"));
}

/// A watch that is lost within a frame above the cap must not end cleanly. After the next whole frame the
/// watch can be resumed again.
#[test]
fn relay_passes_a_frame_above_the_cap_in_pieces() {
    for encoding in Encoding::ALL {
        let start = Instant::now();
        let frame = encode(encoding, "ADDED", 6, &"x".repeat(FRAME_CAP + 100_000));
        for whole in [false, true] {
            let account = ByteAccount::unmetered(usize::MAX);
            let mut relay = Relay::new(encoding, request("5"), start, account.clone());
            let received = if whole { &frame[..] } else { &frame[..frame.len() - 20] };
            let mut out = Vec::new();
            for chunk in received.chunks(64 << 10) {
                let pushed = relay.push(&Bytes::copy_from_slice(chunk), start, |bytes| {
                    out.extend_from_slice(&bytes);
                });
                assert_eq!(pushed.effect, Effect::None);
                assert!(account.budget().held() <= FRAME_CAP, "{}", account.budget().held());
            }
            assert!(out == received, "{encoding:?}: {} of {} bytes", out.len(), received.len());
            assert_eq!(account.budget().held(), 0, "bytes of the frame are still buffered");
            let ending = if whole { Ending::Clean } else { Ending::Reset };
            let loss = relay.stream_lost(false, start);
            assert!(
                matches!(loss, Effect::End(how, _) if how == ending),
                "{encoding:?} {whole}: {loss:?}"
            );
        }
        let mut relay =
            Relay::new(encoding, request("5"), start, ByteAccount::unmetered(usize::MAX));
        for chunk in frame.chunks(64 << 10) {
            relay.push(&Bytes::copy_from_slice(chunk), start, drop);
        }
        relay.push(&Bytes::from(encode(encoding, "ADDED", 7, "")), start, drop);
        assert_eq!(relay.stream_lost(false, start), REQUEST);
    }
}

/// The bytes of a completed frame count in the budget until they are dropped.
#[test]
fn splitters_together_buffer_no_more_than_the_budget() {
    const SPLITTERS: usize = 20;
    const TAIL: usize = 30;
    for encoding in Encoding::ALL {
        let account = ByteAccount::unmetered(10_000);
        let frame = encode(encoding, "ADDED", 7, &"x".repeat(3_000));
        let (head, tail) = frame.split_at(frame.len() - TAIL);
        let mut splitters: Vec<_> =
            (0..SPLITTERS).map(|_| FrameSplitter::new(encoding, account.clone())).collect();
        let mut passed = 0;
        for splitter in &mut splitters {
            // In small chunks: the budget may be used up in the middle of a frame.
            for chunk in head.chunks(1_000) {
                match splitter.split(chunk) {
                    Piece::Buffered => assert!(splitter.buffered() > 0),
                    Piece::Oversized { buffered, len, ends, .. } => {
                        passed += buffered.len() + len;
                        assert_eq!((len, ends), (chunk.len(), false));
                    }
                    other => panic!("{other:?}"),
                }
            }
            assert!(account.budget().held() <= 10_000, "{}", account.budget().held());
        }
        let buffered: usize = splitters.iter().map(FrameSplitter::buffered).sum();
        assert_eq!(buffered + passed, SPLITTERS * head.len());
        assert!(buffered >= 2 * head.len(), "{buffered}");
        assert!(buffered <= account.budget().held(), "{buffered} of {}", account.budget().held());

        // Every splitter finds the end of its frame, buffered or in pieces.
        let mut completed = Vec::new();
        for splitter in &mut splitters {
            match splitter.split(tail) {
                Piece::Completed(TAIL, whole) => {
                    assert_eq!(whole, frame);
                    completed.push(whole);
                }
                Piece::Oversized { buffered, len: TAIL, ends: true, .. } => {
                    assert!(buffered.len() < head.len());
                }
                other => panic!("{other:?}"),
            }
            assert!(splitter.at_boundary());
        }
        assert!(completed.len() >= 2 && account.budget().held() >= completed.len() * frame.len());
        // A frame in one chunk needs no budget.
        assert_eq!(splitters[0].split(&frame), Piece::Whole(frame.len()));
        drop(completed);
        assert_eq!(account.budget().held(), 0);
        assert_eq!(splitters[0].split(head), Piece::Buffered);
        drop(splitters);
        assert_eq!(account.budget().held(), 0);
    }
}

#[test]
fn splitter_without_budget_still_finds_the_ends_of_frames() {
    for encoding in Encoding::ALL {
        let frames: Vec<_> = (1..4).map(|v| encode(encoding, "ADDED", v, "a{}\\\"\n}")).collect();
        let stream = frames.concat();
        for step in [1, 2, 3, 5, 7, 64] {
            let mut splitter = FrameSplitter::new(encoding, ByteAccount::unmetered(0));
            let (mut at, mut ends) = (0, Vec::new());
            for chunk in stream.chunks(step) {
                let mut rest = chunk;
                while !rest.is_empty() {
                    let (len, end) = match splitter.split(rest) {
                        Piece::Whole(len) | Piece::Completed(len, _) => (len, true),
                        Piece::Oversized { len, ends, .. } => (len, ends),
                        Piece::Whitespace(len) => (len, false),
                        Piece::Buffered => (rest.len(), false),
                    };
                    (at, rest) = (at + len, &rest[len..]);
                    if end {
                        ends.push(at);
                    }
                    // At most the size prefix of a protobuf frame is buffered.
                    assert!(splitter.buffered() <= 4);
                }
            }
            assert_eq!(ends.len(), frames.len(), "{encoding:?} {step}: {ends:?}");
            // A newline in a later chunk than its object is white space between frames.
            let expected = |n: usize| frames[..=n].concat().len();
            let is_correct =
                |n: usize| ends[n] == expected(n) || encoding == Json && ends[n] + 1 == expected(n);
            assert!((0..frames.len()).all(is_correct), "{encoding:?} {step}: {ends:?}");
            assert!(splitter.at_boundary());
        }
    }
}

/// The work for a piece must not grow with the buffered bytes, nor with the bytes that follow in the chunk.
/// These inputs take less than a second; with quadratic work they would take many minutes.
#[test]
fn splitter_takes_linear_time_for_hostile_input() {
    const SIZE: usize = 1 << 20;
    let measure = |encoding: Encoding, stream: &[u8], step: usize| {
        let begun = Instant::now();
        let mut splitter = FrameSplitter::new(encoding, ByteAccount::unmetered(usize::MAX));
        for chunk in stream.chunks(step) {
            let mut at = 0;
            while at < chunk.len() {
                at += match splitter.split(&chunk[at..]) {
                    Piece::Whole(len)
                    | Piece::Whitespace(len)
                    | Piece::Completed(len, _)
                    | Piece::Oversized { len, .. } => len,
                    Piece::Buffered => chunk.len() - at,
                };
            }
        }
        begun.elapsed()
    };
    let mut blank = vec![b' '; SIZE];
    blank[0] = b'{';
    let chunks_of_a_string = [vec![0x5f], vec![0x40; SIZE]].concat();
    for (name, encoding, stream, step) in [
        ("blanks, byte by byte", Json, blank, 1),
        ("objects without newlines", Json, b"{}".repeat(SIZE), 2 * SIZE),
        ("tags, byte by byte", Cbor, vec![0xc6; SIZE], 1),
        ("empty maps", Cbor, vec![0xa0; SIZE], SIZE),
        ("chunks of a string, byte by byte", Cbor, chunks_of_a_string, 1),
        ("malformed, byte by byte", Cbor, vec![0xff; SIZE], 1),
    ] {
        let took = measure(encoding, &stream, step);
        println!("{name}: {took:?}");
        assert!(took < Duration::from_secs(30), "{name}: {took:?}");
    }
}

/// After malformed CBOR the ends of frames are unknown, so the watch must not look as if it could be resumed.
#[test]
fn relay_forwards_everything_after_malformed_cbor_and_ends_with_a_reset() {
    let start = Instant::now();
    let event = |version| encode(Cbor, "MODIFIED", version, "x");
    let text = |len: u64| [&[0x5b][..], &len.to_be_bytes(), &[b'x'; 5000]].concat();
    for (name, malformed, is_readable) in [
        ("a break", vec![0xff], false),
        ("a reserved length", vec![0x9c], false),
        ("10,000 arrays", vec![0x81; 10_000], false),
        ("10,000 arrays of indefinite length", vec![0x9f; 10_000], false),
        ("an array of 2^64 - 1 items", [vec![0x9b], vec![0xff; 8]].concat(), false),
        ("a string of 2^63 bytes", text(1 << 63), true),
        ("a string of 2^64 - 1 bytes", text(u64::MAX), true),
    ] {
        for step in [1, 700, usize::MAX] {
            let account = ByteAccount::unmetered(usize::MAX);
            let mut relay = Relay::new(Cbor, request("5"), start, account.clone());
            let stream = [event(6), malformed.clone(), event(7)].concat();
            let mut out = Vec::new();
            for chunk in stream.chunks(step) {
                let chunk = Bytes::copy_from_slice(chunk);
                let pushed = relay.push(&chunk, start, |bytes| out.extend_from_slice(&bytes));
                assert_eq!(pushed.effect, Effect::None);
                assert!(account.budget().held() <= stream.len());
            }
            assert_eq!(out, stream, "{name} {step}");
            let reason =
                if is_readable { NotResumable::Oversized } else { NotResumable::Unreadable };
            let lost = relay.stream_lost(false, start);
            assert_eq!(lost, Effect::End(Ending::Reset, reason), "{name} {step}");
        }
    }
}

#[test]
fn relay_does_not_end_cleanly_after_malformed_cbor_in_a_frame_in_pieces() {
    let start = Instant::now();
    let mut relay = Relay::new(Cbor, request("5"), start, ByteAccount::unmetered(0));
    for chunk in [&b"\x9f\x43abc\x43abc"[..], b"\x1c"] {
        let pushed = relay.push(&Bytes::from_static(chunk), start, drop);
        assert_eq!((pushed.absorbed, pushed.effect), (0, Effect::None));
    }
    let lost = relay.stream_lost(false, start);
    assert_eq!(lost, Effect::End(Ending::Reset, NotResumable::Oversized));
}

/// The figures of the codec: each event is split off, parsed and forwarded.
#[test]
#[ignore = "a measurement: cargo test --release -p jackstay-core -- --ignored --nocapture cost_of_an_event"]
fn cost_of_an_event_by_encoding() {
    const EVENTS: u64 = 2_000;
    const CHUNK: usize = 16 << 10;
    let start = Instant::now();
    for size in [300, 3_000] {
        for encoding in Encoding::ALL {
            let padding = "x".repeat(size);
            let frames = (2..EVENTS + 2).map(|n| encode(encoding, "MODIFIED", n, &padding));
            let stream = Bytes::from(frames.collect::<Vec<_>>().concat());
            let run = |_| {
                let begun = Instant::now();
                let account = ByteAccount::unmetered(usize::MAX);
                let mut relay = Relay::new(encoding, request("1"), start, account);
                for at in (0..stream.len()).step_by(CHUNK) {
                    let chunk = stream.slice(at..stream.len().min(at + CHUNK));
                    assert_eq!(relay.push(&chunk, start, drop).effect, Effect::None);
                }
                begun.elapsed().as_nanos() / u128::from(EVENTS)
            };
            let cost = (0..300).map(run).min().unwrap_or_default();
            println!("{encoding:?}, {size} bytes: {cost} ns an event");
        }
    }
}
