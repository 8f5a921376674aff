//! Tests of the session's tables: states, frames, losses of streams, attempts to resume.

use super::super::codec::event::{Event, EventType};
use super::super::codec::version::ResourceVersion;
use super::super::request::WatchRequest;
use super::super::session::{
    AttemptResult, Ending, MAX_RESUMES, MoveReason, NotResumable, Session, SessionEffect as Effect,
    SessionInput as Input,
};
use super::events::{cursor, request};
use crate::endpoint_condition::EndpointCondition;
use crate::endpoint_state::EndpointState::{self, Connecting, Degraded, Ejected, Ready, Suspect};
use crate::pool::EndpointKey;
use bytes::Bytes;
use std::time::{Duration, Instant};

/// Another attempt. [`step`] removes the jitter, which the tests of rounds check.
const REQUEST: Effect = Effect::Request { max_jitter: Duration::ZERO, pause: Duration::ZERO };
const DIVERGED: Effect = Effect::End(Ending::Clean, NotResumable::Diverged);
const TOO_OLD: Effect = Effect::End(Ending::Withheld, NotResumable::TooOld);
const GAVE_UP: Effect = Effect::End(Ending::Clean, NotResumable::GaveUp);
/// Attempts and rejections are those of endpoint 1.
const ASKED: EndpointKey = EndpointKey(1);
const ALL_LEFT: &[EndpointCondition] = &[is_in(1, Ready), is_in(2, Ready)];
const NONE_LEFT: &[EndpointCondition] = &[];

const fn is_in(key: usize, state: EndpointState) -> EndpointCondition {
    EndpointCondition { key: EndpointKey(key), state, probe_fails: false, is_starting: false }
}

type Frame = Option<Event<'static>>;

#[allow(clippy::unnecessary_wraps)] // the session takes an Option
fn event(event_type: EventType, version: &'static str) -> Frame {
    let version = Some(version.as_bytes());
    Some(Event { event_type, version, initial_events_end: false, status_code: None })
}

#[allow(clippy::unnecessary_wraps)] // the session takes an Option
fn error(code: u16) -> Frame {
    Some(Event {
        event_type: EventType::Error,
        version: None,
        initial_events_end: false,
        status_code: Some(code),
    })
}

fn initial_events_end(version: &'static str) -> Frame {
    event(EventType::Bookmark, version).map(|e| Event { initial_events_end: true, ..e })
}

/// A session that has processed these frames.
fn after(request: &WatchRequest, frames: Vec<Frame>, start: Instant) -> Session {
    let mut session = Session::new(request.clone(), start);
    for frame in frames {
        session.step(Input::Frame(frame), start);
    }
    session
}

fn frame(session: &mut Session, frame: Frame) -> Effect {
    session.step(Input::Frame(frame), Instant::now())
}

fn step(session: &mut Session, input: Input<'_>, now: Instant) -> Effect {
    match session.step(input, now) {
        Effect::Request { pause, .. } => Effect::Request { max_jitter: Duration::ZERO, pause },
        effect => effect,
    }
}

fn lose(session: &mut Session, now: Instant) -> Effect {
    step(session, Input::StreamLost { quiet: false }, now)
}

fn attempt(
    session: &mut Session,
    result: AttemptResult,
    endpoints: &[EndpointCondition],
    now: Instant,
) -> Effect {
    if result.is_accepted() {
        return step(session, Input::Accepted, now);
    }
    step(session, Input::AttemptFailed { result, endpoint: Some(ASKED), endpoints }, now)
}

fn head(status: u16) -> AttemptResult {
    AttemptResult::Head { status, same_content_type: true, retry_after: None }
}

/// The stream is lost, and another one continues the watch.
fn resume(session: &mut Session, now: Instant) {
    assert_eq!(lose(session, now), REQUEST);
    assert_eq!(attempt(session, head(200), NONE_LEFT, now), Effect::None);
}

/// The body reports that it has reset the stream after an ERROR event, withheld or not.
fn reject(
    session: &mut Session,
    withheld: bool,
    endpoints: &[EndpointCondition],
    now: Instant,
) -> Effect {
    let error_event = withheld.then(|| Bytes::from_static(b"410"));
    step(session, Input::Rejected { error_event, endpoint: ASKED, endpoints }, now)
}

