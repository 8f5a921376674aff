//! Endpoints that `/readyz` cannot be asked of, because there is no credential to ask with.
//!
//! An anonymous request makes kube-apiserver send GOAWAY on the connection it came on
//! (`UnauthenticatedHTTP2DOSMitigation`, on by default), so a connection that is asked on cannot show
//! at the same time that the endpoint lives. Therefore two are used in turn:
//!
//! | connection | carries | ends |
//! |---|---|---|
//! | the newest | PINGs: while they are answered the endpoint is ready, its readiness is unknown | becomes the one before when its time is over |
//! | the one before | one anonymous question, if clients' requests end here (`mode: terminate`) | at the answer; its end is no event |
//!
//! They change places every 30 s at the earliest. Go's server closes a connection without requests
//! after 90 s (kube-apiserver's `IdleTimeout`), which an older one would not survive anyway. An
//! anonymous answer that says why the endpoint is not ready is believed; any other tells nothing.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, sleep_until};

use super::connection::{ProbeConnection, connect, gone};
use super::reachability::ReachabilityCheck;
use super::request::{ReadyzResult, ask, doubt};
use super::schedule::{ReadyVerdict, ResultStreak, anonymous_pause};
use crate::upstream::Upstream;
use crate::upstream::connection::ConnectionState;
use crate::upstream::endpoint::Endpoint;

/// How often it is looked whether there is a credential by now.
const LOOK: Duration = Duration::from_secs(1);

/// What is known of an endpoint whose `/readyz` is asked without a credential, if at all.
#[derive(Debug)]
pub struct AnonymousProber {
    streak: ResultStreak,
    failing: Option<String>,
    /// When the connections change places, and the next question is asked.
    next: Instant,
}

impl AnonymousProber {
    /// Nothing is known; the first question is asked `now`.
    pub fn new(now: Instant) -> Self {
        Self { streak: ResultStreak::default(), failing: None, next: now }
    }

    /// The endpoint has lost its connection: another process may be there.
    pub fn forget(&mut self) {
        self.streak = ResultStreak::default();
        self.failing = None;
    }

    fn show(&self, upstream: &Upstream, endpoint: &Endpoint) {
        match &self.failing {
            Some(why) => endpoint.readyz_failing(why),
            None => endpoint.readyz_not_probed(why_unknown(upstream)),
        }
    }

    /// Follows the life of an endpoint on `current` until there is a credential or `current` has
    /// ended. Returns the connection to go on with.
    pub async fn follow(
        &mut self,
        upstream: &Arc<Upstream>,
        endpoint: &Arc<Endpoint>,
        witness: &ReachabilityCheck,
        mut current: ProbeConnection,
    ) -> ProbeConnection {
        loop {
            self.show(upstream, endpoint);
            tokio::select! {
                () = gone(&current) => return current,
                () = sleep(LOOK) => {}
                () = sleep_until(self.next) => {}
            }
            if upstream.has_probe_credential() {
                return current;
            }
            // One that is suspect stays, until it is known what it has.
            if Instant::now() >= self.next && current.state() == ConnectionState::Live {
                let config = upstream.config.load_full();
                self.next =
                    Instant::now() + anonymous_pause(&config.health.readyz, fastrand::f64());
                let Some(fresh) = connect(upstream, endpoint, witness).await else { continue };
                witness.listen_to(&fresh);
                let before = std::mem::replace(&mut current, ProbeConnection(fresh));
                before.expect_end();
                if config.used_by.terminate {
                    self.question(upstream, endpoint, &before).await;
                }
            }
        }
    }

    /// Asks on a connection that is expected to be closed for it.
    async fn question(
        &mut self,
        upstream: &Upstream,
        endpoint: &Arc<Endpoint>,
        on: &ProbeConnection,
    ) {
        let config = upstream.config.load_full();
        let config = &config.health.readyz;
        let asked_at = Instant::now();
        let ready = match ask(on, config, None).await {
            ReadyzResult::Lost => return,
            ReadyzResult::Ready => {
                endpoint.note_probe_ok(asked_at);
                None
            }
            ReadyzResult::NotReady(why) => {
                doubt(upstream, endpoint);
                Some(why)
            }
        };
        match self.streak.add(ready.is_none(), config.rise, config.fall) {
            Some(ReadyVerdict::Ready) => self.failing = None,
            Some(ReadyVerdict::Failing) => self.failing = ready,
            None => {}
        }
    }
}

/// Why nothing is known of the readiness of an upstream's endpoints, and what to do.
fn why_unknown(upstream: &Upstream) -> &'static str {
    if !upstream.config().used_by.terminate {
        "connected; /readyz is not asked without a credential"
    } else if upstream.credentials.probe_token().is_some() {
        "readiness unknown: readyz.token_file cannot be read"
    } else if upstream.credentials.slots().is_empty() {
        "readiness unknown: set readyz.token_file"
    } else {
        "readiness unknown: no identity is loaded yet, and readyz.token_file is not set"
    }
}
