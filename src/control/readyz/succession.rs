//! Replaces the connection of the prober when its certificate or the CA bundle has changed.
//!
//! The connection with the previous one carries probes until the endpoint has accepted one with the new credential,
//! because the new credential may be wrong ([`crate::upstream::succession`]).

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use jackstay_core::backoff::Backoff;
use jackstay_sys::clock;
use tokio::time::sleep;

use super::connection::{ProbeConnection, connect, is_usable};
use super::reachability::ReachabilityCheck;
use crate::upstream::Upstream;
use crate::upstream::connection::{ConnectionState, DrainReason};
use crate::upstream::credentials::CredentialClass;
use crate::upstream::endpoint::Endpoint;
use crate::upstream::trial::try_certificate;

/// Interval of the checks whether the credential has changed.
const INTERVAL: Duration = Duration::from_secs(1);
/// The pauses after attempts that have failed.
const PAUSES: Backoff = Backoff::new(INTERVAL, Duration::from_secs(20)).with_factors(0.8, 1.2);

/// Opens the connections that succeed those with an older credential.
#[derive(Default)]
pub struct Succession {
    successor: RefCell<Option<ProbeConnection>>,
}

impl Succession {
    /// Takes the accepted connection, in place of the previous one.
    pub fn take(&self) -> Option<ProbeConnection> {
        self.successor.take().filter(|successor| successor.state() == ConnectionState::Live)
    }

    /// Connects whenever the prober uses a connection with an older credential, until the future is dropped.
    pub async fn run(
        &self,
        upstream: &Arc<Upstream>,
        endpoint: &Arc<Endpoint>,
        reachability: &ReachabilityCheck,
    ) {
        let mut pauses = PAUSES;
        loop {
            sleep(pauses.pause_at(fastrand::f64())).await;
            let tls = upstream.credentials.tls(CredentialClass::Probe);
            // Without a credential the connection is replaced with each probe.
            let is_due = upstream.has_probe_credential()
                && tls.is_some_and(|tls| reachability.has_older(tls.generation));
            if !is_due {
                self.successor.take();
                pauses.reset();
            } else if self.successor.borrow().as_ref().is_some_and(|one| !is_usable(upstream, one))
            {
                self.successor.take();
            } else if self.successor.borrow().is_none() {
                match self.connect(upstream, endpoint, reachability).await {
                    Some(()) => pauses.reset(),
                    None => drop(pauses.failed()),
                }
            }
        }
    }

    /// Makes one attempt.
    async fn connect(
        &self,
        upstream: &Arc<Upstream>,
        endpoint: &Arc<Endpoint>,
        reachability: &ReachabilityCheck,
    ) -> Option<()> {
        let successor = connect(upstream, endpoint, reachability).await?;
        if successor.shows_certificate()
            && let Err(why) = try_certificate(&successor).await
        {
            let (generation, now) = (successor.generation, clock::now());
            let class = CredentialClass::Probe;
            upstream.successions.wait(class, generation, (&**endpoint, &*why), now);
            successor.close(DrainReason::CertificateRefused);
            return None;
        }
        upstream.successions.end(CredentialClass::Probe, endpoint);
        self.successor.replace(Some(successor));
        Some(())
    }
}
