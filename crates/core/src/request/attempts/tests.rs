//! Tests of each row of the decision tables.

mod groups;
mod properties;

use std::cell::RefCell;

use bytes::Bytes;
use http::Response;

use super::*;
use crate::kubernetes_version::MinorVersion;
use crate::pool::ConnectionKey;
use crate::reads::{EndpointCache, FloorVersions, ListOrigin, ReadForm};
use RequestKind::{Read, Watch, Write};

/// A connection.
type Key = usize;
type TestInput = AttemptInput<Key>;

/// A connection without trouble.
const CONNECTION: ConnectionFacts = ConnectionFacts {
    key: ConnectionKey(10),
    is_silent: false,
    is_dead: false,
    suspect_since: None,
};

/// A failure on connection 10 to endpoint 1, with a rejection that has the status `code`, if it is not 0.
fn failure(stage: Stage, code: u16) -> AttemptFailure<Key> {
    let response = (code > 0).then(|| {
        let response = Response::builder().status(code).header("retry-after", "2");
        Box::new((response.body(()).unwrap().into_parts().0, Bytes::new()))
    });
    let reason = "lost".to_owned();
    let endpoint = EndpointKey(1);
    AttemptFailure { stage, reason, connection: 10, endpoint, response, reached: 7 }
}

fn granted(attempt: usize) -> TestInput {
    AttemptInput::Granted { attempt }
}

fn responded(attempt: usize) -> TestInput {
    AttemptInput::Responded { attempt }
}

fn failed(attempt: usize, stage: Stage, code: u16) -> TestInput {
    AttemptInput::Failed { attempt, failure: failure(stage, code) }
}

fn troubled(attempt: usize) -> TestInput {
    AttemptInput::Troubled { attempt }
}

fn unreachable() -> TestInput {
    AttemptInput::NoStream { reason: NoStream::Unreachable("down".to_owned()) }
}

fn exhausted() -> TestInput {
    let reason = NoStream::Other(StatusError::too_many_requests("full"));
    AttemptInput::NoStream { reason }
}

/// Facts of a test. By default each attempt may go on. Records the questions.
#[expect(clippy::struct_excessive_bools, reason = "each is the answer to a question")]
struct TestFacts {
    connection: ConnectionFacts,
    has_live: bool,
    ill_health: Option<&'static str>,
    has_better_endpoint: bool,
    body: BodyState,
    has_whole_body: bool,
    may_hold: bool,
    has_token: bool,
    has_other: bool,
    rejecting: Vec<EndpointKey>,
    not_asked: Option<Vec<EndpointKey>>,
    unasked: Unasked,
    failing: Option<Vec<EndpointKey>>,
    is_new: bool,
    asked: RefCell<Vec<String>>,
}

impl Default for TestFacts {
    fn default() -> Self {
        Self {
            connection: CONNECTION,
            has_live: true,
            ill_health: None,
            has_better_endpoint: false,
            body: BodyState::Held,
            has_whole_body: true,
            may_hold: true,
            has_token: true,
            has_other: true,
            rejecting: vec![EndpointKey(1), EndpointKey(2)],
            not_asked: Some(vec![EndpointKey(1), EndpointKey(3)]),
            unasked: Unasked::Endpoint,
            failing: Some(vec![EndpointKey(1), EndpointKey(2)]),
            is_new: true,
            asked: RefCell::default(),
        }
    }
}

impl TestFacts {
    fn ask(&self, what: impl Into<String>) {
        self.asked.borrow_mut().push(what.into());
    }
}

impl Facts<Key> for TestFacts {
    fn connection(&self, _: &Key) -> ConnectionFacts {
        self.connection
    }

    fn has_live(&self) -> bool {
        self.has_live
    }

    fn ill_health(&self, _: usize) -> Option<String> {
        self.ill_health.map(str::to_owned)
    }

    fn has_better_endpoint(&self, _: usize) -> bool {
        self.has_better_endpoint
    }

    fn body(&self) -> BodyState {
        self.body
    }

    fn has_whole_body(&self) -> bool {
        self.has_whole_body
    }

    fn may_hold(&self) -> bool {
        self.may_hold
    }

    fn take_hedge_token(&self) -> bool {
        self.ask("Token");
        self.has_token
    }

    fn may_ask_other(&self, _: &[EndpointKey], budget: OtherBudget) -> bool {
        self.ask(format!("Other {budget:?}"));
        self.has_other
    }

    fn record_rejection(&self, _: EndpointKey, pause: Duration) -> Vec<EndpointKey> {
        self.ask(format!("Record {}", pause.as_secs()));
        self.rejecting.clone()
    }

