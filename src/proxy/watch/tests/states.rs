//! The tables of the state machine: phases, frames on a first and on a resumed stream, losses.

use super::super::allowance::RESUMES_A_MINUTE;
use super::super::codec::event::{Event, EventType, Unreadable};
use super::super::codec::version::ResourceVersion;
use super::super::request::Asked;
use super::super::resume::{Answer, BRIEF, Shun};
use super::super::state::{Phase, WatchState};
use super::super::verdict::{AfterAttempt, AfterLoss, Bar, Ending, Obstacle, Stop, Verdict};
use super::model::asked;
use std::time::{Duration, Instant};

const RESUME: AfterLoss = AfterLoss::Resume(Duration::ZERO);
const RESTART: AfterLoss = AfterLoss::Restart(Duration::ZERO);
const CLEAN: AfterLoss = AfterLoss::End(Ending::Clean, Stop::NotResumable);
const RESET: AfterLoss = AfterLoss::End(Ending::Reset, Stop::NotResumable);
const CLEAN_IN_INITIAL: AfterLoss = AfterLoss::End(Ending::Clean, Stop::Initial);
const CLEAN_WITHOUT_VERSION: AfterLoss = AfterLoss::End(Ending::Clean, Stop::NoVersion);
const PARTIAL: AfterLoss = AfterLoss::End(Ending::Reset, Stop::Initial);

#[allow(clippy::unnecessary_wraps)] // a frame, as the state takes it
fn event(event_type: EventType, version: &'static str) -> Result<Event<'static>, Unreadable> {
    Ok(Event {
        event_type,
        version: Some(version.as_bytes()),
        initial_events_end: false,
        status_code: None,
    })
}

#[allow(clippy::unnecessary_wraps)] // likewise
fn error(code: u16) -> Result<Event<'static>, Unreadable> {
    Ok(Event {
        event_type: EventType::Error,
        version: None,
        initial_events_end: false,
        status_code: Some(code),
    })
}

