//! What a refused probe means, after what the endpoints of the upstream have answered before
//! ([`jackstay_core::probe::answers`]).

use std::cell::Cell;
use std::sync::Arc;

use http::StatusCode;
use jackstay_core::probe::answers::{ProbeAnswers, RefusalMeaning};
use jackstay_core::request::start_up::is_refusal;
use jackstay_sys::clock;

use crate::upstream::Upstream;
use crate::upstream::connection::{Connection, ConnectionState};
use crate::upstream::endpoint::{Endpoint, ProbeCredential};
use crate::upstream::readyz_question::ReadyzResult;

/// Records which connections and credentials the probes of one endpoint have.
#[derive(Debug)]
pub struct AnswerRecorder<'a> {
    endpoint: &'a Endpoint,
    /// Number of the credential that is used, 0 for none; `None` before the first use.
    generation: Option<u64>,
    /// The connection before was lost, or a connect has failed.
    is_lost: Cell<bool>,
}

impl<'a> AnswerRecorder<'a> {
    /// For the probes of `endpoint`, which has no connection yet.
    pub fn new(endpoint: &'a Endpoint) -> Self {
        Self { endpoint, generation: None, is_lost: Cell::new(true) }
    }

    /// Probes follow on a new connection.
    pub fn connected(&self) {
        let is_lost = self.is_lost.take();
        for credential in [ProbeCredential::Configured, ProbeCredential::Anonymous] {
            self.endpoint.update_probe_answers(credential, |answers| answers.connected(is_lost));
        }
    }

    /// The connection was lost, or a connect has failed.
    pub fn lost(&self) {
        self.is_lost.set(true);
    }

    /// This connection was used, and may have ended.
    pub fn used(&self, connection: &Connection) {
        if connection.state() == ConnectionState::Dead {
            self.lost();
        }
    }

    /// Probes follow with a credential of this `generation`, or without one. Answers to another one mean nothing for it.
    pub fn use_credential(&mut self, generation: Option<u64>) {
        let generation = generation.map_or(0, |generation| generation + 1);
        if self.generation.replace(generation).is_some_and(|before| before != generation) {
            for credential in [ProbeCredential::Configured, ProbeCredential::Anonymous] {
                self.endpoint
                    .update_probe_answers(credential, |answers| *answers = ProbeAnswers::default());
            }
        }
    }
}

/// Records the answer of `endpoint` to the request of `path`. Returns its meaning for the readiness: `other`, unless the
/// endpoint refuses this credential.
pub fn judge(
    (upstream, endpoint): (&Upstream, &Arc<Endpoint>),
    credential: ProbeCredential,
    (path, code): (&str, Option<u16>),
    other: ReadyzResult,
) -> ReadyzResult {
    let Some(code) = code.filter(|code| is_refusal(*code)) else {
        endpoint.update_probe_answers(credential, |answers| {
            if code == Some(StatusCode::OK.as_u16()) {
                answers.answered();
            } else {
                answers.failed();
            }
        });
        return other;
    };
    let endpoints = upstream.endpoints();
    let others = endpoints.iter().filter(|other| !Arc::ptr_eq(other, endpoint));
    let others: Vec<_> = others.map(|other| other.probe_answers(credential)).collect();
    match endpoint.probe_refused(credential, others, clock::now()) {
        RefusalMeaning::Refused => ReadyzResult::Refused,
        RefusalMeaning::NotYet => ReadyzResult::Starting(format!(
            "{path} answers {code}, after 200 for the same credential: the apiserver is starting"
        )),
    }
}

#[cfg(test)]
mod tests {
    use jackstay_core::discovery::address::EndpointAddress;
    use jackstay_core::endpoint_health::Observation;
    use jackstay_core::request::start_up::STARTING;

    use super::*;
    use crate::observe::Metrics;

    /// An upstream with two endpoints.
    fn upstream() -> (Arc<Upstream>, [Arc<Endpoint>; 2]) {
        let metrics = Metrics::new();
        let config = crate::control::discovery::tests::config();
        let upstream = Upstream::load(config, &[], &metrics);
        let endpoints = ["10.0.0.1", "10.0.0.2"].map(|host| {
            let address = EndpointAddress { host: host.to_owned(), port: 6443 };
            Endpoint::new(&"u".into(), &address, None, metrics.endpoint("u", host)).unwrap()
        });
        upstream.set_endpoints(endpoints.to_vec());
        (upstream, endpoints)
    }

    #[test]
    fn refusal_after_200_is_that_of_an_endpoint_that_is_starting() {
        for credential in [ProbeCredential::Configured, ProbeCredential::Anonymous] {
            let (upstream, [first, second]) = upstream();
            let answer = |endpoint: &Arc<Endpoint>, code| {
                let other = ReadyzResult::Ready;
                judge((&upstream, endpoint), credential, ("/readyz", Some(code)), other)
            };
            let starting = |code| {
                let why = "after 200 for the same credential: the apiserver is starting";
                ReadyzResult::Starting(format!("/readyz answers {code}, {why}"))
            };
            assert_eq!(answer(&first, 403), ReadyzResult::Refused, "the first answer of all");
            assert_eq!(answer(&second, 200), ReadyzResult::Ready);
            assert_eq!(answer(&first, 403), starting(403), "the other has answered 200");
            assert_eq!(answer(&first, 200), ReadyzResult::Ready);
            let recorder = AnswerRecorder::new(&first);
            recorder.lost();
            recorder.connected();
            assert_eq!(answer(&first, 401), starting(401));
            assert!(first.uptime().is_probe_refused);
            assert_eq!(answer(&second, 403), ReadyzResult::Refused, "on the same connection");
            assert_eq!(answer(&first, 401), ReadyzResult::Refused, "the rights were withdrawn");
            assert!(!first.uptime().is_probe_refused);
        }
    }

    #[test]
    fn answers_to_another_credential_mean_nothing() {
        let (upstream, [first, _]) = upstream();
        let answer = |code| {
            let credential = ProbeCredential::Configured;
            judge((&upstream, &first), credential, ("/readyz", Some(code)), ReadyzResult::Ready)
        };
        let mut recorder = AnswerRecorder::new(&first);
        recorder.use_credential(Some(7));
        answer(200);
        recorder.connected();
        recorder.use_credential(Some(7));
        assert!(matches!(answer(403), ReadyzResult::Starting(_)), "the same credential");
        recorder.use_credential(Some(8));
        assert_eq!(answer(403), ReadyzResult::Refused);
    }

    #[test]
    fn endpoint_is_starting_again_when_its_prober_is_refused_or_it_connects_anew() {
        let (_, [first, second]) = upstream();
        let long_ago = clock::now().checked_sub(2 * STARTING).unwrap();
        for endpoint in [&first, &second] {
            endpoint.observe(Observation::ConnectionOpened { at: long_ago });
            assert!(!endpoint.is_starting() && !endpoint.is_starting());
        }
        let answers = |endpoint: &Endpoint| endpoint.probe_answers(ProbeCredential::Configured);
        second.update_probe_answers(ProbeCredential::Configured, ProbeAnswers::answered);
        first.probe_refused(ProbeCredential::Configured, [answers(&second)], clock::now());
        assert!(first.is_starting());
        second.observe(Observation::ConnectionOpened { at: clock::now() });
        assert!(!second.is_starting(), "another one is open");
    }
}