    fn not_asked_after_refusal(&self, _: EndpointKey) -> Option<Vec<EndpointKey>> {
        self.ask("Longer up");
        self.not_asked.clone()
    }

    fn take_group_token(&self, _: Option<usize>) -> Option<Vec<EndpointKey>> {
        self.ask("Group");
        self.failing.clone()
    }

    fn may_ask_unavailable_group(&self) -> bool {
        self.ask("Unavailable");
        self.is_new
    }

    fn unasked(&self, _: &Key, asked: &[EndpointKey]) -> Unasked {
        self.ask(format!("Unasked besides {}", asked.len()));
        self.unasked
    }
}

/// An input, and the facts of that step.
struct Step(TestInput, TestFacts);

impl From<TestInput> for Step {
    fn from(input: TestInput) -> Self {
        Self(input, TestFacts::default())
    }
}

/// An input while the facts are these.
fn with(input: TestInput, change: impl FnOnce(&mut TestFacts)) -> Step {
    let mut world = TestFacts::default();
    change(&mut world);
    Step(input, world)
}

/// A failed attempt whose connection is silent, without another one that is live.
fn given_up(attempt: usize) -> Step {
    with(failed(attempt, Stage::NoHead, 0), |world| {
        world.connection.is_silent = true;
        world.has_live = false;
    })
}

/// A list of steps.
macro_rules! steps {
    ($($step:expr),* $(,)?) => { vec![$(Step::from($step)),*] };
}
use steps;

/// The effect as text, without the parts that other tests check.
fn show(effect: &AttemptEffect) -> String {
    match effect {
        AttemptEffect::Refuse(refused) => match &**refused {
            Refused::Rejection(response) => format!("Rejection {}", response.0.status.as_u16()),
            Refused::Error(error, refusal) => {
                format!("Error {} {}", error.label, refusal.map_or("-", RetryRefusal::as_str))
            }
        },
        AttemptEffect::Hold { .. } => "Hold".to_owned(),
        AttemptEffect::Pause { .. } => "Pause".to_owned(),
        AttemptEffect::PauseRetry { delay } => {
            assert!(*delay >= Duration::from_millis(22) && *delay <= Duration::from_millis(75));
            "PauseRetry".to_owned()
        }
        AttemptEffect::GiveUp { attempt, stage, .. } => format!("GiveUp {attempt} {stage:?}"),
        AttemptEffect::Send { attempt } => format!("Send {attempt}"),
        AttemptEffect::Respond { attempt } => format!("Respond {attempt}"),
        AttemptEffect::Hedge { attempt, exclude, probe } => {
            let probe = if *probe { "Probe and " } else { "" };
            format!("{probe}Hedge {attempt} {exclude}")
        }
        AttemptEffect::HedgeLate { attempt, .. } => format!("HedgeLate {attempt}"),
        AttemptEffect::Probe { attempt } => format!("Probe {attempt}"),
        other => format!("{other:?}"),
    }
}

fn attempts(kind: RequestKind, now: Instant) -> Attempts<Key> {
    Attempts::new(kind, false, (now, None), None)
}

/// A read whose client has seen version 12.
fn read_of(form: ReadForm) -> ConsistentRead {
    ConsistentRead::new(form, FloorVersions { objects: 12, ..FloorVersions::default() }, "pods")
}

/// A read of this form that was sent to an endpoint whose most-recent lists are of version `list`, and which has not
/// reached the version. Returns the attempts, and the effect as text.
fn after_not_reached(form: ReadForm, list: u64, unasked: Unasked) -> (Attempts<Key>, String) {
    let (now, mut rng) = (Instant::now(), Rng::with_seed(1));
    let mut read = read_of(form);
    let (lists, server) = (ListOrigin::Cache, MinorVersion::new(1, 36));
    let (endpoint, is_shared) = (EndpointKey(1), unasked == Unasked::Connection);
    read.ask(&EndpointCache { endpoint, server, reached: 0, list, lists, is_shared });
    let mut attempts = Attempts::new(Read, false, (now, None), Some(read));
    let world = TestFacts { unasked, ..TestFacts::default() };
    attempts.step(granted(0), &world, now, &mut rng);
    let effect = attempts.step(failed(0, Stage::NotReached, 504), &world, now, &mut rng);
    (attempts, show(&effect))
}

