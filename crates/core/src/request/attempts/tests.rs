//! Tests of each row of the decision tables.

mod properties;

use bytes::Bytes;
use http::Response;

use super::*;
use RequestKind::{Read, Watch, Write};

/// The key of an endpoint, and of a connection.
type Key = u8;
type TestInput = Input<Key, Key>;

/// A failure on connection 10 to endpoint 1, with a rejection that has the status `code`, if it is not 0.
fn failure(stage: Stage, code: u16) -> Failure<Key, Key> {
    let response = (code > 0).then(|| {
        let response = Response::builder().status(code).header("retry-after", "2");
        Box::new((response.body(()).unwrap().into_parts().0, Bytes::new()))
    });
    let version = MissedVersion::default();
    let reason = "lost".to_owned();
    Failure { stage, reason, connection: 10, endpoint: 1, response, version }
}

fn granted(attempt: usize) -> TestInput {
    Input::Granted { attempt }
}

fn responded(attempt: usize) -> TestInput {
    Input::Responded { attempt }
}

fn failed(attempt: usize, stage: Stage, code: u16) -> TestInput {
    Input::Failed { attempt, failure: failure(stage, code), is_given_up: false }
}

fn given_up(attempt: usize) -> TestInput {
    Input::Failed { attempt, failure: failure(Stage::NoHead, 0), is_given_up: true }
}

fn facts(body: BodyState) -> TestInput {
    Input::FailureFacts { connection: ConnectionFacts::default(), body }
}

fn held() -> TestInput {
    facts(BodyState::Held)
}

fn troubled(attempt: usize) -> TestInput {
    Input::Troubled { attempt, has_whole_body: true }
}

fn token(attempt: usize, taken: bool) -> TestInput {
    Input::HedgeToken { attempt, taken, has_better_endpoint: false }
}

fn unreachable(may_hold: bool) -> TestInput {
    Input::NoStream { reason: NoStream::Unreachable("down".to_owned()), may_hold }
}

fn exhausted() -> TestInput {
    let reason = NoStream::Other(StatusError::too_many_requests("full"));
    Input::NoStream { reason, may_hold: true }
}

fn other(may_be_asked: bool) -> TestInput {
    Input::OtherEndpoint { may_be_asked }
}

/// The effect as text, without the parts that other tests check.
fn show(effect: &Effect) -> String {
    match effect {
        Effect::Refuse(refused) => match &**refused {
            Refused::Rejection(response) => format!("Rejection {}", response.0.status.as_u16()),
            Refused::Error(error, refusal) => {
                format!("Error {} {}", error.label, refusal.map_or("-", Refusal::as_str))
            }
        },
        Effect::Hold { .. } => "Hold".to_owned(),
        Effect::Pause { .. } => "Pause".to_owned(),
        Effect::GiveUp { attempt, stage, .. } => format!("GiveUp {attempt} {stage:?}"),
        Effect::Send { attempt } => format!("Send {attempt}"),
        Effect::Respond { attempt } => format!("Respond {attempt}"),
        Effect::TakeHedgeToken { attempt, probe: true } => format!("Probe and Token {attempt}"),
        Effect::TakeHedgeToken { attempt, .. } => format!("Token {attempt}"),
        Effect::Hedge { attempt, exclude } => format!("Hedge {attempt} {exclude}"),
        Effect::AskForOther { budget } => format!("Other {budget:?}"),
        Effect::AskForVersion { may_ask_other } => format!("Version {may_ask_other}"),
        Effect::AskForLongerUp => "Longer up".to_owned(),
        Effect::RecordRejection { pause } => format!("Record {}", pause.as_secs()),
        other => format!("{other:?}"),
    }
}

fn attempts(kind: RequestKind, now: Instant) -> Attempts<Key, Key> {
    Attempts::new(kind, false, now, None)
}

/// Steps through the inputs. The text has the effects, and after `|` the outcomes of hedges.
fn run(kind: RequestKind, inputs: Vec<TestInput>) -> (Attempts<Key, Key>, String) {
    let (now, mut rng) = (Instant::now(), Rng::with_seed(1));
    let mut attempts = attempts(kind, now);
    let effects: Vec<_> =
        inputs.into_iter().map(|input| show(&attempts.step(input, now, &mut rng))).collect();
    let outcomes: Vec<_> = attempts.hedge_outcomes().map(HedgeOutcome::as_str).collect();
    let text = format!("{} | {}", effects.join(", "), outcomes.join(" "));
    (attempts, text.trim_end_matches([' ', '|']).to_owned())
}