#[test]
#[allow(clippy::type_complexity)] // a table
fn session_after_frames_resumes_or_ends_as_documented() {
    use EventType::{Added, Bookmark, Deleted, Modified, Unknown};
    use NotResumable as Reason;
    let fresh = || request("");
    let listed = || WatchRequest { send_initial_events: true, ..request("5") };
    let watch_list = || WatchRequest { bookmarks: true, ..listed() };
    let at_most_recent = || WatchRequest { starts_at_most_recent: true, ..request("") };
    let aggregated = |version| WatchRequest { resumable_group: false, ..request(version) };
    let clean = |reason| Effect::End(Ending::Clean, reason);
    let reset = |reason| Effect::End(Ending::Reset, reason);
    let start = Instant::now();
    // Name, request, frames; expected: whether the initial events are complete, the effect of a loss, and the
    // version at which the watch continues.
    #[rustfmt::skip]
    let table: Vec<(&str, WatchRequest, Vec<Frame>, bool, Effect, Option<&str>)> = vec![
        ("ordered, nothing yet", request("5"), vec![], true, REQUEST, Some("5")),
        ("ordered", request("5"), vec![event(Added, "9"), event(Modified, "10")], true, REQUEST, Some("10")),
        ("an event that may share its version", request("5"), vec![event(Added, "9"), event(Deleted, "10")], true, REQUEST, Some("9")),
        ("quiet with a bookmark", request("5"), vec![event(Bookmark, "9")], true, REQUEST, Some("9")),
        ("bookmark at the cursor", request("5"), vec![event(Added, "9"), event(Bookmark, "9")], true, REQUEST, Some("9")),
        ("event at the cursor", request("5"), vec![event(Added, "9"), event(Modified, "9")], true, clean(Reason::VersionNotGrowing), None),
        ("event below the cursor", request("5"), vec![event(Added, "4")], true, clean(Reason::BelowRequested), None),
        ("event below the cursor that an event has shown", request("5"), vec![event(Added, "6"), event(Added, "4")], true, clean(Reason::VersionNotGrowing), None),
        ("version jumps", request("5"), vec![event(Added, "6"), event(Added, "1152921504606846976")], true, clean(Reason::VersionJumped), None),
        ("bookmark jumps", request("5"), vec![event(Added, "6"), event(Bookmark, "1152921504606846976")], true, clean(Reason::VersionJumped), None),
        ("version far above the requested one", request("5"), vec![event(Added, "1152921504606846976")], true, REQUEST, Some("1152921504606846976")),
        ("bookmark below the cursor", request("5"), vec![event(Added, "8"), event(Bookmark, "7")], true, clean(Reason::VersionNotGrowing), None),
        ("version is not a number", request("5"), vec![event(Added, "abc")], true, clean(Reason::VersionNotNumeric), None),
        ("unknown type", request("5"), vec![event(Unknown, "7")], true, clean(Reason::UnknownEvent), None),
        ("unknown type, then an event", request("5"), vec![event(Unknown, "7"), event(Added, "8")], true, clean(Reason::UnknownEvent), None),
        ("too old", request("5"), vec![error(410)], true, REQUEST, Some("5")),
        ("another error", request("5"), vec![error(500)], true, clean(Reason::ServerError), None),
        ("unreadable", request("5"), vec![None], true, reset(Reason::Unreadable), None),
        ("initial, nothing yet", fresh(), vec![], false, REQUEST, None),
        ("resourceVersion=0", request("0"), vec![], false, REQUEST, None),
        ("initial", fresh(), vec![event(Added, "90"), event(Added, "8")], false, reset(Reason::Initial), None),
        ("initial, complete", fresh(), vec![event(Added, "90"), event(Added, "8"), event(Modified, "91")], true, REQUEST, Some("91")),
        ("initial, empty", fresh(), vec![event(Bookmark, "50")], true, REQUEST, Some("50")),
        ("initial, error", fresh(), vec![error(410)], false, reset(Reason::ServerError), None),
        ("initial, unreadable", fresh(), vec![None], false, reset(Reason::Unreadable), None),
        ("initial, complete without a version", fresh(), vec![event(Modified, "x")], true, clean(Reason::VersionNotNumeric), None),
        ("list, nothing yet", listed(), vec![], false, REQUEST, None),
        ("list", listed(), vec![event(Added, "9"), event(Bookmark, "10"), event(Modified, "11")], false, reset(Reason::Initial), None),
        ("list, complete", listed(), vec![event(Added, "9"), initial_events_end("10")], true, REQUEST, Some("10")),
        ("WatchList, nothing yet", watch_list(), vec![], false, REQUEST, None),
        ("WatchList", watch_list(), vec![event(Added, "9"), event(Bookmark, "10")], false, clean(Reason::Initial), None),
        ("WatchList, unreadable", watch_list(), vec![event(Added, "9"), None], false, reset(Reason::Unreadable), None),
        ("WatchList, complete", watch_list(), vec![event(Added, "9"), initial_events_end("10")], true, REQUEST, Some("10")),
        ("at most recent, nothing yet", at_most_recent(), vec![], false, clean(Reason::NoVersion), None),
        ("at most recent, a bookmark", at_most_recent(), vec![event(Bookmark, "9")], true, REQUEST, Some("9")),
        ("at most recent, an event", at_most_recent(), vec![event(Added, "9")], false, reset(Reason::Initial), None),
        ("aggregated, nothing yet", aggregated("5"), vec![], true, REQUEST, None),
        ("aggregated, ordered", aggregated("5"), vec![event(Added, "6")], true, clean(Reason::Group), None),
        ("aggregated, unreadable", aggregated("5"), vec![None], true, reset(Reason::Unreadable), None),
        ("aggregated, initial", aggregated(""), vec![event(Added, "6")], false, reset(Reason::Group), None),
        ("aggregated, initial complete", aggregated(""), vec![event(Added, "6"), event(Modified, "7")], true, clean(Reason::Group), None),
    ];
    for (name, request, frames, ordered, loss, continues_at) in table {
        let mut session = after(&request, frames, start);
        assert_eq!(session.is_ordered(), ordered, "{name}");
        assert_eq!(lose(&mut session, start), loss, "{name}");
        assert_eq!(cursor(&session, start).as_deref(), continues_at, "{name}");
    }
}