/// As [`run`], without taking the outcomes of hedges.
fn run_quietly(kind: RequestKind, steps: Vec<Step>) -> (Attempts<Key>, Vec<String>) {
    let (now, mut rng) = (Instant::now(), Rng::with_seed(1));
    let mut attempts = attempts(kind, now);
    let mut texts = Vec::new();
    for Step(input, world) in steps {
        let effect = attempts.step(input, &world, now, &mut rng);
        texts.append(&mut world.asked.borrow_mut());
        texts.push(show(&effect));
    }
    (attempts, texts)
}

/// Steps through the inputs. The text has what was asked and the effects, and after `|` the outcomes of hedges.
fn run(kind: RequestKind, steps: Vec<Step>) -> (Attempts<Key>, String) {
    let (mut attempts, texts) = run_quietly(kind, steps);
    let outcomes: Vec<_> = attempts.hedge_outcomes().map(HedgeOutcome::as_str).collect();
    let text = format!("{} | {}", texts.join(", "), outcomes.join(" "));
    (attempts, text.trim_end_matches([' ', '|']).to_owned())
}

#[track_caller]
fn check(kind: RequestKind, steps: Vec<Step>, expected: &str) {
    assert_eq!(run(kind, steps).1, expected);
}

#[test]
fn step_first_attempt_responds_or_gets_no_stream() {
    check(Read, steps![granted(0), responded(0)], "Send 0, Respond 0");
    check(Read, steps![unreachable()], "Error no_upstream -");
    check(Watch, steps![exhausted()], "Error limit -");
    check(
        Watch,
        steps![with(unreachable(), |world| world.may_hold = false)],
        "Error no_upstream -",
    );
}

#[test]
fn step_request_that_a_starting_endpoint_refuses_is_sent_to_one_that_has_been_up_longer() {
    let refused = |code| failed(0, Stage::Starting, code);
    let none = |world: &mut TestFacts| world.not_asked = None;
    let asked = "Send 0, Longer up, Token, Retry, Send 0";
    for kind in [Read, Watch] {
        let steps = steps![granted(0), refused(403), granted(0), responded(0)];
        check(kind, steps, &format!("{asked}, Respond 0"));
        // The client gets a refusal if no other endpoint answers, or there is no token.
        let steps = steps![granted(0), with(refused(403), none)];
        check(kind, steps, "Send 0, Longer up, Rejection 403");
        let steps = steps![granted(0), with(refused(403), |world| world.has_token = false)];
        check(kind, steps, "Send 0, Longer up, Token, Rejection 403");
        let steps = steps![granted(0), refused(403), unreachable()];
        check(kind, steps, "Send 0, Longer up, Token, Retry, Rejection 403");
    }
    // Only one other is asked.
    let steps = steps![granted(0), refused(403), granted(0), refused(401)];
    check(Read, steps, &format!("{asked}, Rejection 401"));
    // Another rejection says more than the refusal, in whatever order they come.
    let overloaded = || failed(0, Stage::Rejected, 429);
    let unasked = with(overloaded(), |world| world.has_other = false);
    let steps = steps![granted(0), refused(403), granted(0), unasked];
    check(Read, steps, &format!("{asked}, Record 2, Rejection 429"));
    let steps = steps![granted(0), overloaded(), granted(0), with(refused(403), none)];
    let expected = "Send 0, Record 2, Other Rejected, Retry, Send 0, Longer up, Rejection 429";
    check(Read, steps, expected);
    let (attempts, _) = run(Read, steps![granted(0), refused(403)]);
    assert_eq!(attempts.requirements().excluded, [EndpointKey(1), EndpointKey(3)]);
    // A write is not repeated.
    check(Write, steps![granted(0), refused(403)], "Send 0, Rejection 403");
}

#[test]
fn step_new_watch_is_held_until_the_outage_or_the_hold_ends() {
    let ended = || AttemptInput::OutageEnded { held: Duration::from_secs(8) };
    let after_hold = |last: Step| steps![unreachable(), ended(), AttemptInput::PauseEnded, last];
    check(Watch, after_hold(granted(0).into()), "Hold, Pause, Acquire, Send 0");
    let not_held = with(unreachable(), |world| world.may_hold = false);
    check(Watch, after_hold(not_held), "Hold, Pause, Acquire, Hold");
    check(Watch, after_hold(exhausted().into()), "Hold, Pause, Acquire, Error limit -");
    check(Watch, steps![unreachable(), AttemptInput::HoldEnded], "Hold, Error no_upstream -");
    // A failure before the hold does not matter after it.
    let lost = failed(0, Stage::NoHead, 0);
    let steps = steps![granted(0), lost, unreachable(), ended(), AttemptInput::PauseEnded];
    let (attempts, _) = run(Watch, steps);
    let required = attempts.requirements();
    assert!(required.previous_failure.is_none() && required.excluded.is_empty());

    // A rejection is forwarded instead of a hold.
    let steps = steps![granted(0), failed(0, Stage::TooOld, 410), unreachable()];
    check(Watch, steps, "Send 0, Other TooOld, Retry, Rejection 410");
}