#[track_caller]
fn check(kind: RequestKind, inputs: Vec<TestInput>, expected: &str) {
    assert_eq!(run(kind, inputs).1, expected);
}

#[test]
fn step_first_attempt_responds_or_gets_no_stream() {
    check(Read, vec![granted(0), responded(0)], "Send 0, Respond 0");
    check(Read, vec![unreachable(true)], "Error no_upstream -");
    check(Watch, vec![exhausted()], "Error limit -");
    check(Watch, vec![unreachable(false)], "Error no_upstream -");
}

#[test]
fn step_request_that_a_starting_endpoint_refuses_is_sent_to_one_that_has_been_up_longer() {
    let refused = |code| [granted(0), failed(0, Stage::Starting, code), held()];
    let longer_up = || Input::LongerUp { not_asked: Some(vec![1, 3]) };
    let after = |inputs: Vec<TestInput>| {
        refused(403).into_iter().chain([longer_up()]).chain(inputs).collect::<Vec<_>>()
    };
    let asked = "Send 0, ReportFacts, Longer up, Retry, Send 0";
    let refused_again = after(refused(401).into_iter().collect());
    for kind in [Read, Watch] {
        check(kind, after(vec![granted(0), responded(0)]), &format!("{asked}, Respond 0"));
        // The client gets a refusal if no other endpoint answers.
        let none = Input::LongerUp { not_asked: None };
        let inputs = refused(403).into_iter().chain([none]).collect();
        check(kind, inputs, "Send 0, ReportFacts, Longer up, Rejection 403");
        let none = "Send 0, ReportFacts, Longer up, Retry, Rejection 403";
        check(kind, after(vec![unreachable(true)]), none);
    }
    // Only one other is asked.
    check(Read, refused_again, &format!("{asked}, ReportFacts, Rejection 401"));
    // Another rejection says more than the refusal, in whatever order they come.
    let overloaded = [granted(0), failed(0, Stage::Rejected, 429), held()];
    let rejecting = || Input::Rejecting(vec![2]);
    let overloaded_later = after(overloaded.into_iter().chain([rejecting()]).collect());
    check(Read, overloaded_later, &format!("{asked}, ReportFacts, Record 2, Rejection 429"));
    let overloaded =
        vec![granted(0), failed(0, Stage::Rejected, 429), held(), rejecting(), other(true)];
    let then_refused = overloaded.into_iter().chain(refused(403));
    let inputs = then_refused.chain([Input::LongerUp { not_asked: None }]).collect();
    let expected = "Send 0, ReportFacts, Record 2, Other Rejected, Retry, Send 0, ReportFacts, \
                    Longer up, Rejection 429";
    check(Read, inputs, expected);
    let (attempts, _) = run(Read, after(vec![]));
    assert_eq!(attempts.requirements().excluded, [1, 3]);
    // A write is not repeated.
    let inputs = refused(403).into_iter().collect();
    check(Write, inputs, "Send 0, ReportFacts, Rejection 403");
}

#[test]
fn step_new_watch_is_held_until_the_outage_or_the_hold_ends() {
    let ended = || Input::OutageEnded { held: Duration::from_secs(8) };
    let hold = || vec![unreachable(true), ended(), Input::PauseEnded];
    let after_hold = |inputs| hold().into_iter().chain(inputs).collect();
    check(Watch, after_hold(vec![granted(0)]), "Hold, Pause, Acquire, Send 0");
    check(Watch, after_hold(vec![unreachable(false)]), "Hold, Pause, Acquire, Hold");
    let too_many = "Hold, Pause, Acquire, Error limit -";
    check(Watch, after_hold(vec![exhausted()]), too_many);
    check(Watch, vec![unreachable(true), Input::HoldEnded], "Hold, Error no_upstream -");
    // A failure before the hold does not matter after it.
    let failure = [granted(0), failed(0, Stage::NoHead, 0), held()];
    let (attempts, _) = run(Watch, failure.into_iter().chain(hold()).collect());
    let required = attempts.requirements();
    assert!(required.previous_failure.is_none() && required.excluded.is_empty());

    // A rejection is forwarded instead of a hold.
    let mut inputs = vec![granted(0), failed(0, Stage::TooOld, 410), held(), other(true)];
    inputs.push(unreachable(true));
    check(Watch, inputs, "Send 0, ReportFacts, Other TooOld, Retry, Rejection 410");
}