/// The table of groups in the documentation of the session. Whether the group is remembered follows from the reason.
#[test]
#[allow(clippy::type_complexity)] // a table
fn contradiction_of_the_server_ends_the_resumes_of_its_group() {
    use EventType::{Added, Bookmark, Modified};
    let start = Instant::now();
    let custom = |version| WatchRequest { built_in_group: false, ..request(version) };
    let jump = "1152921504606846976";
    // Name, requested version, frames; `None` is the loss of the stream and a resume. Expected: the reason for
    // which the watch is not resumed, and whether the group is remembered.
    #[rustfmt::skip]
    let table: Vec<(&str, &str, Vec<Option<Frame>>, NotResumable, bool)> = vec![
        ("another store, behind", "5", vec![Some(event(Added, "10")), None, Some(event(Bookmark, "7")), Some(event(Bookmark, "8"))], NotResumable::Diverged, true),
        ("another store, behind, events", "5", vec![Some(event(Added, "10")), None, Some(event(Added, "6")), Some(event(Added, "7"))], NotResumable::Diverged, true),
        ("store reset on the running stream", "5", vec![Some(event(Added, "10")), Some(event(Added, "1"))], NotResumable::VersionNotGrowing, true),
        ("versions that are not numbers", "5", vec![Some(event(Added, "ab1"))], NotResumable::VersionNotNumeric, true),
        ("versions that are not numbers on the new stream", "5", vec![Some(event(Added, "6")), None, Some(event(Modified, "x"))], NotResumable::Diverged, true),
        ("a jump", "5", vec![Some(event(Added, "6")), Some(event(Added, jump))], NotResumable::VersionJumped, true),
        ("a jump on the new stream", "5", vec![Some(event(Added, "6")), None, Some(event(Added, jump))], NotResumable::VersionJumped, true),
        ("another store after a jump", "", vec![Some(event(Bookmark, jump)), None, Some(event(Bookmark, "7")), Some(event(Bookmark, "8"))], NotResumable::Diverged, true),
        ("a version in the future, requested by the client", "999", vec![Some(event(Bookmark, "7"))], NotResumable::BelowRequested, false),
        ("the same on the new stream", "999", vec![None, Some(event(Bookmark, "7")), Some(event(Bookmark, "8"))], NotResumable::BelowRequested, false),
        ("a CRD that was created again", "5", vec![Some(event(Added, "6")), Some(error(500))], NotResumable::ServerError, false),
        ("an unreadable frame", "5", vec![Some(event(Added, "6")), None, Some(None)], NotResumable::Unreadable, false),
    ];
    for (name, version, frames, expected, remembered) in table {
        let mut session = Session::new(custom(version), start);
        let mut last = Effect::None;
        for next in frames {
            match next {
                Some(next) => last = frame(&mut session, next),
                None => resume(&mut session, start),
            }
        }
        let reason = match last {
            Effect::End(Ending::Clean, reason) => Some(reason),
            _ => session.not_resumable(),
        };
        assert_eq!(reason, Some(expected), "{name}");
        assert_eq!(expected.is_contradiction(), remembered, "{name}");
        assert!(!session.is_resumable(), "{name}");
    }

    // The CRD is gone, or the watch cache of the new one begins after the cursor.
    for status in [404, 410] {
        let mut session = after(&custom("5"), vec![event(Added, "6")], start);
        assert_eq!(lose(&mut session, start), REQUEST);
        assert_eq!(attempt(&mut session, head(status), NONE_LEFT, start), GAVE_UP, "{status}");
    }
    // The cursor is in the future of every server.
    let mut session = after(&custom("5"), vec![event(Added, "6")], start);
    assert_eq!(lose(&mut session, start), REQUEST);
    assert_eq!(attempt(&mut session, head(504), ALL_LEFT, start), REQUEST);
    let later = start + Duration::from_secs(30);
    assert_eq!(attempt(&mut session, head(504), ALL_LEFT, later), GAVE_UP);

    // Another watch of the group has found the contradiction.
    let mut session = after(&custom("5"), vec![event(Added, "6")], start);
    assert!(!session.can_move(MoveReason::Rebalance, start), "not built in");
    assert!(session.can_move(MoveReason::Evacuate, start));
    session.step(Input::GroupUnordered, start);
    assert_eq!(lose(&mut session, start), Effect::End(Ending::Clean, NotResumable::Group));
}