#[test]
fn hold_lasts_for_the_timeout_of_the_watch_and_at_most_30_s() {
    for (timeout, expected) in [(None, 30), (Some(8), 8), (Some(600), 30)] {
        let (now, mut rng, world) = (Instant::now(), Rng::with_seed(1), TestFacts::default());
        let timeout = timeout.map(Duration::from_secs);
        let mut attempts = Attempts::<Key>::new(Watch, false, (now, timeout), None);
        let later = now + Duration::from_secs(2);
        let effect = attempts.step(unreachable(), &world, later, &mut rng);
        let AttemptEffect::Hold { until } = effect else { panic!("{effect:?}") };
        assert_eq!(until - now, Duration::from_secs(expected));
        let held = Duration::from_secs(16);
        let delays: Vec<_> = (0..100)
            .map(|_| {
                match attempts.step(AttemptInput::OutageEnded { held }, &world, later, &mut rng) {
                    AttemptEffect::Pause { delay } => delay,
                    effect => panic!("{effect:?}"),
                }
            })
            .collect();
        assert!(delays.iter().all(|delay| *delay < Duration::from_secs(2)));
        assert!(delays.iter().any(|delay| *delay > Duration::from_secs(1)));
    }
}

#[test]
fn step_failed_round_follows_the_retry_table() {
    let check = |kind, failed: Step, expected: &str| {
        check(kind, steps![granted(0), failed], &format!("Send 0, {expected}"));
    };
    let lost = |stage| Step::from(failed(0, stage, 0));
    check(Read, lost(Stage::NoHead), "Retry");
    check(Write, lost(Stage::NotSent), "Retry");
    check(Write, lost(Stage::NoHead), "Error unknown_outcome unsafe");
    let not_held = |world: &mut TestFacts| world.body = BodyState::NotHeld;
    check(Write, with(failed(0, Stage::Unprocessed, 503), not_held), "Rejection 503");
    let unprocessed = with(failed(0, Stage::Unprocessed, 0), not_held);
    check(Write, unprocessed, "Error unprocessed not_held");
    let aborted = with(failed(0, Stage::NoHead, 0), |world| world.body = BodyState::Aborted);
    check(Read, aborted, "Error bad_request -");
    // A 410 is asked of other endpoints, and kept.
    let too_old = || failed(0, Stage::TooOld, 410);
    let no_other = |world: &mut TestFacts| world.has_other = false;
    check(Watch, too_old().into(), "Other TooOld, Retry");
    check(Watch, with(too_old(), no_other), "Other TooOld, Rejection 410");
    // An overload is asked of one other endpoint.
    let overloaded = || failed(0, Stage::Rejected, 429);
    check(Read, overloaded().into(), "Record 2, Other Rejected, Retry");
    check(Read, with(overloaded(), no_other), "Record 2, Other Rejected, Rejection 429");
    let twice = steps![granted(0), overloaded(), granted(0), failed(0, Stage::Rejected, 503)];
    let expected = "Send 0, Record 2, Other Rejected, Retry, Send 0, Record 2, Rejection 429";
    super::tests::check(Read, twice, expected);
    let (attempts, _) = run(Read, steps![granted(0), overloaded()]);
    assert_eq!(attempts.requirements().excluded, [EndpointKey(1), EndpointKey(2)]);
    // Without versions that mean something for the client, it gets the rejection.
    check(Read, failed(0, Stage::NotReached, 504).into(), "Rejection 504");
}

