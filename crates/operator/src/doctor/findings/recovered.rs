//! The rule for an endpoint that does not answer when the examination begins and answers later: the examination
//! began in an outage.

use super::finding::{Cause, Finding, problem};
use super::path::{advice, is_unreachable};
use crate::doctor::observations::{
    ConnectAttempt, EndpointObservation, Failure, FailureKind, Observations, Step,
};

/// Shortest silence that is reported, in milliseconds. In this time four fresh connections begin. Packet loss
/// seldom delays all of them: with 5 % in each direction with a probability of 0.0975⁴, about 1 in 10,000.
const MIN_SILENCE_MS: f64 = 1800.0;
/// Fresh connections that begin before the first answer, at least.
const MIN_WAITING: usize = 3;

/// The time without an answer at the beginning.
struct FirstSilence<'a> {
    /// Its duration in milliseconds.
    ms: f64,
    /// The fresh connections that began in it.
    waiting: &'a [ConnectAttempt],
}

/// The durations of the steps up to the first PONG. The name has been resolved before.
fn steps_to_pong(attempt: &ConnectAttempt) -> impl Iterator<Item = (Step, f64)> {
    let steps = attempt.steps.iter().map(|(step, ms)| (*step, ms.0));
    steps.filter(|(step, _)| (Step::Connect..=Step::Http2).contains(step))
}

/// When an attempt received its first PONG, since the start of the examination.
fn answered_at(attempt: &ConnectAttempt) -> Option<f64> {
    attempt.time(Step::Http2)?;
    Some(
        attempt.at_ms.0
            + attempt
                .steps
                .iter()
                .take_while(|(s, _)| *s <= Step::Http2)
                .map(|(_, ms)| ms.0)
                .sum::<f64>(),
    )
}

/// The silence at the beginning, if there was one and every connection that began after it was answered.
fn first_silence(endpoint: &EndpointObservation) -> Option<FirstSilence<'_>> {
    let first = endpoint.fresh.first()?.at_ms.0;
    let answered = endpoint.fresh.iter().filter_map(answered_at).min_by(f64::total_cmp)?;
    let ms = answered - first;
    let count = endpoint.fresh.iter().take_while(|attempt| attempt.at_ms.0 < answered).count();
    let (waiting, later) = endpoint.fresh.split_at(count);
    if ms < MIN_SILENCE_MS || count < MIN_WAITING || later.iter().any(is_unreachable) {
        return None;
    }
    // A server that is slow all the time has not been silent: its last connection takes as long as the first.
    let last: f64 = steps_to_pong(endpoint.fresh.last()?).map(|(_, ms)| ms).sum();
    (waiting.iter().any(is_unreachable) || last < ms / 2.0).then_some(FirstSilence { ms, waiting })
}

pub(super) fn recovered(
    endpoint: &EndpointObservation,
    observations: &Observations,
) -> Option<Finding> {
    let FirstSilence { ms, waiting } = first_silence(endpoint)?;
    let failed = waiting.iter().filter(|attempt| is_unreachable(attempt)).count();
    let failure = waiting.iter().rev().find(|attempt| is_unreachable(attempt));
    let failure = if let Some(attempt) = failure {
        attempt.failure.clone()?
    } else {
        // All have waited for the end of the silence in their longest step.
        let (step, _) = steps_to_pong(&waiting[0]).max_by(|a, b| a.1.total_cmp(&b.1))?;
        let text = format!("{}: a response after {ms:.0} ms", step.as_str());
        Failure { step, kind: FailureKind::Timeout, text, remedy: None }
    };
    let what = if failure.step == Step::Tls { "answer TLS" } else { "answer" };
    let finding = problem(
        Cause::IntermittentEndpoint,
        format!(
            "{} did not {what} at the beginning of the examination and answers now.",
            endpoint.address
        ),
        format!(
            "no answer for the first {:.1} s: {failed} of {} fresh connections failed: {}",
            ms / 1000.0,
            endpoint.fresh.len(),
            failure.text
        ),
        advice(endpoint, &failure, observations),
    );
    Some(finding.about(&endpoint.address))
}