#[test]
fn bookmark_reaches_only_clients_that_asked_for_it() {
    let start = Instant::now();
    for (bookmarks, effect) in [(true, Effect::Forward), (false, Effect::Swallow)] {
        let mut session = Session::new(WatchRequest { bookmarks, ..request("5") }, start);
        assert_eq!(frame(&mut session, event(EventType::Bookmark, "6")), effect);
        assert_eq!(frame(&mut session, event(EventType::Added, "7")), Effect::Forward);
    }
}

#[test]
#[allow(clippy::type_complexity)] // a table
fn frame_on_a_resumed_stream_must_continue_the_history() {
    use EventType::{Added, Bookmark, Modified};
    let clean = |reason| Effect::End(Ending::Clean, reason);
    #[rustfmt::skip]
    let table: Vec<(&str, Vec<(Frame, Effect)>)> = vec![
        ("next events", vec![(event(Added, "11"), Effect::Forward), (event(Added, "12"), Effect::Forward)]),
        ("bookmark at the cursor", vec![(event(Bookmark, "10"), Effect::Swallow)]),
        ("one repeated event", vec![(event(Added, "10"), Effect::Discard), (event(Added, "11"), Effect::Forward)]),
        ("two repeated events", vec![(event(Added, "9"), Effect::Discard), (event(Added, "10"), DIVERGED)]),
        ("a repeated event later", vec![(event(Added, "11"), Effect::Forward), (event(Modified, "11"), Effect::Discard)]),
        ("410", vec![(error(410), Effect::NextEndpoint)]),
        ("another error", vec![(error(500), Effect::NextEndpoint)]),
        ("a repeated event, then 410", vec![(event(Added, "10"), Effect::Discard), (error(410), Effect::NextEndpoint)]),
        ("410 later", vec![(event(Added, "11"), Effect::Forward), (error(410), Effect::Withhold)]),
        ("another error later", vec![(event(Added, "11"), Effect::Forward), (error(500), Effect::Forward)]),
        ("unreadable", vec![(None, clean(NotResumable::Unreadable))]),
        ("version is not a number", vec![(event(Added, "x"), DIVERGED)]),
        ("version jumps", vec![(event(Added, "1152921504606846976"), clean(NotResumable::VersionJumped))]),
        ("bookmarks of a store that is behind", vec![(event(Bookmark, "3"), Effect::Discard), (event(Bookmark, "4"), DIVERGED)]),
    ];
    let start = Instant::now();
    for (name, frames) in table {
        let mut session = after(&request("5"), vec![event(Added, "10")], start);
        resume(&mut session, start);
        for (next, effect) in frames {
            assert_eq!(frame(&mut session, next), effect, "{name}: {next:?}");
        }
    }
}

#[test]
fn oversized_frame_prevents_resuming_until_the_next_frame() {
    let start = Instant::now();
    let ordered = || after(&request("5"), vec![event(EventType::Added, "10")], start);
    let piece = |session: &mut Session, begins, ends| {
        session.step(Input::OversizedPiece { begins, ends }, start)
    };
    let mut session = ordered();
    piece(&mut session, true, false);
    assert_eq!(session.not_resumable(), Some(NotResumable::Oversized));
    let incomplete = Effect::End(Ending::Reset, NotResumable::Oversized);
    assert_eq!(lose(&mut session, start), incomplete, "within the frame");
    let mut session = ordered();
    piece(&mut session, true, false);
    piece(&mut session, false, true);
    assert!(!session.is_resumable(), "after the frame, whose version is unknown");
    assert_eq!(session.ending(), Ending::Clean);
    assert_eq!(frame(&mut session, event(EventType::Modified, "12")), Effect::Forward);
    assert_eq!(session.not_resumable(), None);
    resume(&mut session, start);
    let unparsed = Effect::End(Ending::Clean, NotResumable::Oversized);
    assert_eq!(piece(&mut session, true, true), unparsed, "first frame of a resumed stream");
}

#[test]
fn resuming_is_limited_by_time_left_and_by_rate() {
    let start = Instant::now();
    let at = |ms| start + Duration::from_millis(ms);
    let late = Effect::End(Ending::Clean, NotResumable::Late);
    let too_often = Effect::End(Ending::Clean, NotResumable::TooOften);
    let mut session = after(&request("5"), vec![event(EventType::Added, "6")], start);
    resume(&mut session, at(298_000));
    let query = session.resume_query("timeoutSeconds=300", at(298_000));
    assert!(query.starts_with("timeoutSeconds=2&"), "{query}");
    assert_eq!(lose(&mut session, at(298_001)), late, "less than 2 s left");

    for (loss, effect) in [(20, too_often), (60_020, REQUEST)] {
        let mut session = Session::new(WatchRequest { timeout: None, ..request("5") }, start);
        for _ in 0..MAX_RESUMES {
            resume(&mut session, at(10));
        }
        assert_eq!(lose(&mut session, at(loss)), effect, "{loss} ms");
    }
}

