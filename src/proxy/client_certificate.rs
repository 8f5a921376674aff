//! A client's certificate: whether it is valid, and until when.
//!
//! kube-apiserver authenticates a request once, when it begins: its x509 authenticator verifies the
//! chain against the client CA at that time
//! (`apiserver/pkg/authentication/request/x509/x509.go`, called by `WithAuthentication`). It does not
//! check a running request again. A watch ends after the timeout that its client set (client-go's
//! reflectors: 5 to 10 minutes) or after 30 to 60 minutes (`--min-request-timeout`, doubled at random in
//! `handlers/get.go`); the client's next watch needs a valid certificate. An exec, attach or port-forward
//! ends after 4 h without traffic (kubelet's `streamingConnectionIdleTimeout`).
//!
//! jackstay resumes watches, and carries watches and tunnels on connections with its own credential. So
//! it checks the client's certificate more than once:
//!
//! * Each request, and each resume or move of a watch, needs a certificate that is valid at that time
//!   under the client CA of that time.
//! * A watch or tunnel ends when the certificate with which it began is no longer valid. A watch ends
//!   cleanly where its client can continue, as after a timeout of the apiserver. The client's next
//!   request gets a 401.
//! * Any other request runs to its end, as it does without jackstay.
//!
//! [`client_chain`] verifies chains and keeps the result for a connection. This file starts the
//! verification, follows the end of its validity, and wakes the requests that depend on it.

use std::cell::{Cell, RefCell};
use std::convert::Infallible;
use std::future::pending;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustls::pki_types::CertificateDer;
use tokio::sync::Notify;
use tokio::task::spawn_local;
use tokio::time::sleep;

use crate::net::tls::certificate::{self, CertInfo, Subject};
use crate::net::tls::client_chain::{self, ChainVerdict, ClientChain};
use crate::net::tls::serving::ServingTls;
use crate::observe::ListenerMetrics;
use crate::observe::utc::{Utc, wall_clock};
use crate::upstream::credentials::CredentialClass;

/// How often validity is compared with the clock, which may be set.
const CLOCK_INTERVAL: Duration = Duration::from_secs(60);
/// Pause before a verification that found the queue full is tried again.
const BUSY_PAUSE: Duration = Duration::from_secs(1);

/// The certificate that a client sent in its TLS handshake.
pub struct ClientCertificate {
    chain: Arc<ClientChain>,
    info: Result<CertInfo, String>,
    tls: Arc<ServingTls>,
    metrics: Arc<ListenerMetrics>,
    verdict: RefCell<Option<ChainVerdict>>,
    verifying: Cell<bool>,
    /// Whether the last verification was refused because the queue was full.
    busy: Cell<bool>,
    /// Notified after each verification, and when the certificate is no longer valid.
    changed: Notify,
}