#[test]
fn hold_lasts_for_the_timeout_of_the_watch_and_at_most_30_s() {
    for (timeout, expected) in [(None, 30), (Some(8), 8), (Some(600), 30)] {
        let (now, mut rng) = (Instant::now(), Rng::with_seed(1));
        let timeout = timeout.map(Duration::from_secs);
        let mut attempts = Attempts::<Key, Key>::new(Watch, false, now, timeout);
        let later = now + Duration::from_secs(2);
        let effect = attempts.step(unreachable(true), later, &mut rng);
        let Effect::Hold { until } = effect else { panic!("{effect:?}") };
        assert_eq!(until - now, Duration::from_secs(expected));
        let held = Duration::from_secs(16);
        let delays: Vec<_> = (0..100)
            .map(|_| match attempts.step(Input::OutageEnded { held }, later, &mut rng) {
                Effect::Pause { delay } => delay,
                effect => panic!("{effect:?}"),
            })
            .collect();
        assert!(delays.iter().all(|delay| *delay < Duration::from_secs(2)));
        assert!(delays.iter().any(|delay| *delay > Duration::from_secs(1)));
    }
}

#[test]
fn step_failed_round_follows_the_retry_table() {
    let fail = |stage, code| vec![granted(0), failed(0, stage, code)];
    let with = |stage, code, then: Vec<_>| fail(stage, code).into_iter().chain(then).collect();
    let failed = "Send 0, ReportFacts, ";
    let check = |kind, inputs, expected: &str| check(kind, inputs, &format!("{failed}{expected}"));
    check(Read, with(Stage::NoHead, 0, vec![held()]), "Retry");
    check(Write, with(Stage::NotSent, 0, vec![held()]), "Retry");
    check(Write, with(Stage::NoHead, 0, vec![held()]), "Error unknown_outcome unsafe");
    check(Write, with(Stage::Unprocessed, 503, vec![facts(BodyState::NotHeld)]), "Rejection 503");
    let not_held = "Error unprocessed not_held";
    check(Write, with(Stage::Unprocessed, 0, vec![facts(BodyState::NotHeld)]), not_held);
    let aborted = vec![facts(BodyState::Aborted)];
    check(Read, with(Stage::NoHead, 0, aborted), "Error bad_request -");
    // A 410 is asked of other endpoints, and kept.
    check(Watch, with(Stage::TooOld, 410, vec![held(), other(true)]), "Other TooOld, Retry");
    let refused = "Other TooOld, Rejection 410";
    check(Watch, with(Stage::TooOld, 410, vec![held(), other(false)]), refused);
    // An overload is asked of one other endpoint.
    let rejecting = || Input::Rejecting(vec![1, 2]);
    let once = vec![held(), rejecting(), other(true)];
    check(Read, with(Stage::Rejected, 429, once), "Record 2, Other Rejected, Retry");
    let none = vec![held(), rejecting(), other(false)];
    check(Read, with(Stage::Rejected, 429, none), "Record 2, Other Rejected, Rejection 429");
    let mut twice = vec![held(), rejecting(), other(true)];
    twice.extend(fail(Stage::Rejected, 503));
    twice.extend([held(), rejecting()]);
    let expected = "Record 2, Other Rejected, Retry, Send 0, ReportFacts, Record 2, Rejection 429";
    check(Read, with(Stage::Rejected, 429, twice), expected);
    // The versions decide.
    for (after, expected, excluded) in [
        (AfterNotReached::AskAgain, "Retry", 0),
        (AfterNotReached::AskOther, "Retry", 1),
        (AfterNotReached::SendOriginal, "Retry", 0),
        (AfterNotReached::Respond, "Rejection 504", 1),
    ] {
        let inputs = with(Stage::NotReached, 504, vec![held(), Input::AfterNotReached(after)]);
        let (attempts, text) = run(Read, inputs);
        assert_eq!(text, format!("{failed}Version true, {expected}"), "{after:?}");
        assert_eq!(attempts.excluded().len(), excluded, "{after:?}");
    }
}

#[test]
fn other_endpoint_is_asked_for_a_version_while_a_round_is_left_for_the_original_request() {
    let round = || {
        let other = Input::AfterNotReached(AfterNotReached::AskOther);
        [granted(0), failed(0, Stage::NotReached, 504), held(), other]
    };
    let text = run(Read, (1..ATTEMPTS).flat_map(|_| round()).collect()).1;
    let asks: Vec<_> = text.split(", ").filter(|effect| effect.starts_with("Version")).collect();
    assert_eq!(asks, ["Version true", "Version true", "Version true", "Version false"]);
}