#[test]
fn move_needs_a_cursor_and_continues_there() {
    let start = Instant::now();
    let at = |ms| start + Duration::from_millis(ms);
    let can_move = |session: &Session, ms| session.can_move(MoveReason::Rebalance, at(ms));
    let initial = after(&WatchRequest { version: None, ..request("5") }, vec![], start);
    assert!(!can_move(&initial, 0), "initial events");
    let mut session = after(&request("5"), vec![event(EventType::Added, "6")], start);
    assert!(!can_move(&session, 270_001), "less than 30 s left");
    assert!(can_move(&session, 1));
    session.step(Input::MoveStarted(MoveReason::Rebalance), at(1));
    assert_eq!(cursor(&session, at(1)).as_deref(), Some("6"));
    session.step(Input::MoveEnded { moved: false }, at(2));
    assert!(!can_move(&session, 60_000), "once a minute");
    assert_eq!(frame(&mut session, event(EventType::Added, "7")), Effect::Forward, "not moved");
    assert!(can_move(&session, 60_001));
    session.step(Input::MoveStarted(MoveReason::Rebalance), at(60_001));
    session.step(Input::MoveEnded { moved: true }, at(60_002));
    assert_eq!(frame(&mut session, event(EventType::Added, "7")), Effect::Discard);
    assert_eq!(frame(&mut session, event(EventType::Added, "8")), Effect::Forward);

    // The first frame shows that the history of the new endpoint is too short.
    let mut session = after(&request("5"), vec![event(EventType::Added, "6")], start);
    session.step(Input::MoveStarted(MoveReason::Rebalance), at(1));
    session.step(Input::MoveEnded { moved: true }, at(1));
    assert_eq!(frame(&mut session, error(410)), Effect::NextEndpoint);
    assert_eq!(reject(&mut session, false, ALL_LEFT, at(2)), REQUEST);
    assert_eq!(cursor(&session, at(2)).as_deref(), Some("6"));

    let session = after(&request("5"), vec![event(EventType::Unknown, "6")], start);
    assert!(!can_move(&session, 3));
}

#[test]
fn evacuation_is_limited_to_half_of_the_resumes_of_a_minute() {
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    let mut session = after(&request("5"), vec![], start);
    for n in 0..u64::from(MAX_RESUMES) / 2 {
        assert!(session.can_move(MoveReason::Evacuate, at(2 * n)), "{n}");
        session.step(Input::MoveStarted(MoveReason::Evacuate), at(2 * n));
        session.step(Input::MoveEnded { moved: true }, at(2 * n));
        assert!(!session.can_move(MoveReason::Evacuate, at(2 * n + 1)), "within 2 s");
    }
    assert!(!session.can_move(MoveReason::Evacuate, at(30)));
    assert!(session.can_move(MoveReason::Drain, at(30)));
    assert!(session.can_move(MoveReason::Evacuate, at(60)));
}

