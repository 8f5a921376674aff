//! Events that share a version, because etcd has deleted their objects in one transaction: each is delivered once,
//! wherever the stream is lost.

use super::super::codec::Encoding::{self, Json};
use super::super::codec::event::{Event, EventType};
use super::super::relay::Relay;
use super::super::request::WatchRequest;
use super::super::session::{
    Ending, LeaveReason, MoveReason, NotResumable, Session, SessionEffect as Effect,
    SessionInput as Input,
};
use super::events::{cursor, encode, request};
use crate::admission::ByteAccount;
use crate::watch::session::Leave;
use bytes::Bytes;
use proptest::prelude::*;
use std::time::{Duration, Instant};

/// A watch of Events from this version.
fn events(version: &str) -> WatchRequest {
    WatchRequest { objects_expire: true, ..request(version) }
}

/// The events of one transaction of etcd.
#[derive(Debug, Clone, Copy)]
enum Transaction {
    Write,
    /// The deletion of this number of objects.
    Expiry(usize),
    /// A bookmark, which only jackstay asks for.
    Bookmark,
}

/// One frame of a history: its version, its bytes, and whether the client receives it.
type Frame = (u64, Vec<u8>, bool);

/// The frames of a history that begins after version 100. A version is left out after each transaction if it belongs to
/// another resource.
fn history(encoding: Encoding, transactions: &[(Transaction, bool)]) -> Vec<Frame> {
    let mut version = 100;
    let mut frames = Vec::new();
    for (transaction, other) in transactions {
        version += 1 + u64::from(*other);
        let (event_type, count) = match transaction {
            Transaction::Write => ("MODIFIED", 1),
            Transaction::Expiry(count) => ("DELETED", *count),
            Transaction::Bookmark => ("BOOKMARK", 1),
        };
        for _ in 0..count {
            let number = format!("frame {}", frames.len());
            let bytes = encode(encoding, event_type, version, &number);
            frames.push((version, bytes, event_type != "BOOKMARK"));
        }
    }
    frames
}

/// A client of a history, and the watch between them.
struct Client {
    relay: Relay,
    received: Vec<Bytes>,
    now: Instant,
}

impl Client {
    fn new(encoding: Encoding, request: WatchRequest) -> Self {
        let now = Instant::now();
        let account = ByteAccount::unmetered(usize::MAX);
        let relay = Relay::new(encoding, request, now, account);
        Self { relay, received: Vec::new(), now }
    }

    /// The version of the next request.
    fn asked(&self) -> u64 {
        cursor(self.relay.session(), self.now).unwrap().parse().unwrap()
    }

    /// The bytes arrive in chunks of this size.
    fn push(&mut self, bytes: &[u8], chunk: usize) -> Result<(), TestCaseError> {
        for chunk in bytes.chunks(chunk) {
            let received = &mut self.received;
            let chunk = Bytes::copy_from_slice(chunk);
            let pushed = self.relay.push(&chunk, self.now, |piece| received.push(piece));
            prop_assert_eq!(pushed.effect, Effect::None);
        }
        Ok(())
    }

    /// Continues on another stream, after the loss of this one or by a move.
    fn switch(&mut self, moves: bool) -> Result<u64, TestCaseError> {
        if moves {
            self.relay.session_mut().step(Input::MoveStarted(MoveReason::Drain), self.now);
            let asked = self.asked();
            self.relay.move_ended(self.now);
            return Ok(asked);
        }
        let lost = self.relay.stream_lost(false, self.now);
        prop_assert!(matches!(lost, Effect::Request { .. }), "{:?}", lost);
        let asked = self.asked();
        self.relay.session_mut().step(Input::Accepted, self.now);
        Ok(asked)
    }