fn initial_events_end(version: &'static str) -> Result<Event<'static>, Unreadable> {
    event(EventType::Bookmark, version).map(|e| Event { initial_events_end: true, ..e })
}

type Frames = Vec<Result<Event<'static>, Unreadable>>;

fn after(asked: &Asked, frames: Frames, start: Instant) -> WatchState {
    let mut state = WatchState::new(asked, start);
    for frame in frames {
        state.on_frame(frame);
    }
    state
}

#[test]
#[allow(clippy::type_complexity)] // it is a table
fn phases_and_losses() {
    use EventType::{Added, Bookmark, Deleted, Modified, Unknown};
    let fresh = || asked("");
    let listed = || Asked { send_initial_events: true, ..asked("5") };
    let watch_list = || Asked { bookmarks: true, ..listed() };
    let from_present = || Asked { from_present: true, ..asked("") };
    let foreign = |version| Asked { resumable_group: false, ..asked(version) };
    let start = Instant::now();
    #[rustfmt::skip]
    let table: Vec<(&str, Asked, Frames, Phase, Option<&str>, AfterLoss)> = vec![
        ("ordered, nothing yet", asked("5"), vec![], Phase::Ordered, Some("5"), RESUME),
        ("ordered", asked("5"), vec![event(Added, "9"), event(Deleted, "10")], Phase::Ordered, Some("10"), RESUME),
        ("a quiet one with a bookmark", asked("5"), vec![event(Bookmark, "9")], Phase::Ordered, Some("9"), RESUME),
        ("a bookmark at the cursor", asked("5"), vec![event(Added, "9"), event(Bookmark, "9")], Phase::Ordered, Some("9"), RESUME),
        ("an event at the cursor", asked("5"), vec![event(Added, "9"), event(Modified, "9")], Phase::Ordered, Some("9"), CLEAN),
        ("going back", asked("5"), vec![event(Added, "4")], Phase::Ordered, Some("5"), CLEAN),
        ("a bookmark going back", asked("5"), vec![event(Added, "8"), event(Bookmark, "7")], Phase::Ordered, Some("8"), CLEAN),
        ("not a number", asked("5"), vec![event(Added, "abc")], Phase::Ordered, Some("5"), CLEAN),
        ("an unknown type", asked("5"), vec![event(Unknown, "7")], Phase::Ordered, Some("7"), CLEAN),
        ("too old", asked("5"), vec![error(410)], Phase::Ordered, Some("5"), RESUME),
        ("another error", asked("5"), vec![error(500)], Phase::Ordered, Some("5"), CLEAN),
        ("unreadable", asked("5"), vec![Err(Unreadable)], Phase::Ordered, Some("5"), RESET),
        ("initial, nothing yet", fresh(), vec![], Phase::Initial, None, RESTART),
        ("resourceVersion=0", asked("0"), vec![], Phase::Initial, None, RESTART),
        ("initial", fresh(), vec![event(Added, "90"), event(Added, "8")], Phase::Initial, None, PARTIAL),
        ("initial and over", fresh(), vec![event(Added, "90"), event(Added, "8"), event(Modified, "91")], Phase::Ordered, Some("91"), RESUME),
        ("initial and empty", fresh(), vec![event(Bookmark, "50")], Phase::Ordered, Some("50"), RESUME),
        ("initial and an error", fresh(), vec![error(410)], Phase::Initial, None, RESET),
        ("initial and unreadable", fresh(), vec![Err(Unreadable)], Phase::Initial, None, RESET),
        ("list, nothing yet", listed(), vec![], Phase::Initial, None, RESTART),
        ("list", listed(), vec![event(Added, "9"), event(Bookmark, "10"), event(Modified, "11")], Phase::Initial, None, PARTIAL),
        ("list and over", listed(), vec![event(Added, "9"), initial_events_end("10")], Phase::Ordered, Some("10"), RESUME),
        ("WatchList, nothing yet", watch_list(), vec![], Phase::Initial, None, RESTART),
        ("WatchList", watch_list(), vec![event(Added, "9"), event(Bookmark, "10")], Phase::Initial, None, CLEAN_IN_INITIAL),
        ("WatchList and unreadable", watch_list(), vec![event(Added, "9"), Err(Unreadable)], Phase::Initial, None, RESET),
        ("WatchList and over", watch_list(), vec![event(Added, "9"), initial_events_end("10")], Phase::Ordered, Some("10"), RESUME),
        ("from the present, nothing yet", from_present(), vec![], Phase::Initial, None, CLEAN_WITHOUT_VERSION),
        ("from the present and a bookmark", from_present(), vec![event(Bookmark, "9")], Phase::Ordered, Some("9"), RESUME),
        ("from the present and an event", from_present(), vec![event(Added, "9")], Phase::Initial, None, PARTIAL),
        ("foreign, nothing yet", foreign("5"), vec![], Phase::Ordered, Some("5"), RESTART),
        ("foreign, ordered", foreign("5"), vec![event(Added, "6")], Phase::Ordered, Some("6"), CLEAN),
        ("foreign, initial", foreign(""), vec![event(Added, "6")], Phase::Initial, None, RESET),
    ];
    for (name, asked, frames, phase, cursor, loss) in table {
        let mut state = after(&asked, frames, start);
        assert_eq!(state.phase(), phase, "{name}");
        assert_eq!(state.cursor().map(ToString::to_string).as_deref(), cursor, "{name}");
        assert_eq!(state.on_lost(start, false, 0), loss, "{name}");
    }
}

#[test]
fn bookmarks_go_to_those_who_asked() {
    let start = Instant::now();
    for (bookmarks, verdict) in [(true, Verdict::Forward), (false, Verdict::Swallow)] {
        let mut state = WatchState::new(&Asked { bookmarks, ..asked("5") }, start);
        assert_eq!(state.on_frame(event(EventType::Bookmark, "6")), verdict);
        assert_eq!(state.on_frame(event(EventType::Added, "7")), Verdict::Forward);
    }
}

#[test]
#[allow(clippy::type_complexity)] // it is a table
fn frames_on_a_resumed_stream() {
    use EventType::{Added, Bookmark, Modified};
    let clean = Verdict::End(Ending::Clean);
    #[rustfmt::skip]
    let table: Vec<(&str, Vec<(Result<Event<'static>, Unreadable>, Verdict)>)> = vec![
        ("news", vec![(event(Added, "11"), Verdict::Forward), (event(Added, "12"), Verdict::Forward)]),
        ("a bookmark at the cursor", vec![(event(Bookmark, "10"), Verdict::Swallow)]),
        ("one stray", vec![(event(Added, "10"), Verdict::Discard), (event(Added, "11"), Verdict::Forward)]),
        ("two strays", vec![(event(Added, "9"), Verdict::Discard), (event(Added, "10"), clean)]),
        ("one stray late", vec![(event(Added, "11"), Verdict::Forward), (event(Modified, "11"), Verdict::Discard)]),
        ("gone", vec![(error(410), Verdict::NextPeer)]),
        ("another error", vec![(error(500), Verdict::NextPeer)]),
        ("a stray, then gone", vec![(event(Added, "10"), Verdict::Discard), (error(410), Verdict::NextPeer)]),
        ("gone later", vec![(event(Added, "11"), Verdict::Forward), (error(410), Verdict::Withhold)]),
        ("another error later", vec![(event(Added, "11"), Verdict::Forward), (error(500), Verdict::Forward)]),
        ("unreadable", vec![(Err(Unreadable), clean)]),
        ("not a number", vec![(event(Added, "x"), clean)]),
    ];
    let start = Instant::now();
    for (name, frames) in table {
        let mut state = after(&asked("5"), vec![event(Added, "10")], start);
        assert_eq!(state.on_lost(start, false, 0), RESUME);
        for (frame, verdict) in frames {
            assert_eq!(state.on_frame(frame), verdict, "{name}: {frame:?}");
        }
    }
}

#[test]
fn frames_above_the_cap() {
    let start = Instant::now();
    let mut state = after(&asked("5"), vec![event(EventType::Added, "10")], start);
    state.on_oversized(true, false);
    assert_eq!(state.obstacle(), Some(Obstacle::Oversized));
    assert_eq!(state.on_lost(start, false, 0), RESET, "in its middle");
    let mut state = after(&asked("5"), vec![event(EventType::Added, "10")], start);
    state.on_oversized(true, false);
    state.on_oversized(false, true);
    assert_eq!(state.on_lost(start, false, 0), CLEAN, "after it: its version is unknown");
    assert_eq!(state.on_frame(event(EventType::Modified, "12")), Verdict::Forward);
    assert_eq!(state.obstacle(), None);
    assert_eq!(state.on_lost(start, false, 0), RESUME, "after the next");
    assert_eq!(
        state.on_oversized(true, true),
        Verdict::End(Ending::Clean),
        "first on a resumed one"
    );
}

#[test]
fn limits_of_resuming() {
    let start = Instant::now();
    let at = |ms| start + Duration::from_millis(ms);
    let mut state = after(&asked("5"), vec![event(EventType::Added, "6")], start);
    assert_eq!(state.on_lost(at(298_000), false, 0), RESUME);
    assert_eq!(state.reissue(at(298_000)).remaining, Some(Duration::from_secs(2)));
    assert_eq!(
        state.on_lost(at(298_001), false, 0),
        AfterLoss::End(Ending::Clean, Stop::Late),
        "less than 2 s left"
    );

    let mut state = WatchState::new(&Asked { timeout: None, ..asked("5") }, start);
    for _ in 0..RESUMES_A_MINUTE {
        assert_eq!(state.on_lost(at(10), false, 0), RESUME);
    }
    assert_eq!(
        state.on_lost(at(20), false, 0),
        AfterLoss::End(Ending::Clean, Stop::TooOften),
        "too many in a minute"
    );
    assert_eq!(state.on_lost(at(60_020), false, 0), RESUME, "the next minute");

    state.forbid(Bar::UnknownEvent);
    assert_eq!(state.on_lost(at(60_030), false, 0), CLEAN);
}

#[test]
fn a_watch_moves_only_where_nothing_can_be_lost() {
    let start = Instant::now();
    let at = |ms| start + Duration::from_millis(ms);
    let movable = |state: &WatchState, ms| state.reissue_to_move(at(ms)).is_some();
    let initial = after(&Asked { version: None, ..asked("5") }, vec![], start);
    assert!(!movable(&initial, 0), "still listing");
    let mut state = after(&asked("5"), vec![event(EventType::Added, "6")], start);
    assert!(!movable(&state, 270_001), "it ends soon anyway");
    let reissue = state.reissue_to_move(at(1)).unwrap();
    assert_eq!(reissue.cursor.map(ToString::to_string).as_deref(), Some("6"));

    state.tried_to_move(at(1));
    assert!(!movable(&state, 60_000), "not again so soon");
    assert_eq!(state.on_frame(event(EventType::Added, "7")), Verdict::Forward, "it stayed");
    assert!(movable(&state, 60_001));
    state.moved(at(60_001));
    assert_eq!(state.on_frame(event(EventType::Added, "7")), Verdict::Discard);
    assert_eq!(state.on_frame(event(EventType::Added, "8")), Verdict::Forward);

    // The history there may be too short, which only the first frame tells.
    let mut state = after(&asked("5"), vec![event(EventType::Added, "6")], start);
    state.moved(at(1));
    assert_eq!(state.on_frame(error(410)), Verdict::NextPeer);
    let next = state.on_error_event("application/json", true, at(2), 0);
    assert!(matches!(next, AfterAttempt::Another { shun: Shun::Round, .. }), "{next:?}");
    state.forbid(Bar::UnknownEvent);
    assert!(!movable(&state, 3));
}

#[test]
fn bookmarks_that_stay_away_are_told_once() {
    let bookmark = |version| event(EventType::Bookmark, version);
    let mut state = after(&asked("5"), vec![event(EventType::Added, "6")], Instant::now());
    assert!((0..9).all(|_| !state.has_gone_stale()), "it never had any");
    state.on_frame(bookmark("7"));
    let told = |state: &mut WatchState| (0..6).map(|_| state.has_gone_stale()).collect::<Vec<_>>();
    assert_eq!(told(&mut state), [false, false, false, true, false, false]);
    state.on_frame(event(EventType::Modified, "8"));
    assert!(!state.has_gone_stale(), "events are no bookmarks");
    state.on_frame(bookmark("9"));
    assert_eq!(told(&mut state), [false, false, false, true, false, false]);
}

/// A 410 where the watch can go on elsewhere is withheld, whoever asked for it; where it cannot,
/// and anything else, is the client's.
#[test]
fn a_410_is_not_the_last_word() {
    use EventType::{Added, Modified};
    let start = Instant::now();
    let foreign = || Asked { resumable_group: false, ..asked("5") };
    let (withheld, forwarded) = (Verdict::Withhold, Verdict::Forward);
    // What came before it, and where the next one is asked to begin: `None`: as the client asked.
    for (name, asked, before, code, verdict, cursor) in [
        ("its first answer", asked("5"), vec![], 410, withheld, Some("5")),
        ("its first answer, a group of others", foreign(), vec![], 410, withheld, None),
        ("later", asked("5"), vec![event(Added, "7")], 410, withheld, Some("7")),
        ("later, a group of others", foreign(), vec![event(Added, "7")], 410, forwarded, None),
        ("another code", asked("5"), vec![], 500, forwarded, None),
        ("without a position", asked(""), vec![], 410, forwarded, None),
        ("still listing", asked(""), vec![event(Added, "7")], 410, forwarded, None),
        ("after going back", asked("5"), vec![event(Modified, "4")], 410, forwarded, None),
    ] {
        let mut state = after(&asked, before, start);
        assert_eq!(state.on_frame(error(code)), verdict, "{name}");
        if verdict == forwarded {
            let loss = state.on_lost(start, false, 0);
            assert!(
                matches!(loss, AfterLoss::End(how, _) if how == state.ending()),
                "{name}: {loss:?}"
            );
            continue;
        }
        let again = AfterAttempt::Another { delay: Duration::ZERO, shun: Shun::Round };
        let json = "application/json";
        assert_eq!(state.on_error_event(json, true, start, 0), again, "{name}");
        assert_eq!(state.reissue(start).cursor.map(ResourceVersion::as_str), cursor, "{name}");
        // The next one has no more of it, and then there is nobody left; or it takes too long.
        let next = state.on_frame(error(410));
        assert!(matches!(next, Verdict::NextPeer | Verdict::Withhold), "{name}: {next:?}");
        let mut late = state;
        let end = AfterAttempt::End(Ending::Clean);
        let answer = late.on_answer(Answer::Unreachable, json, true, start + BRIEF, 0);
        assert_eq!(answer, end, "{name}: too long");
        assert_eq!(late.on_error_event(json, false, start, 0), end, "{name}: nobody left");
    }
    // And it cannot be had for ever.
    let mut state = after(&asked("5"), vec![], start);
    let mut asked_again = 0;
    for version in ["6", "7", "8", "9", "10", "11", "12", "13", "14", "15", "16", "17", "18"] {
        state.on_frame(event(Added, version));
        state.on_frame(error(410));
        let next = state.on_error_event("application/json", true, start, 0);
        asked_again += u32::from(matches!(next, AfterAttempt::Another { .. }));
    }
    assert_eq!(asked_again, RESUMES_A_MINUTE);
}

#[test]
fn attempts() {
    let start = Instant::now();
    let json = "application/json";
    let head = |status| Answer::Head { status, content_type: Some(json), retry_after: None };
    let later = start + Duration::from_secs(30);
    let again = |shun| AfterAttempt::Another { delay: Duration::ZERO, shun };
    for (answer, peers_left, now, wanted) in [
        (head(200), false, later, AfterAttempt::Accept),
        (head(503), true, start, again(Shun::Not)),
        (head(503), true, later, AfterAttempt::End(Ending::Clean)),
        (head(410), true, start, again(Shun::Round)),
        (head(410), false, start, AfterAttempt::End(Ending::Clean)),
        (Answer::ErrorEvent, true, start, again(Shun::Round)),
        (Answer::ErrorEvent, false, start, AfterAttempt::End(Ending::Clean)),
        (Answer::Unreachable, true, start, again(Shun::Not)),
        (head(403), true, start, AfterAttempt::End(Ending::Clean)),
    ] {
        let mut state = after(&asked("5"), vec![event(EventType::Added, "6")], start);
        assert_eq!(state.on_lost(start, false, 0), RESUME);
        assert_eq!(state.on_answer(answer, json, peers_left, now, 0), wanted, "{answer:?}");
    }
    // Somebody who always says "at once" is asked for so long, and no oftener than the jitter allows.
    let mut state = after(&asked("5"), vec![event(EventType::Added, "6")], start);
    assert_eq!(state.on_lost(start, false, 0), RESUME);
    let busy =
        Answer::Head { status: 429, content_type: Some(json), retry_after: Some(Duration::ZERO) };
    let (mut now, mut asked_again) = (start, 0);
    while let AfterAttempt::Another { delay, shun } =
        state.on_answer(busy, json, true, now, u64::MAX / 2)
    {
        assert_eq!(shun, Shun::For(Duration::ZERO));
        now += delay;
        asked_again += 1;
    }
    assert!((20..40).contains(&asked_again), "{asked_again}");
    assert!(now < start + Duration::from_secs(32), "{:?}", now - start);
    assert_eq!(state.ending(), Ending::Clean);

    // An unanswered restart of a watch without a position cannot end cleanly.
    let mut state = WatchState::new(&asked(""), start);
    assert_eq!(state.on_lost(start, false, 0), RESTART);
    let end = AfterAttempt::End(Ending::Reset);
    assert_eq!(state.on_answer(head(403), json, true, start, 0), end);
}