#[test]
fn rejection_is_kept_as_its_stage_says() {
    // The first failure, whether its version is a floor, the last one, and what the client gets.
    for (stage, code, is_floor, last, last_code, expected) in [
        (Stage::TooOld, 410, false, Stage::NoHead, 0, "Rejection 410"),
        (Stage::TooOld, 410, false, Stage::NotReached, 504, "Rejection 504"),
        (Stage::NotReached, 504, false, Stage::NoHead, 0, "Rejection 504"),
        (Stage::NotReached, 504, true, Stage::NoHead, 0, "Error bad_gateway attempts"),
        (Stage::Rejected, 429, false, Stage::Rejected, 503, "Rejection 429"),
        (Stage::Rejected, 429, false, Stage::NoHead, 0, "Rejection 429"),
        (Stage::Unprocessed, 503, false, Stage::NoHead, 0, "Error bad_gateway attempts"),
        (Stage::NoHead, 0, false, Stage::Unprocessed, 503, "Rejection 503"),
    ] {
        let (now, mut rng) = (Instant::now(), Rng::with_seed(1));
        let mut attempts = attempts(Watch, now);
        let mut fail = |stage, code, is_floor| {
            attempts.step(granted(0), now, &mut rng);
            let mut failure = failure(stage, code);
            failure.version.is_floor = is_floor;
            let mut input = Input::Failed { attempt: 0, failure, is_given_up: false };
            loop {
                input = match attempts.step(input, now, &mut rng) {
                    Effect::ReportFacts => held(),
                    Effect::RecordRejection { .. } => Input::Rejecting(vec![1]),
                    Effect::AskForOther { .. } => other(true),
                    Effect::AskForVersion { .. } => {
                        Input::AfterNotReached(AfterNotReached::AskOther)
                    }
                    effect => return show(&effect),
                }
            }
        };
        assert_eq!(fail(stage, code, is_floor), "Retry");
        for _ in 2..ATTEMPTS {
            if last == Stage::Rejected {
                break;
            }
            assert_eq!(fail(Stage::NoHead, 0, false), "Retry");
        }
        assert_eq!(fail(last, last_code, false), expected, "{stage:?} {last:?}");
    }
}

#[test]
fn requirements_follow_from_the_failure() {
    let (now, mut rng) = (Instant::now(), Rng::with_seed(1));
    for (stage, is_silent, cause, live_only) in [
        (Stage::NotSent, false, FailureCause::Silence, false),
        (Stage::NoHead, true, FailureCause::Silence, true),
        (Stage::HeadHeld, false, FailureCause::Silence, false),
        (Stage::Unprocessed, true, FailureCause::Refusal, false),
    ] {
        let mut attempts = attempts(Read, now);
        let first = attempts.requirements();
        assert!(first.previous_failure.is_none() && !first.live_only && first.excluded.is_empty());
        attempts.step(granted(0), now, &mut rng);
        attempts.step(failed(0, stage, 0), now, &mut rng);
        let connection = ConnectionFacts { is_silent, is_dead: false, suspect_since: Some(now) };
        let facts = Input::FailureFacts { connection, body: BodyState::Held };
        assert_eq!(show(&attempts.step(facts, now, &mut rng)), "Retry");
        let next = attempts.requirements();
        assert_eq!(next.previous_failure, Some((cause, &10)), "{stage:?}");
        assert_eq!(next.without_connection_since, Some(now), "{stage:?}");
        assert_eq!(next.live_only, live_only, "{stage:?}");
    }
}

#[test]
fn rounds_are_at_most_five() {
    let round = || [granted(0), failed(0, Stage::NoHead, 0), held()];
    let text = run(Read, (0..ATTEMPTS).flat_map(|_| round()).collect()).1;
    assert_eq!(text.matches("Retry").count(), ATTEMPTS as usize - 1);
    assert!(text.ends_with("Error bad_gateway attempts"), "{text}");
}

/// An attempt in trouble, and its hedge with a stream.
fn hedged(then: Vec<TestInput>) -> Vec<TestInput> {
    let hedge = [granted(0), troubled(0), token(0, true), granted(1)];
    hedge.into_iter().chain(then).collect()
}

const HEDGED: &str = "Send 0, Probe and Token 0, Hedge 1 false, Send 1";