#[test]
fn step_after_an_endpoint_without_the_version_follows_the_read() {
    use AfterNotReached::{AskAgain, AskMostRecent, AskOther, Respond, SendOriginal};
    // The last numbers are those of excluded endpoints and connections.
    for (form, list, unasked, after, expected, excluded) in [
        (ReadForm::AnyList, 12, Unasked::Endpoint, AskAgain, "Retry", (0, 0)),
        (ReadForm::AnyList, 12, Unasked::Connection, AskAgain, "Retry", (0, 0)),
        (ReadForm::AnyList, 0, Unasked::Endpoint, AskOther, "Retry", (1, 0)),
        (ReadForm::AnyList, 0, Unasked::Connection, AskOther, "Retry", (0, 1)),
        (ReadForm::AnyGet, 0, Unasked::Connection, AskOther, "Retry", (0, 1)),
        (ReadForm::AnyGet, 0, Unasked::Hidden, AskMostRecent, "Retry", (0, 0)),
        (ReadForm::AnyList, 0, Unasked::Nothing, SendOriginal, "Retry", (0, 0)),
        (ReadForm::GetNotOlderThan, 0, Unasked::Endpoint, AskOther, "Retry", (1, 0)),
        (ReadForm::GetNotOlderThan, 0, Unasked::Connection, AskOther, "Retry", (0, 1)),
        (ReadForm::GetNotOlderThan, 0, Unasked::Hidden, Respond, "Rejection 504", (1, 0)),
        (ReadForm::GetNotOlderThan, 0, Unasked::Nothing, Respond, "Rejection 504", (1, 0)),
    ] {
        let (attempts, text) = after_not_reached(form, list, unasked);
        assert_eq!(text, expected, "{after:?}");
        let all = (attempts.excluded.len(), attempts.excluded_connections.len());
        assert_eq!(all, excluded, "{form:?} {unasked:?} {after:?}");
        let retried = (after != Respond).then_some(after);
        assert_eq!(attempts.after_not_reached(), retried, "{after:?}");
        assert_eq!(attempts.read().unwrap().highest_reached(), 7);
    }
}

#[test]
fn read_that_gets_no_other_connection_is_sent_on_any() {
    let (mut attempts, _) = after_not_reached(ReadForm::AnyGet, 0, Unasked::Connection);
    assert_eq!(attempts.requirements().excluded_connections, [CONNECTION.key]);
    let (now, mut rng, world) = (Instant::now(), Rng::with_seed(1), TestFacts::default());
    let effect = attempts.step(exhausted(), &world, now, &mut rng);
    assert_eq!(show(&effect), "Acquire");
    assert!(attempts.requirements().excluded_connections.is_empty());
    let effect = attempts.step(exhausted(), &world, now, &mut rng);
    assert!(show(&effect).starts_with("Error"), "{effect:?}");
}

#[test]
fn other_endpoint_is_asked_for_a_version_while_a_round_is_left_for_the_original_request() {
    let (now, mut rng, world) = (Instant::now(), Rng::with_seed(1), TestFacts::default());
    let mut attempts = Attempts::new(Read, false, (now, None), Some(read_of(ReadForm::AnyGet)));
    let mut after = Vec::new();
    for _ in 1..ATTEMPTS {
        attempts.step(granted(0), &world, now, &mut rng);
        let effect = attempts.step(failed(0, Stage::NotReached, 504), &world, now, &mut rng);
        assert_eq!(show(&effect), "Retry");
        after.extend(attempts.after_not_reached());
    }
    let other = AfterNotReached::AskOther;
    assert_eq!(after, [other, other, other, AfterNotReached::SendOriginal]);
}

#[test]
fn rejection_is_kept_as_its_stage_says() {
    // The first failure, whether the version is a floor, the last one, and what the client gets.
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
        let (now, mut rng, world) = (Instant::now(), Rng::with_seed(1), TestFacts::default());
        let form = if is_floor { ReadForm::AnyWatchList } else { ReadForm::WatchFrom };
        let mut attempts = Attempts::new(Watch, false, (now, None), Some(read_of(form)));
        let mut fail = |stage, code| {
            attempts.step(granted(0), &world, now, &mut rng);
            show(&attempts.step(failed(0, stage, code), &world, now, &mut rng))
        };
        assert_eq!(fail(stage, code), "Retry");
        for _ in 2..ATTEMPTS {
            if last == Stage::Rejected {
                break;
            }
            assert_eq!(fail(Stage::NoHead, 0), "Retry");
        }
        assert_eq!(fail(last, last_code), expected, "{stage:?} {last:?}");
    }
}