/// The session withholds a 410 if another endpoint can continue the watch. In all other cases, and for every
/// other code, the client receives the error.
#[test]
fn error_410_is_withheld_while_other_endpoints_are_asked() {
    use EventType::{Added, Modified};
    let start = Instant::now();
    let aggregated = || WatchRequest { resumable_group: false, ..request("5") };
    let (withheld, forwarded) = (Effect::Withhold, Effect::Forward);
    // Name, request, frames before the error, its code; expected: the effect, and the version of the next
    // request, `None` for the original request.
    for (name, request, before, code, effect, continues_at) in [
        ("first frame", request("5"), vec![], 410, withheld, Some("5")),
        ("first frame, aggregated group", aggregated(), vec![], 410, withheld, None),
        ("later", request("5"), vec![event(Added, "7")], 410, withheld, Some("7")),
        ("later, aggregated group", aggregated(), vec![event(Added, "7")], 410, forwarded, None),
        ("another code", request("5"), vec![], 500, forwarded, None),
        ("without a version", request(""), vec![], 410, forwarded, None),
        ("initial events", request(""), vec![event(Added, "7")], 410, forwarded, None),
        ("after a lower version", request("5"), vec![event(Modified, "4")], 410, forwarded, None),
    ] {
        let withholding = || {
            let mut session = after(&request, before.clone(), start);
            assert_eq!(frame(&mut session, error(code)), effect, "{name}");
            session
        };
        let mut session = withholding();
        if effect == forwarded {
            let ending = session.ending();
            let loss = lose(&mut session, start);
            assert!(matches!(loss, Effect::End(how, _) if how == ending), "{name}: {loss:?}");
            continue;
        }
        assert_eq!(reject(&mut session, true, ALL_LEFT, start), REQUEST, "{name}");
        assert!(session.withholds_error(), "{name}");
        assert_eq!(cursor(&session, start).as_deref(), continues_at, "{name}");
        // The history of the next endpoint is too short as well, and no endpoint is left.
        assert_eq!(attempt(&mut session, head(200), ALL_LEFT, start), Effect::None, "{name}");
        assert_eq!(frame(&mut session, error(410)), Effect::NextEndpoint, "{name}");
        assert_eq!(reject(&mut session, false, NONE_LEFT, start), TOO_OLD, "{name}: none left");
        assert_eq!(session.take_error_event().as_deref(), Some(&b"410"[..]), "{name}");
        // The other endpoint connects again, or is out of service.
        for (state, next) in
            [(Connecting, REQUEST), (Suspect, REQUEST), (Degraded, REQUEST), (Ejected, TOO_OLD)]
        {
            let mut session = withholding();
            let others = [is_in(1, Ready), is_in(2, state)];
            assert_eq!(reject(&mut session, true, &others, start), next, "{name}: {state:?}");
        }
        // The next endpoint does not answer in time.
        let late = start + Duration::from_secs(3);
        let no_answer = AttemptResult::NoHead { outage: true };
        let mut session = withholding();
        reject(&mut session, true, ALL_LEFT, start);
        assert_eq!(attempt(&mut session, no_answer, ALL_LEFT, late), TOO_OLD, "{name}: too late");
        let over_budget = Effect::End(Ending::Withheld, NotResumable::OverBudget);
        for (reason, end) in [
            (NotResumable::OverBudget, over_budget),
            (NotResumable::Shutdown, TOO_OLD),
            (NotResumable::GaveUp, TOO_OLD),
            (NotResumable::Unproven, Effect::End(Ending::Clean, NotResumable::Unproven)),
        ] {
            let mut session = withholding();
            reject(&mut session, true, ALL_LEFT, start);
            assert_eq!(session.step(Input::Stop(reason), start), end, "{name}: {reason:?}");
        }
    }
    // Withholding counts as a resume.
    let mut session = after(&request("5"), vec![], start);
    let versions = ["6", "7", "8", "9", "10", "11", "12", "13", "14", "15", "16", "17", "18"];
    for (n, version) in (0..).zip(versions) {
        frame(&mut session, event(Added, version));
        assert_eq!(frame(&mut session, error(410)), Effect::Withhold);
        let next = reject(&mut session, true, ALL_LEFT, start);
        assert_eq!(next, if n < MAX_RESUMES { REQUEST } else { TOO_OLD });
        if n < MAX_RESUMES {
            attempt(&mut session, head(200), NONE_LEFT, start);
        }
    }
}

/// An impossible input panics with debug assertions. Without them the watch ends.
#[test]
fn step_ends_a_watch_at_an_impossible_input() {
    let now = Instant::now();
    let outage_ended = || Input::OutageEnded { held: Duration::ZERO };
    let failed = || Input::AttemptFailed {
        result: AttemptResult::NoHead { outage: false },
        endpoint: None,
        endpoints: ALL_LEFT,
    };
    for (name, input) in
        [("accepted", Input::Accepted), ("outage ended", outage_ended()), ("failed", failed())]
    {
        let mut session = after(&request("5"), vec![], now);
        let step = std::panic::AssertUnwindSafe(|| session.step(input, now));
        let result = std::panic::catch_unwind(step);
        assert_eq!(result.is_err(), cfg!(debug_assertions), "{name}");
        if let Ok(effect) = result {
            let ends = Effect::End(Ending::Clean, NotResumable::InternalError);
            assert_eq!(effect, ends, "{name}");
        }
    }
}