#[test]
fn step_hedges_only_safe_requests_with_a_whole_body() {
    check(Write, vec![granted(0), troubled(0)], "Send 0, Wait");
    let arriving = Input::Troubled { attempt: 0, has_whole_body: false };
    check(Read, vec![granted(0), arriving], "Send 0, Wait");
    let over_budget = vec![granted(0), troubled(0), token(0, false), responded(0)];
    let expected = "Send 0, Probe and Token 0, Wait, Respond 0 | over_budget";
    check(Read, over_budget, expected);
    let better = Input::HedgeToken { attempt: 0, taken: true, has_better_endpoint: true };
    let expected = "Send 0, Probe and Token 0, Hedge 1 true";
    check(Read, vec![granted(0), troubled(0), better], expected);
    for (kind, is_safe) in [(Read, true), (Write, false)] {
        let (attempts, _) = run(kind, vec![granted(0)]);
        assert_eq!(attempts.awaited(0), Some(Awaited::Trouble));
        let (attempts, _) = run(kind, vec![granted(0), troubled(0)]);
        let Some(Awaited::Loss { silence_from, hedge_from: None }) = attempts.awaited(0) else {
            panic!("{:?}", attempts.awaited(0));
        };
        assert_eq!(silence_from.is_some(), is_safe);
    }
}

#[test]
fn step_uses_the_first_response_of_parallel_attempts() {
    let check = |then, expected: &str| check(Read, hedged(then), &format!("{HEDGED}, {expected}"));
    check(vec![responded(0)], "Respond 0 | original");
    check(vec![responded(1)], "Respond 1 | hedge");
    let lost = |attempt| failed(attempt, Stage::NoHead, 0);
    check(vec![lost(0), responded(1)], "Wait, Respond 1 | hedge");
    check(vec![lost(0), lost(1)], "Wait, ReportFacts | failed");
    check(vec![given_up(0)], "ReportFacts | failed");
    check(vec![lost(1), responded(0)], "Wait, Respond 0 | original");
    check(vec![lost(1), lost(0)], "Wait, ReportFacts | failed");
    // The hedge is hedged itself.
    let third = |then: Vec<_>| {
        let hedge = [troubled(1), token(1, true), granted(2)];
        hedge.into_iter().chain(then).collect()
    };
    let sent = "Probe and Token 1, Hedge 2 false, Send 2";
    check(third(vec![responded(2)]), &format!("{sent}, Respond 2 | hedge hedge"));
    check(third(vec![responded(1)]), &format!("{sent}, Respond 1 | hedge original"));
    check(third(vec![responded(0)]), &format!("{sent}, Respond 0 | original"));
    let given_up_hedge = vec![given_up(1), responded(0)];
    check(third(given_up_hedge), &format!("{sent}, Wait, Respond 0 | failed original"));
    let all = vec![lost(0), lost(1), lost(2)];
    check(third(all), &format!("{sent}, Wait, Wait, ReportFacts | failed failed"));
}

#[test]
fn step_hedge_without_a_stream_is_repeated_after_a_pause() {
    let no_stream = || Input::NoHedgeStream { attempt: 1 };
    let first = || vec![granted(0), troubled(0), token(0, true)];
    let begin = "Send 0, Probe and Token 0, Hedge 1 false";
    let (attempts, text) = run(Read, first());
    assert_eq!((text.as_str(), attempts.awaited(1)), (begin, Some(Awaited::Stream)));
    let with = |then: Vec<_>| first().into_iter().chain(then).collect();
    let check = |then, expected: &str| check(Read, with(then), &format!("{begin}, {expected}"));
    let due = || Input::HedgeDue { attempt: 0 };
    let again = vec![no_stream(), due(), token(0, true)];
    check(again, "Wait, Token 0, Hedge 1 false | no_connection");
    check(vec![no_stream(), responded(0)], "Wait, Respond 0 | no_connection");
    check(
        vec![no_stream(), due(), token(0, false)],
        "Wait, Token 0, Wait | no_connection over_budget",
    );
    let lost = failed(0, Stage::NoHead, 0);
    check(vec![lost, no_stream()], "Wait, ReportFacts | no_connection");

    let (now, mut rng) = (Instant::now(), Rng::with_seed(1));
    let (mut attempts, _) = run(Read, first());
    attempts.step(no_stream(), now, &mut rng);
    let Some(Awaited::Loss { hedge_from, .. }) = attempts.awaited(0) else { panic!() };
    assert_eq!(hedge_from, Some(now + HEDGE_INTERVAL));
    assert_eq!(attempts.awaited(1), None);
}