    fn has_received(&self, encoding: Encoding, history: &[Frame]) -> Result<(), TestCaseError> {
        let without_newlines = |bytes: Vec<u8>| -> Vec<u8> {
            if encoding == Json {
                bytes.into_iter().filter(|b| *b != b'\n').collect()
            } else {
                bytes
            }
        };
        let expected: Vec<_> = history.iter().filter(|frame| frame.2).map(|f| &f.1[..]).collect();
        let received = without_newlines(self.received.concat());
        let expected = without_newlines(expected.concat());
        prop_assert!(received == expected, "{:?}", String::from_utf8_lossy(&received));
        Ok(())
    }
}

/// What a server that has applied the versions up to `applied` sends for a watch from `version`. `bookmark`: first the
/// version that was asked for.
fn response(
    encoding: Encoding,
    history: &[Frame],
    version: u64,
    applied: u64,
    bookmark: bool,
) -> Vec<u8> {
    let mut response =
        if bookmark { encode(encoding, "BOOKMARK", version, "") } else { Vec::new() };
    let sent = history.iter().filter(|frame| frame.0 > version && frame.0 <= applied);
    response.extend(sent.flat_map(|frame| frame.1.clone()));
    response
}

fn transactions() -> impl Strategy<Value = Vec<(Transaction, bool)>> {
    let transaction = prop_oneof![
        Just(Transaction::Write),
        (1..8_usize).prop_map(Transaction::Expiry),
        Just(Transaction::Bookmark),
    ];
    prop::collection::vec((transaction, any::<bool>()), 1..12)
}

proptest! {
    #[test]
    fn each_event_is_delivered_once_and_in_order_whatever_versions_they_share(
        encoding in prop::sample::select(&Encoding::ALL[..]),
        expiring in any::<bool>(),
        transactions in transactions(),
        // Where a stream ends, how much of the history its server has, whether that begins with a bookmark, the size of the
        // chunks, and whether the watch moves.
        streams in prop::collection::vec(
            (any::<prop::sample::Index>(), any::<prop::sample::Index>(), any::<bool>(), 1..300_usize, any::<bool>()),
            0..10),
    ) {
        let history = history(encoding, &transactions);
        let asked = if expiring { events("100") } else { request("100") };
        let mut client = Client::new(encoding, asked);
        let mut version = 100;
        for (end, applied, bookmark, chunk, moves) in streams {
            let applied = history[applied.index(history.len())].0;
            let sent = response(encoding, &history, version, applied, bookmark && version > 100);
            client.push(&sent[..end.index(sent.len() + 1)], chunk)?;
            version = client.switch(moves)?;
        }
        client.push(&response(encoding, &history, version, u64::MAX, false), usize::MAX)?;
        client.has_received(encoding, &history)?;
    }
}

/// Ten objects that expire together, between two writes. The stream is lost after each frame, and the next one after each
/// of its frames.
#[test]
fn each_event_is_delivered_once_if_streams_are_lost_at_every_position() {
    use Transaction::{Expiry, Write};
    let transactions = [(Write, false), (Expiry(10), false), (Write, false)];
    for encoding in Encoding::ALL {
        let history = history(encoding, &transactions);
        for (first, second) in (0..=12).flat_map(|first| (0..=12).map(move |next| (first, next))) {
            let mut client = Client::new(encoding, events("100"));
            let mut version = 100;
            for frames in [first, second] {
                let sent = history.iter().filter(|frame| frame.0 > version).take(frames);
                let sent: Vec<u8> = sent.flat_map(|frame| frame.1.clone()).collect();
                client.push(&sent, usize::MAX).unwrap();
                version = client.switch(false).unwrap();
            }
            let rest = response(encoding, &history, version, u64::MAX, false);
            client.push(&rest, usize::MAX).unwrap();
            client.has_received(encoding, &history).unwrap();
        }
    }
}