#[test]
fn requirements_follow_from_the_failure() {
    let (now, mut rng) = (Instant::now(), Rng::with_seed(1));
    let silence = PreviousFailure::Silence(ConnectionKey(10), EndpointKey(1));
    let refusal = PreviousFailure::Refusal(ConnectionKey(10), EndpointKey(1));
    for (stage, is_silent, previous, live_only) in [
        (Stage::NotSent, false, silence, false),
        (Stage::NoHead, true, silence, true),
        (Stage::HeadHeld, false, silence, false),
        (Stage::Unprocessed, true, refusal, false),
    ] {
        let mut attempts = attempts(Read, now);
        let first = attempts.requirements();
        assert!(first.previous_failure.is_none() && !first.live_only && first.excluded.is_empty());
        let connection = ConnectionFacts { is_silent, suspect_since: Some(now), ..CONNECTION };
        let world = TestFacts { connection, ..TestFacts::default() };
        attempts.step(granted(0), &world, now, &mut rng);
        let effect = attempts.step(failed(0, stage, 0), &world, now, &mut rng);
        assert_eq!(show(&effect), "Retry");
        let next = attempts.requirements();
        assert_eq!(next.previous_failure, Some(previous), "{stage:?}");
        assert_eq!(next.without_connection_since, Some(now), "{stage:?}");
        assert_eq!(next.live_only, live_only, "{stage:?}");
    }
}

#[test]
fn rounds_are_at_most_five() {
    let round = |_| steps![granted(0), failed(0, Stage::NoHead, 0)];
    let text = run(Read, (0..ATTEMPTS).flat_map(round).collect()).1;
    assert_eq!(text.matches("Retry").count(), ATTEMPTS as usize - 1);
    assert!(text.ends_with("Error bad_gateway attempts"), "{text}");
}

/// An attempt in trouble, and its hedge with a stream.
fn hedged(then: Vec<Step>) -> Vec<Step> {
    steps![granted(0), troubled(0), granted(1)].into_iter().chain(then).collect()
}

const HEDGED: &str = "Send 0, Token, Probe and Hedge 1 false, Send 1";

#[test]
fn step_hedges_only_safe_requests_with_a_whole_body() {
    check(Write, steps![granted(0), troubled(0)], "Send 0, Wait");
    let arriving = with(troubled(0), |world| world.has_whole_body = false);
    check(Read, steps![granted(0), arriving], "Send 0, Wait");
    let over_budget = with(troubled(0), |world| world.has_token = false);
    let expected = "Send 0, Token, Probe 0, Respond 0 | over_budget";
    check(Read, steps![granted(0), over_budget, responded(0)], expected);
    let better = with(troubled(0), |world| world.has_better_endpoint = true);
    let expected = "Send 0, Token, Probe and Hedge 1 true";
    check(Read, steps![granted(0), better], expected);
    for (kind, is_safe) in [(Read, true), (Write, false)] {
        let (attempts, _) = run(kind, steps![granted(0)]);
        let may_be_slow = retry::may_hedge(kind);
        assert_eq!(attempts.awaited(0), Some(Awaited::Trouble { may_be_slow }));
        for step in [with(troubled(0), |world| world.has_token = false), troubled(0).into()] {
            let (attempts, _) = run(kind, steps![granted(0), step]);
            let Some(Awaited::Loss { silence_from, hedge_from: None }) = attempts.awaited(0) else {
                panic!("{:?}", attempts.awaited(0));
            };
            assert_eq!(silence_from.is_some(), is_safe);
        }
    }
}

#[test]
fn step_uses_the_first_response_of_parallel_attempts() {
    let check = |then, expected: &str| check(Read, hedged(then), &format!("{HEDGED}, {expected}"));
    check(steps![responded(0)], "Respond 0 | original");
    check(steps![responded(1)], "Respond 1 | hedge");
    let lost = |attempt| failed(attempt, Stage::NoHead, 0);
    check(steps![lost(0), responded(1)], "Wait, Respond 1 | hedge");
    check(steps![lost(0), lost(1)], "Wait, Retry | failed");
    check(steps![given_up(0)], "Retry | failed");
    // Its hedge goes on if only one of the conditions holds.
    for (is_silent, has_live) in [(true, true), (false, false)] {
        let failed = with(failed(0, Stage::NoHead, 0), |world| {
            world.connection.is_silent = is_silent;
            world.has_live = has_live;
        });
        check(steps![failed, responded(1)], "Wait, Respond 1 | hedge");
    }
    check(steps![lost(1), responded(0)], "Wait, Respond 0 | original");
    check(steps![lost(1), lost(0)], "Wait, Retry | failed");
    // The hedge is hedged itself.
    let third = |then: Vec<_>| steps![troubled(1), granted(2)].into_iter().chain(then).collect();
    let sent = "Token, Probe and Hedge 2 false, Send 2";
    check(third(steps![responded(2)]), &format!("{sent}, Respond 2 | hedge hedge"));
    check(third(steps![responded(1)]), &format!("{sent}, Respond 1 | hedge original"));
    check(third(steps![responded(0)]), &format!("{sent}, Respond 0 | original"));
    let given_up_hedge = steps![given_up(1), responded(0)];
    check(third(given_up_hedge), &format!("{sent}, Wait, Respond 0 | failed original"));
    let all = steps![lost(0), lost(1), lost(2)];
    check(third(all), &format!("{sent}, Wait, Wait, Retry | failed failed"));
}