#[test]
fn token_of_a_hedge_that_is_given_up_without_a_stream_returns() {
    let waiting = |then: Vec<_>| {
        let hedge = [granted(0), troubled(0), token(0, true)];
        hedge.into_iter().chain(then).collect()
    };
    let begin = "Send 0, Probe and Token 0, Hedge 1 false";
    let lost = || failed(0, Stage::NoHead, 0);
    for (then, expected) in [
        (vec![responded(0)], "Respond 0 | cancelled"),
        (vec![given_up(0)], "ReportFacts | cancelled"),
        (vec![lost(), granted(1), responded(1)], "Wait, Send 1, Respond 1 | hedge"),
        // The hedge of a hedge.
        (
            vec![granted(1), troubled(1), token(1, true), responded(0)],
            "Send 1, Probe and Token 1, Hedge 2 false, Respond 0 | cancelled original",
        ),
        (
            vec![granted(1), troubled(1), token(1, true), given_up(1)],
            "Send 1, Probe and Token 1, Hedge 2 false, Wait | cancelled",
        ),
    ] {
        check(Read, waiting(then), &format!("{begin}, {expected}"));
    }
    // The client abandons the request.
    for (inputs, outcomes) in [
        (waiting(vec![]), vec![HedgeOutcome::Cancelled]),
        (waiting(vec![lost()]), vec![HedgeOutcome::Cancelled]),
        (waiting(vec![granted(1)]), vec![]),
        (vec![granted(0), troubled(0)], vec![]),
    ] {
        let (mut attempts, _) = run(Read, inputs);
        attempts.cancel();
        attempts.cancel();
        assert_eq!(attempts.hedge_outcomes().collect::<Vec<_>>(), outcomes);
    }
}

#[test]
fn step_at_most_four_attempts_are_parallel() {
    let chain = (0..MAX_PARALLEL)
        .flat_map(|attempt| [granted(attempt), troubled(attempt), token(attempt, true)]);
    let inputs = chain.take(3 * MAX_PARALLEL - 1).collect();
    let (attempts, text) = run(Read, inputs);
    assert!(text.ends_with("Send 3, Wait"), "{text}");
    assert_eq!(attempts.hedges_sent(), 3);
    assert_eq!(attempts.awaited(MAX_PARALLEL), None);
}

#[test]
fn step_silent_safe_request_is_given_up_without_a_live_connection() {
    let silent = |has_live| Input::Silent { attempt: 0, has_live };
    let check = |then, expected: &str| check(Read, hedged(then), &format!("{HEDGED}, {expected}"));
    check(vec![silent(false), given_up(0)], "GiveUp 0 NoHead, ReportFacts | failed");
    check(vec![silent(true)], "Wait");
    let (now, mut rng) = (Instant::now(), Rng::with_seed(1));
    let (mut attempts, _) = run(Read, hedged(vec![]));
    attempts.step(silent(true), now, &mut rng);
    let Some(Awaited::Loss { silence_from, .. }) = attempts.awaited(0) else { panic!() };
    assert_eq!(silence_from, Some(now + LIVE_CHECK_INTERVAL));
}

#[test]
fn heartbeat_is_probed_each_second_and_given_up_after_four() {
    let (now, mut rng) = (Instant::now(), Rng::with_seed(1));
    let mut attempts = Attempts::<Key, Key>::new(Write, true, now, None);
    assert_eq!(attempts.heartbeat_due(), None);
    attempts.step(granted(0), now, &mut rng);
    let ill = || Some("it is degraded".to_owned());
    // The time in milliseconds, the health, and the effect.
    for (due, ill_health, expected) in [
        (1_000, ill(), "Probe { attempt: 0 }"),
        (2_000, ill(), "Probe { attempt: 0 }"),
        (3_000, None, "Probe { attempt: 0 }"),
        (4_000, None, "Wait"),
        (4_100, None, "Wait"),
        (4_200, ill(), "GiveUp 0 Unanswered"),
    ] {
        let due = now + Duration::from_millis(due);
        assert_eq!(attempts.heartbeat_due(), Some(due));
        let effect = attempts.step(Input::HeartbeatDue { ill_health }, due, &mut rng);
        assert_eq!(show(&effect), expected);
        if let Effect::GiveUp { reason, .. } = effect {
            assert_eq!(reason, "no response for 4 s, and it is degraded,");
        }
    }
    attempts.step(failed(0, Stage::Unanswered, 0), now, &mut rng);
    assert_eq!(attempts.heartbeat_due(), None);
    assert_eq!(show(&attempts.step(held(), now, &mut rng)), "Error heartbeat_ended unsafe");
}