#[test]
fn attempt_result_leads_to_another_attempt_or_to_the_end() {
    let start = Instant::now();
    let later = start + Duration::from_secs(30);
    let unreachable = AttemptResult::NoHead { outage: false };
    let busy = AttemptResult::Head {
        status: 503,
        same_content_type: true,
        retry_after: Some(Duration::from_secs(31)),
    };
    let other_type =
        AttemptResult::Head { status: 200, same_content_type: false, retry_after: None };
    let ejected = &[is_in(1, Ready), is_in(2, Ejected)];
    let alone = &[is_in(1, Ready)];
    let starting = |key| EndpointCondition { is_starting: true, ..is_in(key, Degraded) };
    let later_request =
        Effect::Request { max_jitter: Duration::ZERO, pause: Duration::from_secs(1) };
    for (result, endpoints, now, effect) in [
        (head(200), NONE_LEFT, later, Effect::None),
        (head(503), ALL_LEFT, start, REQUEST),
        (head(503), ejected, start, REQUEST),
        (head(503), ALL_LEFT, later, GAVE_UP),
        (busy, alone, start, GAVE_UP),
        (busy, ALL_LEFT, start, REQUEST),
        (head(410), ALL_LEFT, start, REQUEST),
        (head(410), ejected, start, GAVE_UP),
        (head(410), alone, start, GAVE_UP),
        (head(406), ALL_LEFT, start, REQUEST),
        (head(406), ejected, start, GAVE_UP),
        (other_type, ALL_LEFT, start, REQUEST),
        (other_type, ejected, start, GAVE_UP),
        (other_type, alone, start, GAVE_UP),
        (AttemptResult::ErrorEvent, ALL_LEFT, start, REQUEST),
        (AttemptResult::ErrorEvent, alone, start, GAVE_UP),
        (unreachable, ALL_LEFT, start, REQUEST),
        (AttemptResult::NoHead { outage: true }, NONE_LEFT, start, Effect::Hold),
        (head(403), ALL_LEFT, start, REQUEST),
        (head(401), ALL_LEFT, start, REQUEST),
        (head(403), ejected, start, GAVE_UP),
        (head(403), &[is_in(1, Ready), is_in(2, Degraded)], start, GAVE_UP),
        (head(403), &[starting(1), is_in(2, Degraded)], start, REQUEST),
        (head(403), &[starting(1)], start, later_request),
        (head(403), &[starting(1)], later, GAVE_UP),
        (head(403), &[is_in(1, Ready), starting(2)], start, GAVE_UP),
        (head(404), ALL_LEFT, start, GAVE_UP),
    ] {
        let mut session = after(&request("5"), vec![event(EventType::Added, "6")], start);
        assert_eq!(lose(&mut session, start), REQUEST);
        let next = attempt(&mut session, result, endpoints, now);
        assert_eq!(next, effect, "{result:?} {endpoints:?}");
    }

    // If the client may get another encoding, one short attempt waits for an endpoint that connects.
    let mut session = after(&request("5"), vec![event(EventType::Added, "6")], start);
    assert_eq!(lose(&mut session, start), REQUEST);
    assert_eq!(session.attempt_timeout(), Duration::from_secs(10));
    let connecting = &[is_in(1, Ready), is_in(2, Connecting)];
    assert_eq!(attempt(&mut session, head(406), connecting, start), REQUEST);
    assert_eq!(session.attempt_timeout(), Duration::from_secs(1));
    assert_eq!(attempt(&mut session, unreachable, connecting, start), GAVE_UP);

    // A watch whose initial events are incomplete cannot end cleanly.
    let mut session = Session::new(request(""), start);
    assert_eq!(lose(&mut session, start), REQUEST);
    let reset = Effect::End(Ending::Reset, NotResumable::GaveUp);
    assert_eq!(attempt(&mut session, head(404), ALL_LEFT, start), reset);
}

/// Executes the effects of a session in simulated time; attempts have these results. Returns the first effect
/// that needs no execution, the time that has passed since `start`, and the number of attempts.
fn run(
    session: &mut Session,
    mut effect: Effect,
    mut results: impl Iterator<Item = AttemptResult>,
    start: Instant,
) -> (Effect, Duration, u32) {
    let (mut now, mut attempts) = (start, 0);
    loop {
        effect = match effect {
            Effect::Request { max_jitter, pause } => {
                now += pause.max(max_jitter / 2);
                attempts += 1;
                let result = results.next().expect("a result");
                if result.is_accepted() {
                    session.step(Input::Accepted, now)
                } else {
                    let endpoint = Some(ASKED);
                    session
                        .step(Input::AttemptFailed { result, endpoint, endpoints: ALL_LEFT }, now)
                }
            }
            Effect::Hold => {
                let held = Duration::from_secs(60);
                now += held;
                session.step(Input::OutageEnded { held }, now)
            }
            Effect::HoldUntilDeadline => {
                now = session.deadline().expect("a deadline");
                session.step(Input::Stop(NotResumable::Expired), now)
            }
            other => return (other, now - start, attempts),
        };
    }
}

#[test]
fn round_of_attempts_ends_after_30_seconds() {
    let start = Instant::now();
    let mut session = Session::new(request("5"), start);
    let effect = session.step(Input::StreamLost { quiet: true }, start);
    let max_jitter = Duration::from_millis(200);
    let expected = Effect::Request { max_jitter, pause: Duration::ZERO };
    assert_eq!(effect, expected, "a quiet watch");
    let busy = AttemptResult::Head {
        status: 429,
        same_content_type: true,
        retry_after: Some(Duration::ZERO),
    };
    let (end, took, attempts) = run(&mut session, effect, std::iter::repeat(busy), start);
    assert_eq!(end, GAVE_UP);
    assert!((30..32).contains(&took.as_secs()), "{took:?}");
    assert!((20..40).contains(&attempts), "{attempts}");
}

#[test]
fn outage_holds_the_watch_and_then_begins_a_new_round() {
    let start = Instant::now();
    let mut session = Session::new(request("5"), start);
    let effect = session.step(Input::StreamLost { quiet: false }, start);
    let answers = [AttemptResult::NoHead { outage: true }, head(503), head(200)];
    let (end, took, attempts) = run(&mut session, effect, answers.into_iter(), start);
    assert_eq!((end, attempts), (Effect::None, 3));
    // 60 s of outage, half of 5 s of jitter, and the jitter of the other two attempts.
    assert!((62_500..62_600).contains(&took.as_millis()), "{took:?}");
}