#[test]
fn step_hedge_without_a_stream_is_repeated_after_a_pause() {
    let no_stream = || AttemptInput::NoHedgeStream { attempt: 1 };
    let first = || steps![granted(0), troubled(0)];
    let begin = "Send 0, Token, Probe and Hedge 1 false";
    let (attempts, text) = run(Read, first());
    assert_eq!((text.as_str(), attempts.awaited(1)), (begin, Some(Awaited::Stream)));
    let check = |then: Vec<_>, expected: &str| {
        check(Read, first().into_iter().chain(then).collect(), &format!("{begin}, {expected}"));
    };
    let due = || AttemptInput::HedgeDue { attempt: 0 };
    let again = steps![no_stream(), due()];
    check(again, "Wait, Token, Hedge 1 false | no_connection");
    check(steps![no_stream(), responded(0)], "Wait, Respond 0 | no_connection");
    let over_budget = with(due(), |world| world.has_token = false);
    let expected = "Wait, Token, Wait | no_connection over_budget";
    check(steps![no_stream(), over_budget], expected);
    check(steps![failed(0, Stage::NoHead, 0), no_stream()], "Wait, Retry | no_connection");

    let (now, mut rng) = (Instant::now(), Rng::with_seed(1));
    let (mut attempts, _) = run(Read, first());
    attempts.step(no_stream(), &TestFacts::default(), now, &mut rng);
    let Some(Awaited::Loss { hedge_from, .. }) = attempts.awaited(0) else { panic!() };
    assert_eq!(hedge_from, Some(now + HEDGE_INTERVAL));
    assert_eq!(attempts.awaited(1), None);
}

#[test]
fn token_of_a_hedge_that_is_given_up_without_a_stream_returns() {
    let waiting = |then: Vec<_>| steps![granted(0), troubled(0)].into_iter().chain(then).collect();
    let begin = "Send 0, Token, Probe and Hedge 1 false";
    let lost = || failed(0, Stage::NoHead, 0);
    for (then, expected) in [
        (steps![responded(0)], "Respond 0 | cancelled"),
        (steps![given_up(0)], "Retry | cancelled"),
        (steps![lost(), granted(1), responded(1)], "Wait, Send 1, Respond 1 | hedge"),
        // The hedge of a hedge.
        (
            steps![granted(1), troubled(1), responded(0)],
            "Send 1, Token, Probe and Hedge 2 false, Respond 0 | cancelled original",
        ),
        (
            steps![granted(1), troubled(1), given_up(1)],
            "Send 1, Token, Probe and Hedge 2 false, Wait | cancelled",
        ),
    ] {
        check(Read, waiting(then), &format!("{begin}, {expected}"));
    }
    // The client abandons the request.
    let over_budget = with(troubled(0), |world| world.has_token = false);
    for (steps, outcomes) in [
        (waiting(steps![]), vec![HedgeOutcome::Cancelled]),
        (waiting(steps![lost()]), vec![HedgeOutcome::Cancelled]),
        (waiting(steps![granted(1)]), vec![]),
        (steps![granted(0), over_budget], vec![HedgeOutcome::OverBudget]),
    ] {
        let (mut attempts, _) = run_quietly(Read, steps);
        attempts.cancel();
        attempts.cancel();
        assert_eq!(attempts.hedge_outcomes().collect::<Vec<_>>(), outcomes);
    }
}

#[test]
fn step_at_most_four_attempts_are_parallel() {
    let steps = (0..MAX_PARALLEL).flat_map(|attempt| steps![granted(attempt), troubled(attempt)]);
    let (attempts, text) = run(Read, steps.collect());
    assert!(text.ends_with("Send 3, Wait"), "{text}");
    assert_eq!(attempts.hedges_sent(), 3);
    assert_eq!(attempts.awaited(MAX_PARALLEL), None);
}

