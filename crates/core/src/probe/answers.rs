//! What a refused probe (401 or 403) says about its endpoint.
//!
//! A kube-apiserver that has just started accepts connections before the informers of its authorizers are filled. Until
//! then its RBAC authorizer knows no rule (`Authorize` in `plugin/pkg/auth/authorizer/rbac/rbac.go`), so `/readyz`, too,
//! is answered with 403 to everybody outside `system:masters`: for a second in an empty cluster, for minutes with 50,000
//! role bindings. Authenticators whose informers are not filled answer 401. A credential without the rights to read
//! `/readyz` gets the same responses from an endpoint that is ready. What the endpoints have answered before
//! tells the two apart:
//!
//! | this endpoint | a 401 or 403 means |
//! |---|---|
//! | has answered 200 on this connection | the rights were withdrawn: [`Refused`](RefusalMeaning::Refused) |
//! | any other, another endpoint has answered 200 and then refused on one connection | the same |
//! | any other, it and all others refuse, and none has lost its connection since it answered 200 | the same |
//! | any other, no endpoint has ever answered 200 | the credential has no rights: `Refused` |
//! | any other, it has refused for [`MAX_REFUSED`] | it differs from the others for another reason: `Refused` |
//! | any other | the endpoint is starting: [`NotYet`](RefusalMeaning::NotYet) |
//!
//! So an endpoint that refuses a probe for good counts as not ready for at most [`MAX_REFUSED`], and for about a second if
//! the rights of the credential were withdrawn everywhere.

use std::time::{Duration, Instant};

/// How long refusals count as those of a process that starts.
pub const MAX_REFUSED: Duration = Duration::from_secs(600);

/// The meaning of a refused probe. See the table of the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RefusalMeaning {
    /// The endpoint works and refuses the credential of the prober, so it counts as ready.
    Refused,
    /// The endpoint is starting: not ready.
    NotYet,
}

/// When an endpoint has answered 200 for the last time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
enum LastOk {
    #[default]
    Never,
    /// Before its connection was lost.
    BeforeLoss,
    /// Before its connection was drained, and no other one has been lost since.
    BeforeDrain,
    /// On the present connection.
    OnConnection,
}

/// What one endpoint has answered to the probes with one credential.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ProbeAnswers {
    last_ok: LastOk,
    /// It has refused on a connection on which it had answered 200, and has not answered 200 since.
    has_withdrawn: bool,
    /// When its refusals began, unless it has answered 200 since.
    refused_since: Option<Instant>,
    /// The latest answer meant that it is starting.
    is_starting: bool,
}

impl ProbeAnswers {
    /// Probes follow on a new connection, which may lead to another process. `is_lost`: the one before was lost, or a
    /// connect has failed, rather than drained.
    pub fn connected(&mut self, is_lost: bool) {
        let latest = if is_lost { LastOk::BeforeLoss } else { LastOk::BeforeDrain };
        self.last_ok = self.last_ok.min(latest);
        if is_lost {
            self.refused_since = None;
        }
    }

    /// A probe was answered with 200.
    pub fn answered(&mut self) {
        *self = Self { last_ok: LastOk::OnConnection, ..Self::default() };
    }

    /// A probe was answered otherwise, or not at all.
    pub fn failed(&mut self) {
        self.is_starting = false;
    }

    /// A probe was answered with 401 or 403. `others`: the answers of the other endpoints to the same credential.
    pub fn refused(
        &mut self,
        others: impl IntoIterator<Item = Self>,
        now: Instant,
    ) -> RefusalMeaning {
        let refused_since = *self.refused_since.get_or_insert(now);
        self.has_withdrawn |= self.last_ok == LastOk::OnConnection;
        let (mut was_ok, mut was_withdrawn) = (self.last_ok > LastOk::Never, self.has_withdrawn);
        let (mut has_others, mut all_refuse) = (false, self.last_ok >= LastOk::BeforeDrain);
        for other in others {
            was_ok |= other.last_ok > LastOk::Never;
            was_withdrawn |= other.has_withdrawn;
            has_others = true;
            all_refuse &= other.last_ok >= LastOk::BeforeDrain && other.refused_since.is_some();
        }
        was_withdrawn |= has_others && all_refuse;
        let is_long = now.saturating_duration_since(refused_since) >= MAX_REFUSED;
        self.is_starting = was_ok && !was_withdrawn && !is_long;
        if self.is_starting { RefusalMeaning::NotYet } else { RefusalMeaning::Refused }
    }