#[allow(clippy::unnecessary_wraps)] // the session takes an Option
fn event(event_type: EventType, version: &'static str) -> Option<Event<'static>> {
    let version = Some(version.as_bytes());
    Some(Event { event_type, version, initial_events_end: false, status_code: None })
}

/// A session that has received these events.
fn after(request: WatchRequest, frames: &[(EventType, &'static str)], now: Instant) -> Session {
    let mut session = Session::new(request, now);
    for (event_type, version) in frames {
        let effect = session.step(Input::Frame(event(*event_type, version)), now);
        assert_eq!(effect, Effect::Forward, "{event_type:?} {version}");
    }
    session
}

/// The stream is lost, and another one continues the watch.
fn resume(session: &mut Session, now: Instant) {
    let lost = session.step(Input::StreamLost { quiet: false }, now);
    assert!(matches!(lost, Effect::Request { .. }), "{lost:?}");
    assert_eq!(session.step(Input::Accepted, now), Effect::None);
}

#[test]
fn deleted_at_the_cursor_follows_on_every_stream_that_has_shown_it() {
    use EventType::{Added, Bookmark, Deleted, Modified};
    let now = Instant::now();
    let next = |session: &mut Session, event_type| {
        session.step(Input::Frame(event(event_type, "10")), now)
    };
    for request in
        [request("5"), events("5"), WatchRequest { built_in_group: false, ..request("5") }]
    {
        let mut session = after(request.clone(), &[(Deleted, "10"), (Deleted, "10")], now);
        assert_eq!(next(&mut session, Deleted), Effect::Forward);
        assert!(session.is_resumable());
        // A first stream that shows another event twice cannot be resumed.
        assert_eq!(next(&mut session, Modified), Effect::Forward);
        assert_eq!(session.not_resumable(), Some(NotResumable::VersionNotGrowing));
        // The stream was requested at the cursor, so that nothing at the cursor follows.
        let mut session = after(request.clone(), &[(Added, "10")], now);
        resume(&mut session, now);
        assert_eq!(next(&mut session, Deleted), Effect::Discard);
        // An event above the requested version has shown the cursor of the resumed stream.
        let mut session = after(request.clone(), &[(Added, "9")], now);
        resume(&mut session, now);
        assert_eq!(next(&mut session, Deleted), Effect::Forward);
        assert_eq!(next(&mut session, Deleted), Effect::Forward);
    }
    // The version that the client has requested is not shown by the server.
    let mut session = Session::new(events("10"), now);
    assert_eq!(next(&mut session, Deleted), Effect::Forward);
    assert_eq!(session.not_resumable(), Some(NotResumable::BelowRequested));
    // The first event after the initial ones.
    let mut session = after(events(""), &[(Added, "8"), (Deleted, "10")], now);
    assert_eq!(next(&mut session, Deleted), Effect::Forward);
    assert_eq!(cursor(&session, now).as_deref(), Some("9"));
    // A bookmark ends nothing.
    assert_eq!(next(&mut session, Bookmark), Effect::Swallow);
    assert_eq!(next(&mut session, Deleted), Effect::Forward);
    resume(&mut session, now);
    for effect in [Effect::Discard, Effect::Discard, Effect::Discard, Effect::Forward] {
        assert_eq!(next(&mut session, Deleted), effect);
    }
}

#[test]
#[allow(clippy::type_complexity)] // a table
fn stream_from_before_the_cursor_must_repeat_what_the_client_has() {
    const DIVERGED: Effect = Effect::End(Ending::Reset, NotResumable::Diverged);
    use Effect::{Discard, Forward, NextEndpoint};
    use EventType::{Added, Bookmark, Deleted, Error, Modified};
    let reset = |reason| Effect::End(Ending::Reset, reason);
    let now = Instant::now();
    // The client has two events at version 10, and the stream was requested at version 9.
    let table: Vec<(&str, &[(EventType, &'static str, Effect)])> = vec![
        (
            "the rest",
            &[(Deleted, "10", Discard), (Deleted, "10", Discard), (Deleted, "10", Forward)],
        ),
        ("no rest", &[(Deleted, "10", Discard), (Deleted, "10", Discard), (Added, "11", Forward)]),
        (
            "a bookmark after them",
            &[
                (Deleted, "10", Discard),
                (Deleted, "10", Discard),
                (Bookmark, "10", Effect::Swallow),
                (Deleted, "10", Forward),
            ],
        ),
        (
            "a server that has not reached them",
            &[
                (Bookmark, "9", Discard),
                (Bookmark, "9", Discard),
                (Deleted, "10", Discard),
                (Deleted, "10", Discard),
                (Deleted, "10", Forward),
            ],
        ),
        ("one of them is missing", &[(Deleted, "10", Discard), (Added, "11", DIVERGED)]),
        (
            "a bookmark says that they are complete",
            &[(Deleted, "10", Discard), (Bookmark, "10", DIVERGED)],
        ),
        ("they are missing", &[(Added, "11", DIVERGED)]),
        ("a bookmark of another store", &[(Bookmark, "8", Discard), (Bookmark, "8", DIVERGED)]),
        (
            "a repeated event of an older version",
            &[
                (Deleted, "9", Discard),
                (Deleted, "10", Discard),
                (Deleted, "10", Discard),
                (Modified, "11", Forward),
            ],
        ),
        ("an ERROR", &[(Error, "0", NextEndpoint)]),
        ("an ERROR within them", &[(Deleted, "10", Discard), (Error, "0", NextEndpoint)]),
    ];
    for (name, frames) in table {
        let mut session = after(events("5"), &[(Deleted, "10"), (Deleted, "10")], now);
        resume(&mut session, now);
        for (event_type, version, effect) in frames {
            let found = session.step(Input::Frame(event(*event_type, version)), now);
            assert_eq!(found, *effect, "{name}: {event_type:?} {version}");
        }
    }
    // A frame that cannot be counted.
    let mut session = after(events("5"), &[(Deleted, "10"), (Deleted, "10")], now);
    resume(&mut session, now);
    let piece = session.step(Input::OversizedPiece { begins: true, ends: true }, now);
    assert_eq!(piece, reset(NotResumable::Oversized));
    // A frame at an unknown version may be one of them.
    let mut session = after(events("5"), &[(Deleted, "10")], now);
    session.step(Input::OversizedPiece { begins: true, ends: true }, now);
    session.step(Input::Frame(event(Deleted, "10")), now);
    let lost = session.step(Input::StreamLost { quiet: false }, now);
    assert_eq!(lost, reset(NotResumable::Oversized));
}

#[test]
fn watch_that_may_miss_events_ends_so_that_its_client_lists() {
    use EventType::{Added, Bookmark, Deleted};
    let start = Instant::now();
    let second = Duration::from_secs(1);
    let frames: [(&[(EventType, &str)], Ending); 4] = [
        (&[(Deleted, "10")], Ending::Reset),
        (&[(Deleted, "10"), (Deleted, "10")], Ending::Reset),
        (&[(Deleted, "10"), (Added, "11")], Ending::Clean),
        (&[(Deleted, "10"), (Bookmark, "12")], Ending::Clean),
    ];
    for (frames, ending) in frames {
        let watch = || after(WatchRequest { bookmarks: true, ..events("5") }, frames, start);
        let end = |reason, ending| Effect::End(ending, reason);
        // The stream is lost, and nothing continues it.
        let late = start + 299 * second;
        let lost = watch().step(Input::StreamLost { quiet: false }, late);
        assert_eq!(lost, end(NotResumable::Late, ending), "{frames:?}");
        let mut resuming = watch();
        resuming.step(Input::StreamLost { quiet: false }, start);
        let stopped = resuming.step(Input::Stop(NotResumable::GaveUp), late);
        assert_eq!(stopped, end(NotResumable::GaveUp, ending), "{frames:?}");
        // The stream works.
        for (at, ending) in [(start, ending), (start + second, Ending::Clean)] {
            let stopped = watch().step(Input::Stop(NotResumable::Shutdown), at);
            assert_eq!(stopped, end(NotResumable::Shutdown, ending), "{frames:?}");
            let leaves = if ending == Ending::Clean { Leave::End } else { Leave::Stay };
            assert_eq!(watch().leave(LeaveReason::Shutdown, at), leaves, "{frames:?}");
        }
    }
}