#[test]
fn step_silent_safe_request_is_given_up_without_a_live_connection() {
    let silent = || AttemptInput::Silent { attempt: 0 };
    let check = |then, expected: &str| check(Read, hedged(then), &format!("{HEDGED}, {expected}"));
    let none_live = with(silent(), |world| world.has_live = false);
    check(steps![none_live, given_up(0)], "GiveUp 0 NoHead, Retry | failed");
    check(steps![silent()], "Wait");
    let (now, mut rng) = (Instant::now(), Rng::with_seed(1));
    let (mut attempts, _) = run(Read, hedged(steps![]));
    attempts.step(silent(), &TestFacts::default(), now, &mut rng);
    let Some(Awaited::Loss { silence_from, .. }) = attempts.awaited(0) else { panic!() };
    assert_eq!(silence_from, Some(now + LIVE_CHECK_INTERVAL));
}

#[test]
fn heartbeat_is_probed_each_second_and_given_up_after_four() {
    let (now, mut rng) = (Instant::now(), Rng::with_seed(1));
    let mut attempts = Attempts::<Key>::new(Write, true, (now, None), None);
    assert_eq!(attempts.heartbeat_due(), None);
    attempts.step(granted(0), &TestFacts::default(), now, &mut rng);
    let ill = Some("it is degraded");
    // The time in milliseconds, the health, and the effect.
    for (due, ill_health, expected) in [
        (1_000, ill, "Probe 0"),
        (2_000, ill, "Probe 0"),
        (3_000, None, "Probe 0"),
        (4_000, None, "Wait"),
        (4_100, None, "Wait"),
        (4_200, ill, "GiveUp 0 Unanswered"),
    ] {
        let due = now + Duration::from_millis(due);
        assert_eq!(attempts.heartbeat_due(), Some(due));
        let world = TestFacts { ill_health, ..TestFacts::default() };
        let effect = attempts.step(AttemptInput::HeartbeatDue, &world, due, &mut rng);
        assert_eq!(show(&effect), expected);
        if let AttemptEffect::GiveUp { reason, .. } = effect {
            assert_eq!(reason, "no response for 4 s, and it is degraded,");
        }
    }
    let failed = failed(0, Stage::Unanswered, 0);
    let effect = attempts.step(failed, &TestFacts::default(), now, &mut rng);
    assert_eq!(attempts.heartbeat_due(), None);
    assert_eq!(show(&effect), "Error heartbeat_ended unsafe");
}

/// An impossible input panics with debug assertions. Without them the client gets an error.
#[test]
fn step_refuses_an_input_that_is_impossible() {
    let ended = || AttemptInput::OutageEnded { held: Duration::ZERO };
    for (steps, impossible) in [
        (steps![], responded(0)),
        (steps![], troubled(0)),
        (steps![], ended()),
        (steps![granted(0)], granted(0)),
        (steps![granted(0)], granted(1)),
        (steps![granted(0)], responded(1)),
        (steps![granted(0)], failed(1, Stage::NoHead, 0)),
        (steps![granted(0)], unreachable()),
        (steps![granted(0)], AttemptInput::HoldEnded),
        (steps![granted(0)], AttemptInput::HeartbeatDue),
        (steps![granted(0)], AttemptInput::HedgeDue { attempt: 0 }),
        (steps![granted(0)], AttemptInput::Silent { attempt: 0 }),
        (steps![granted(0)], AttemptInput::NotExecutable),
        (steps![granted(0), troubled(0)], troubled(0)),
        (steps![granted(0), troubled(0)], responded(1)),
        (steps![granted(0), troubled(0), granted(1)], granted(1)),
        (steps![granted(0), troubled(0), granted(1)], AttemptInput::NoHedgeStream { attempt: 1 }),
        (steps![granted(0), responded(0)], responded(0)),
    ] {
        let name = impossible.name();
        let (mut attempts, before) = run(Read, steps);
        let step = std::panic::AssertUnwindSafe(|| {
            let (now, mut rng) = (Instant::now(), Rng::with_seed(1));
            show(&attempts.step(impossible, &TestFacts::default(), now, &mut rng))
        });
        let result = std::panic::catch_unwind(step);
        assert_eq!(result.is_err(), cfg!(debug_assertions), "{name} after {before}");
        let effect = attempts.refuse_impossible(name, "Sent");
        assert_eq!(show(&effect), "Error internal_error -", "{name} after {before}");
        assert_eq!(attempts.awaited(0), None, "{name} after {before}");
    }
    // The token of a hedge returns, and an earlier rejection does not hide the defect.
    let steps = steps![granted(0), failed(0, Stage::Rejected, 429), granted(0), troubled(0)];
    let (mut attempts, _) = run(Read, steps);
    assert_eq!(show(&attempts.refuse_impossible("Silent", "Parallel")), "Error internal_error -");
    assert_eq!(attempts.hedge_outcomes().collect::<Vec<_>>(), [HedgeOutcome::Cancelled]);
}