#[test]
fn outage_holds_the_watch_until_its_deadline() {
    let start = Instant::now();
    let asked = WatchRequest { timeout: Some(Duration::from_secs(61)), ..request("5") };
    let mut session = Session::new(asked, start);
    let effect = lose(&mut session, start);
    let answers = std::iter::once(AttemptResult::NoHead { outage: true });
    let (end, took, _) = run(&mut session, effect, answers, start);
    assert_eq!(end, Effect::End(Ending::Clean, NotResumable::Expired));
    assert_eq!(took, Duration::from_secs(61));
}

/// What follows an accepted attempt.
type Next<'a> = &'a dyn Fn(&mut Session) -> Effect;

/// A round ends with the loss of the next stream, an event that confirms the new one, a move, or an outage.
#[test]
fn exclusions_of_a_round_end_with_it() {
    let start = Instant::now();
    let refused = || {
        let mut session = after(&request("5"), vec![event(EventType::Added, "6")], start);
        lose(&mut session, start);
        assert_eq!(attempt(&mut session, head(410), ALL_LEFT, start), REQUEST);
        assert_eq!(session.excluded_at(start), [ASKED]);
        assert!(session.last_refused() && session.may_ask_older());
        session
    };
    let moved = |s: &mut Session, moved| {
        s.step(Input::MoveStarted(MoveReason::Drain), start);
        s.step(Input::MoveEnded { moved }, start)
    };
    let ends: [(&str, Next<'_>, bool); 6] = [
        ("accepted", &|_| Effect::None, false),
        ("a repeated event", &|s| frame(s, event(EventType::Added, "6")), false),
        ("the next event", &|s| frame(s, event(EventType::Added, "7")), true),
        ("lost again", &|s| lose(s, start), true),
        ("moved", &|s| moved(s, true), true),
        ("not moved", &|s| moved(s, false), false),
    ];
    for (name, end, is_over) in ends {
        let mut session = refused();
        assert_eq!(attempt(&mut session, head(200), ALL_LEFT, start), Effect::None);
        end(&mut session);
        assert_eq!(session.excluded_at(start).is_empty(), is_over, "{name}");
        assert_eq!(session.last_refused(), !is_over, "{name}");
    }
    let mut session = refused();
    let outage = AttemptResult::NoHead { outage: true };
    assert_eq!(attempt(&mut session, outage, ALL_LEFT, start), Effect::Hold);
    assert!(session.excluded_at(start).is_empty() && !session.last_refused());
}

#[test]
fn session_is_small() {
    // Every running watch has a session, and a node may have thousands of watches.
    assert!(size_of::<Session>() <= 240, "{}", size_of::<Session>());
    assert!(size_of::<ResourceVersion>() <= 24);
}

#[test]
fn lost_history_ends_each_watch_that_follows_versions_with_the_error_event() {
    let withheld = Effect::End(Ending::Withheld, NotResumable::HistoryLost);
    let reset = Effect::End(Ending::Reset, NotResumable::HistoryLost);
    let at_version = || request("5");
    let initial = || request("");
    let start = Instant::now();
    let added = || event(EventType::Added, "7");
    let modified = || event(EventType::Modified, "8");
    for (name, request, frames, is_lost, follows, expected) in [
        ("at a version", at_version(), vec![], false, true, withheld),
        ("after events", at_version(), vec![modified()], false, true, withheld),
        ("resuming", at_version(), vec![modified()], true, true, withheld),
        ("after the initial events", initial(), vec![added(), modified()], false, true, withheld),
        ("in passthrough", at_version(), vec![modified(), modified()], false, true, withheld),
        ("among the initial events", initial(), vec![added()], false, false, reset),
        ("unreadable", at_version(), vec![None], false, true, reset),
    ] {
        let mut session = after(&request, frames, start);
        if is_lost {
            lose(&mut session, start);
        }
        assert_eq!(session.follows_versions(), follows, "{name}");
        let error_event = Bytes::from_static(b"410");
        let effect = session.step(Input::HistoryLost { error_event: error_event.clone() }, start);
        assert_eq!(effect, expected, "{name}");
        let event = (expected == withheld).then_some(error_event);
        assert_eq!(session.take_error_event(), event, "{name}");
        assert!(!session.follows_versions(), "{name}: it has ended");
    }
}

#[test]
fn cursor_version_is_that_of_the_last_event_or_of_the_request() {
    let start = Instant::now();
    let version = |query, frames| after(&request(query), frames, start).cursor_version();
    assert_eq!(version("5", vec![]), Some(5));
    assert_eq!(version("5", vec![event(EventType::Added, "9")]), Some(9));
    assert_eq!(version("", vec![]), None);
}