    /// Whether the latest answer meant that the endpoint is starting.
    pub fn is_starting(&self) -> bool {
        self.is_starting
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use RefusalMeaning::{NotYet, Refused};

    /// Answers of an endpoint.
    enum Answer {
        Connected,
        Lost,
        Ok,
        Refused,
    }

    fn answers(given: &[Answer], now: Instant) -> ProbeAnswers {
        let mut answers = ProbeAnswers::default();
        for answer in given {
            match answer {
                Answer::Connected => answers.connected(false),
                Answer::Lost => answers.connected(true),
                Answer::Ok => answers.answered(),
                Answer::Refused => drop(answers.refused([], now)),
            }
        }
        answers
    }

    #[test]
    fn refusal_means_by_the_table() {
        use Answer::{Connected, Lost, Ok};
        let now = Instant::now();
        let second = Duration::from_secs(1);
        // The answers of the endpoint and of another one, the time since, and the meaning of a refusal then.
        for (own, other, after, expected) in [
            // The first answer ever.
            (&[][..], &[][..], second, Refused),
            (&[], &[Answer::Refused], second, Refused),
            (&[], &[Ok], second, NotYet),
            // The same credential was answered before.
            (&[Ok, Lost], &[], second, NotYet),
            (&[Ok, Connected], &[Ok], second, NotYet),
            (&[Ok, Lost, Answer::Refused], &[Ok, Lost, Answer::Refused], second, NotYet),
            // The rights were withdrawn.
            (&[Ok], &[Ok], second, Refused),
            (&[Ok, Connected], &[Ok, Answer::Refused], second, Refused),
            (&[Ok, Answer::Refused, Connected], &[Ok], second, Refused),
            (&[Ok, Lost], &[Ok, Answer::Refused, Ok], second, NotYet),
            (&[Ok, Connected], &[Ok, Connected, Answer::Refused], second, Refused),
            (&[Ok, Lost], &[Ok, Connected, Answer::Refused], second, NotYet),
            (&[Ok, Connected], &[Ok, Lost, Answer::Refused], second, NotYet),
            // It refuses for long.
            (&[Ok, Lost, Answer::Refused], &[Ok], MAX_REFUSED.mul_f64(0.99), NotYet),
            (&[Ok, Lost, Answer::Refused], &[Ok], MAX_REFUSED, Refused),
            (&[Ok, Lost, Answer::Refused, Connected], &[Ok], MAX_REFUSED, Refused),
            (&[Ok, Lost, Answer::Refused, Lost], &[Ok], MAX_REFUSED, NotYet),
        ] {
            let mut own_answers = answers(own, now);
            let meaning = own_answers.refused([answers(other, now)], now + after);
            let case = format!("{own_answers:?} {after:?}");
            assert_eq!(meaning, expected, "{case}");
            assert_eq!(own_answers.is_starting(), expected == NotYet, "{case}");
        }
    }

    #[test]
    fn endpoint_is_starting_until_another_answer() {
        let now = Instant::now();
        let starting = || {
            let mut answers = answers(&[Answer::Ok, Answer::Lost], now);
            answers.refused([], now);
            answers
        };
        assert!(starting().is_starting());
        let (mut ready, mut failing) = (starting(), starting());
        ready.answered();
        failing.failed();
        assert!(!ready.is_starting() && !failing.is_starting());
    }
}