impl ClientCertificate {
    /// The certificate of a finished handshake, if the client sent one.
    pub fn new(
        chain: Option<&[CertificateDer<'_>]>,
        tls: &Arc<ServingTls>,
        metrics: &Arc<ListenerMetrics>,
    ) -> Option<Rc<Self>> {
        let chain = chain?.iter().map(|certificate| certificate.clone().into_owned()).collect();
        let chain = ClientChain::new(chain)?;
        Some(Rc::new(Self {
            info: certificate::cert_info(chain.leaf()),
            chain: Arc::new(chain),
            tls: Arc::clone(tls),
            metrics: Arc::clone(metrics),
            verdict: RefCell::default(),
            verifying: Cell::new(false),
            busy: Cell::new(false),
            changed: Notify::new(),
        }))
    }

    /// What the certificate says, valid or not; `None` if it cannot be parsed.
    pub fn certificate(&self) -> Option<&CertInfo> {
        self.info.as_ref().ok()
    }

    /// The certificate if it is valid at `now` under the current client CA, or why it is not. `None`: the
    /// chain has not been verified yet ([`Self::verified`]).
    pub fn proven(&self, now: SystemTime) -> Option<Result<&CertInfo, String>> {
        let info = match &self.info {
            Ok(info) => info,
            Err(why) => return Some(Err(why.clone())),
        };
        if now > info.not_after {
            return Some(Err(format!("it expired on {}", Utc(info.not_after).seconds())));
        }
        if now < info.not_before {
            return Some(Err(format!("it is not valid before {}", Utc(info.not_before).seconds())));
        }
        let ca = self.tls.client_ca();
        let Some(ca) = ca.as_ref() else {
            return Some(Err("client certificates are no longer accepted".to_owned()));
        };
        let mut kept = self.verdict.borrow_mut();
        if !kept.as_ref().is_some_and(|verdict| verdict.holds(ca, now)) {
            *kept = Some(ca.cached_verdict(&self.chain, now)?);
            self.metrics.client_verified("known");
        }
        let verdict = kept.as_ref()?;
        Some(verdict.result.as_ref().map(|()| info).map_err(Clone::clone))
    }

    /// Waits until [`Self::proven`] has a result; false if the verification queue is full.
    pub async fn verified(self: &Rc<Self>) -> bool {
        self.busy.set(false);
        loop {
            // Registered before the check, so that a result between the check and the wait wakes it.
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            if self.proven(wall_clock()).is_some() {
                return true;
            }
            if self.busy.get() {
                return false;
            }
            self.verify();
            changed.await;
        }
    }

    /// Starts a verification of the chain unless one is running, so that a client that opens and cancels
    /// requests causes only one.
    fn verify(self: &Rc<Self>) {
        if self.verifying.replace(true) {
            return;
        }
        let this = Rc::clone(self);
        spawn_local(async move {
            let mut slot = client_chain::acquire_slot(&this.chain).await;
            let ca = this.tls.client_ca().clone();
            // Without another reference the connection is closed and needs no result.
            let wanted = Rc::strong_count(&this) > 1;
            if let (Some(slot), Some(ca), true) = (&mut slot, ca, wanted) {
                let verdict = slot.verify(&this.chain, &ca).await;
                let outcome = if verdict.result.is_ok() { "ok" } else { "failed" };
                this.metrics.client_verified(outcome);
                *this.verdict.borrow_mut() = Some(verdict);
            } else if slot.is_none() {
                this.metrics.client_verified("busy");
                this.busy.set(true);
            }
            this.verifying.set(false);
            this.changed.notify_waiters();
            drop(this);
            if let Some(slot) = slot {
                slot.rest().await;
            }
        });
    }

    /// Verifies the certificate again when the client CA changes and when a validity period begins or
    /// ends, and notifies when the certificate is no longer valid. Runs as long as the connection.
    pub async fn follow(self: &Rc<Self>) -> Infallible {
        let mut changes = self.tls.client_ca_changes();
        loop {
            changes.mark_unchanged();
            let known = self.verified().await;
            let now = wall_clock();
            if self.proven(now).is_some_and(|proven| proven.is_err()) {
                self.changed.notify_waiters();
            }
            let pause = if known { self.until_next(now) } else { BUSY_PAUSE };
            tokio::select! {
                _ = changes.changed() => {}
                () = sleep(pause) => {}
            }
        }
    }

    /// How long the result at `now` can last according to the clock, at most [`CLOCK_INTERVAL`].
    fn until_next(&self, now: SystemTime) -> Duration {
        let verdict = self.verdict.borrow();
        let ends = [
            verdict.as_ref().and_then(ChainVerdict::until),
            self.certificate().map(|info| info.not_before),
            self.certificate().map(|info| info.not_after + Duration::from_millis(1)),
        ];
        let ahead = ends.into_iter().flatten().filter_map(|end| end.duration_since(now).ok());
        let ahead = ahead.filter(|pause| !pause.is_zero());
        ahead.fold(CLOCK_INTERVAL, Duration::min)
    }
}

/// Ready with the reason when an [`IdentityProof`] is no longer valid.
pub type ProofExpiry = Pin<Box<dyn Future<Output = String>>>;

/// Proves that a request may use the connections of its class.
#[derive(Clone)]
pub struct IdentityProof(Option<Rc<ClientCertificate>>);

impl IdentityProof {
    /// That of a request of this class. Requests with a token or without a credential need none: the
    /// apiserver decides.
    pub fn new(class: CredentialClass, peer: Option<&Rc<ClientCertificate>>) -> Self {
        Self(peer.filter(|_| matches!(class, CredentialClass::Identity(_))).cloned())
    }

    /// The subject of the certificate, if the class needs one.
    pub fn subject(&self) -> Option<&Subject> {
        self.0.as_ref()?.certificate().map(|info| &info.subject)
    }

    /// Whether the proof is known to be valid at `now`.
    pub fn is_current(&self, now: SystemTime) -> bool {
        self.0.as_ref().is_none_or(|peer| matches!(peer.proven(now), Some(Ok(_))))
    }

    /// Waits until the proof is known to be valid, forever if it is not. In that case [`Self::expiry`] becomes
    /// ready, even if [`ClientCertificate::follow`] has not noticed yet: its timers stop while the machine
    /// is suspended, and the clock does not.
    pub async fn confirmed(&self) {
        let Some(peer) = &self.0 else { return };
        while !peer.verified().await {
            sleep(BUSY_PAUSE).await;
        }
        if !self.is_current(wall_clock()) {
            peer.changed.notify_waiters();
            pending::<()>().await;
        }
    }

    /// A future that is ready with the reason when the proof is no longer valid. `None` if the class needs
    /// no proof. [`ClientCertificate::follow`] must run meanwhile, as it does for each connection.
    pub fn expiry(&self) -> Option<ProofExpiry> {
        let peer = Rc::clone(self.0.as_ref()?);
        Some(Box::pin(Self::expired(peer)))
    }

    async fn expired(peer: Rc<ClientCertificate>) -> String {
        loop {
            let mut changed = pin!(peer.changed.notified());
            changed.as_mut().enable();
            if let Some(Err(why)) = peer.proven(wall_clock()) {
                let subject = peer.certificate().map(|info| info.subject.to_string());
                let subject = subject.unwrap_or_default();
                return format!("the client certificate of {subject} is no longer valid: {why}");
            }
            changed.await;
        }
    }

    /// Like [`Self::expiry`], for a tunnel: it outlives the HTTP connection, so it runs
    /// [`ClientCertificate::follow`] itself.
    pub async fn follow_until_expiry(&self) -> String {
        let Some(peer) = &self.0 else { pending().await };
        tokio::select! {
            why = Self::expired(Rc::clone(peer)) => why,
            never = peer.follow() => match never {},
        }
    }
}
