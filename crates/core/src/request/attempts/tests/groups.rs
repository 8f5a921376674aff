//! Attempts at requests of an API group that fails at an endpoint.

use super::*;
use crate::request::info::RequestKind::{Log, NonMutating, Tunnel};

#[test]
fn step_after_a_failed_group_asks_where_the_group_works_or_pauses() {
    let failed_group = || failed(0, Stage::GroupFailed, 503);
    let unavailable = || failed(0, Stage::GroupUnavailable, 503);
    let none_left = |world: &mut TestFacts| world.failing = None;
    let check = |kind, then: Vec<Step>, expected: &str| {
        let steps = steps![granted(0)].into_iter().chain(then).collect();
        super::tests::check(kind, steps, &format!("Send 0, {expected}"));
    };
    for kind in [Read, Watch, Log, NonMutating] {
        check(kind, steps![failed_group()], "Group, Retry");
        check(kind, steps![with(failed_group(), none_left)], "Group, Rejection 503");
        let again = steps![unavailable(), AttemptInput::PauseEnded, granted(0)];
        check(kind, again, "Unavailable, PauseRetry, Retry, Send 0");
        let over = steps![with(unavailable(), |world| world.is_new = false)];
        check(kind, over, "Unavailable, Rejection 503");
    }
    for kind in [Write, Tunnel] {
        check(kind, steps![failed_group()], "Rejection 503");
        check(kind, steps![unavailable()], "Rejection 503");
    }
    // The client gets the response of the first endpoint.
    let second = with(failed(0, Stage::GroupFailed, 504), none_left);
    let twice = steps![failed_group(), granted(0), second];
    check(Read, twice, "Group, Retry, Send 0, Group, Rejection 503");
    let (attempts, _) = run(Read, steps![granted(0), failed_group()]);
    let excluded = [EndpointKey(1), EndpointKey(1), EndpointKey(2)];
    assert_eq!(attempts.requirements().excluded, excluded);
    let (attempts, _) = run(Read, steps![granted(0), unavailable()]);
    assert_eq!(attempts.requirements().excluded, []);
    // It is sent again for about three seconds.
    let round = |_| steps![granted(0), unavailable(), AttemptInput::PauseEnded];
    let rounds = (0..MAX_UNAVAILABLE).flat_map(round).chain(steps![granted(0), unavailable()]);
    let (_, text) = run_quietly(Read, rounds.collect());
    let paused = text.iter().filter(|effect| *effect == "PauseRetry").count();
    assert_eq!(paused, MAX_UNAVAILABLE as usize);
    assert_eq!(text.last().unwrap(), "Rejection 503");
}

#[test]
fn step_hedges_a_late_head_of_a_group_on_another_endpoint() {
    let slow = || AttemptInput::Slow { attempt: 0 };
    let hedged = |then: Vec<Step>| steps![granted(0), slow(), granted(1)].into_iter().chain(then);
    let sent = "Send 0, Group, HedgeLate 1, Send 1";
    let check_hedged = |then, expected: &str| {
        check(Read, hedged(then).collect(), &format!("{sent}, {expected}"));
    };
    check_hedged(steps![responded(1)], "Respond 1 | hedge");
    check_hedged(steps![responded(0)], "Respond 0 | original");
    let lost = failed(0, Stage::GroupFailed, 503);
    check_hedged(steps![lost, responded(1)], "Wait, Respond 1 | hedge");
    let also_failed = failed(1, Stage::GroupFailed, 503);
    check_hedged(steps![also_failed, responded(0)], "Wait, Respond 0 | failed");
    let none_left = with(slow(), |world| world.failing = None);
    check(Read, steps![granted(0), none_left, responded(0)], "Send 0, Group, Wait, Respond 0");
    let arriving = with(slow(), |world| world.has_whole_body = false);
    check(NonMutating, steps![granted(0), arriving], "Send 0, Wait");
    check(Write, steps![granted(0), slow()], "Send 0, Wait");
    // Also the hedge may be late. The fourth attempt is the last one.
    let late = |attempt| AttemptInput::Slow { attempt };
    let others = steps![late(1), granted(2), late(2), granted(3), late(3), responded(3)];
    let expected = "Group, HedgeLate 2, Send 2, Group, HedgeLate 3, Send 3, Group, Wait, Respond 3";
    check_hedged(others, &format!("{expected} | hedge hedge hedge"));
    // Two apiservers that reject for overload are enough.
    let rejected = |attempt| failed(attempt, Stage::Rejected, 429);
    let both = steps![rejected(0), rejected(1)];
    check_hedged(both, "Wait, Record 2, Rejection 429 | failed");
    // Another endpoint is asked if the hedge has failed, or had no stream.
    let failed_hedge = failed(1, Stage::GroupFailed, 503);
    let again = steps![failed_hedge, slow(), granted(1), responded(1)];
    check_hedged(again, "Wait, Group, HedgeLate 1, Send 1, Respond 1 | failed hedge");
    let no_stream = steps![AttemptInput::NoHedgeStream { attempt: 1 }, slow(), granted(1)];
    let without = steps![granted(0), slow()].into_iter().chain(no_stream).collect();
    let (attempts, _) = run_quietly(Read, without);
    assert!(attempts.is_hedged_as_slow());
    // A late head and trouble are reported as long as there is no hedge.
    let (attempts, _) = run(Read, steps![granted(0), with(slow(), |world| world.failing = None)]);
    assert_eq!(attempts.awaited(0), Some(Awaited::Trouble { may_be_slow: true }));
}
