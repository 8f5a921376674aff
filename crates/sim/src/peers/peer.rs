//! What each client has: its number, its connections, the record, and the signal that ends it.

use std::time::Duration;

use jackstay_apiserver::aggregated;

use super::observer::{Observer, Stop};
use super::transport::{Answer, Client, Failure, Outgoing};
use crate::checker::{ClientId, Collection, Moment, Observation, Seen};

/// What jackstay answers to a request that has lost its place in the queue of a pool. Only the end of a process may.
const POOL_ENDED: &[u8] = b"the task of the connection pool has ended";

/// What each client has.
#[derive(Debug, Clone)]
pub struct Peer {
    /// The client, for the checker.
    pub id: ClientId,
    /// Its connections.
    pub client: Client,
    /// Where it records what it sees.
    pub observer: Observer,
    /// Ends it.
    pub stop: Stop,
}

/// A request that has ended, or was open when the client ended.
pub(super) struct EndedRequest {
    /// The number of the request.
    pub request: u64,
    /// When it was made.
    pub began: Moment,
    /// When it ended.
    pub ended: Moment,
    /// The response; `None` if the request was open.
    pub answer: Option<Result<Answer, Failure>>,
}

impl EndedRequest {
    pub fn took(&self) -> Duration {
        self.ended.at - self.began.at
    }

    /// The status; `None` without a response.
    pub fn status(&self) -> Option<u16> {
        match &self.answer {
            Some(Ok(answer)) => Some(answer.status),
            _ => None,
        }
    }
}

impl Peer {
    /// Sends a request and waits for its whole response, or for the end of the client.
    pub(super) async fn call(&self, outgoing: &Outgoing, limit: Duration) -> EndedRequest {
        let request = self.client.next_request();
        let began = self.observer.moment();
        let was_revoked = self.client.is_revoked();
        let answer = tokio::select! {
            biased;
            answer = self.client.call(request, outgoing, limit) => Some(answer),
            () = self.stop.stopped() => None,
        };
        if let Some(Ok(answer)) = &answer {
            self.check_credential(request, answer.status, was_revoked);
        }
        if let Some(Err(Failure::Undecodable)) = answer {
            self.violation(request, "an undecodable body");
        }
        let ended = EndedRequest { request, began, ended: self.observer.moment(), answer };
        self.observer.log(|| {
            let result = match &ended.answer {
                Some(Ok(answer)) => answer.status.to_string(),
                Some(Err(failure)) => failure.as_str().to_owned(),
                None => "open".to_owned(),
            };
            let (number, took) = (self.id.number, ended.took());
            format!("client {number}: request {request}: {} {result} {took:?}", outgoing.describe())
        });
        if let Some(Ok(answer)) = &ended.answer
            && answer.body.windows(POOL_ENDED.len()).any(|text| text == POOL_ENDED)
        {
            self.violation(request, "its wait for a stream was lost");
        }
        ended
    }

    /// Whether a request is refused by 401 exactly if the apiservers do not accept its token. `was_revoked`: whether
    /// that was so when it was made; it may have changed since.
    pub(super) fn check_credential(&self, request: u64, status: u16, was_revoked: bool) {
        let is_revoked = self.client.is_revoked();
        if status == 401 {
            self.observer.findings().unauthorized += 1;
            if !was_revoked && !is_revoked {
                self.violation(request, "401 with a credential that the apiservers accept");
            }
        } else if was_revoked && is_revoked && (200..300).contains(&status) {
            self.violation(request, "served with a token that no apiserver accepts");
        }
    }

    /// A response of the aggregated group that has failed has the words of the apiserver.
    pub(super) fn check_aggregated(&self, ended: &EndedRequest) {
        let Some(Ok(Answer { status: 500.., body })) = &ended.answer else { return };
        let words = [aggregated::UNAVAILABLE, aggregated::REFUSED, aggregated::LOST];
        if !words.iter().any(|text| text.as_bytes() == body) {
            let text = String::from_utf8_lossy(body);
            self.violation(ended.request, &format!("not the words of the apiserver: {text}"));
        }
    }

    /// Records what a request has shown.
    pub(super) fn saw(&self, collection: Collection, ended: &EndedRequest, seen: Seen) {
        self.observer.observe(Observation {
            client: self.id,
            request: ended.request,
            collection,
            began: ended.began,
            ended: ended.ended,
            seen,
        });
    }

    /// Records what a watch has shown now.
    pub(super) fn saw_now(&self, collection: Collection, request: u64, seen: Seen) {
        let now = self.observer.moment();
        let (client, began, ended) = (self.id, now, now);
        self.observer.observe(Observation { client, request, collection, began, ended, seen });
    }

    /// Reports a response that breaks a rule.
    pub(super) fn violation(&self, request: u64, fault: &str) {
        let text = format!("client {}: request {request}: {fault}", self.id.number);
        self.observer.findings().violation(text);
    }

    /// Waits. Returns `false` if the client has to end.
    pub(super) async fn pause(&self, pause: Duration) -> bool {
        tokio::select! {
            biased;
            () = self.stop.stopped() => false,
            () = tokio::time::sleep(pause) => true,
        }
    }

    /// Waits until a moment of the interval that begins now, so that clients do not act together.
    pub(super) async fn pause_part(&self, interval: Duration) -> bool {
        self.pause(interval.mul_f64(fastrand::f64())).await
    }

    /// Counts the client as ended.
    pub(super) fn ended(&self) {
        self.observer.findings().clients_stopped += 1;
    }

    /// Writes to the log of the run.
    pub(super) fn log(&self, line: impl FnOnce() -> String) {
        self.observer.log(|| format!("client {}: {}", self.id.number, line()));
    }
}
