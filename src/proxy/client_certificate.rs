//! Determines whether and until when a client's certificate is valid.
//!
//! kube-apiserver authenticates a request once, when it begins: its x509 authenticator verifies the
//! chain against the client CA at that time
//! (`apiserver/pkg/authentication/request/x509/x509.go`, called by `WithAuthentication`). It does not
//! check a running request again. A watch ends after the timeout that its client set (client-go's
//! reflectors: 5 to 10 minutes) or after 30 to 60 minutes (`--min-request-timeout`, doubled at random in
//! `handlers/get.go`); the client's next watch needs a valid certificate. An exec, attach or port-forward
//! ends after 4 h without traffic (kubelet's `streamingConnectionIdleTimeout`).
//!
//! jackstay resumes watches, and carries watches and tunnels on connections with its own credential.
//! Therefore it checks the client's certificate more than once:
//!
//! * Each request, and each resume or move of a watch, needs a certificate that is valid at that time
//!   under the client CA of that time.
//! * A watch or tunnel ends when the certificate with which it began is no longer valid. A watch ends
//!   cleanly where its client can continue, as after a timeout of the apiserver. The client's next
//!   request gets a 401.
//! * Any other request runs to its end, as it does without jackstay.
//! * The connection of an identity ends after these requests. On its next connection, the client shows its new
//!   certificate, or is served as one without an identity.
//!
//! [`client_chain`] verifies chains and caches the results. This module starts the verification, repeats
//! it when its result may change, and wakes the requests that depend on the result.

use std::cell::{Cell, RefCell};
use std::convert::Infallible;
use std::future::pending;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use jackstay_core::admission::Refusal;
use jackstay_net::tls::certificate::{self, CertInfo, Subject, X509Error};
use jackstay_net::tls::client_chain::{self, ChainError, ChainVerdict, ClientChain};
use jackstay_net::tls::serving::ServingTls;
use jackstay_sys::sockets::source::Source;
use jackstay_sys::utc::{Utc, wall_clock};
use rustls::pki_types::CertificateDer;
use tokio::sync::Notify;
use tokio::task::spawn_local;
use tokio::time::sleep;

use crate::observe::ListenerMetrics;
use crate::upstream::credentials::CredentialClass;

/// How often the validity is checked at least, because the system clock may be changed.
const CLOCK_INTERVAL: Duration = Duration::from_secs(60);
/// Pause after a verification that was refused because the queue was full.
const BUSY_PAUSE: Duration = Duration::from_millis(250);

/// Why the certificate of a client is not valid.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Invalidity {
    /// It cannot be parsed.
    #[error("{0}")]
    Unreadable(#[source] X509Error),
    /// It expired at this time.
    #[error("it expired on {}", Utc(*.0).seconds())]
    Expired(SystemTime),
    /// It is valid only from this time.
    #[error("it is not valid before {}", Utc(*.0).seconds())]
    NotYetValid(SystemTime),
    /// The listener has no client CA any more.
    #[error("client certificates are no longer accepted")]
    NoClientCa,
    /// Its chain is not valid under the client CA.
    #[error("{0}")]
    Chain(#[source] ChainError),
}

/// The certificate that a client sent in its TLS handshake.
pub struct ClientCertificate {
    chain: Arc<ClientChain>,
    source: Source,
    info: Result<CertInfo, X509Error>,
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
    /// The certificate that a client of `source` sent in its handshake, if any.
    pub fn new(
        source: Source,
        chain: Option<&[CertificateDer<'_>]>,
        tls: &Arc<ServingTls>,
        metrics: &Arc<ListenerMetrics>,
    ) -> Option<Rc<Self>> {
        let chain = chain?.iter().map(|certificate| certificate.clone().into_owned()).collect();
        let chain = ClientChain::new(chain)?;
        Some(Rc::new(Self {
            info: certificate::cert_info(chain.leaf()),
            chain: Arc::new(chain),
            source,
            tls: Arc::clone(tls),
            metrics: Arc::clone(metrics),
            verdict: RefCell::default(),
            verifying: Cell::new(false),
            busy: Cell::new(false),
            changed: Notify::new(),
        }))
    }

    /// The last result of the verification, for [`Self::with_verdict`].
    pub fn verdict(&self) -> Option<ChainVerdict> {
        self.verdict.borrow().clone()
    }

    /// Continues with a result that another thread has obtained for the same certificate.
    pub fn with_verdict(self: Rc<Self>, verdict: Option<ChainVerdict>) -> Rc<Self> {
        self.verdict.replace(verdict);
        self
    }

    /// The content of the certificate, valid or not; `None` if it cannot be parsed.
    pub fn info(&self) -> Option<&CertInfo> {
        self.info.as_ref().ok()
    }

    /// The content of the certificate if it is valid at `now` under the current client CA, or the reason
    /// why it is not. `None` if the chain has not been verified yet ([`Self::verified`]).
    pub fn validity(&self, now: SystemTime) -> Option<Result<&CertInfo, Invalidity>> {
        let info = match &self.info {
            Ok(info) => info,
            Err(error) => return Some(Err(Invalidity::Unreadable(error.clone()))),
        };
        if now > info.not_after {
            return Some(Err(Invalidity::Expired(info.not_after)));
        }
        if now < info.not_before {
            return Some(Err(Invalidity::NotYetValid(info.not_before)));
        }
        let ca = self.tls.client_ca();
        let Some(ca) = ca.as_ref() else {
            return Some(Err(Invalidity::NoClientCa));
        };
        let mut verdict = self.verdict.borrow_mut();
        if !verdict.as_ref().is_some_and(|verdict| verdict.applies(ca, now)) {
            *verdict = Some(ca.cached_verdict(&self.chain, now)?);
            self.metrics.client_verified("known");
        }
        let verdict = verdict.as_ref()?;
        Some(verdict.result.clone().map(|()| info).map_err(Invalidity::Chain))
    }

    /// Waits until [`Self::validity`] has a result. Returns false if the verification queue is full.
    pub async fn verified(self: &Rc<Self>) -> bool {
        self.busy.set(false);
        loop {
            // The wait is registered before the check, so that a result in between ends it.
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            if self.validity(wall_clock()).is_some() {
                return true;
            }
            if self.busy.get() {
                return false;
            }
            self.verify();
            changed.await;
        }
    }

    /// Like [`Self::verified`], but waits also while the verification queue is full.
    pub async fn until_verified(self: &Rc<Self>) {
        while !self.verified().await {
            sleep(BUSY_PAUSE).await;
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
            let mut slot = client_chain::acquire_slot(&this.chain, this.source.key()).await;
            let ca = this.tls.client_ca().clone();
            // The connection is closed if no other reference exists.
            let is_open = Rc::strong_count(&this) > 1;
            if let (Some(slot), Some(ca), true) = (&mut slot, ca, is_open) {
                let verdict = slot.verify(&this.chain, &ca).await;
                let outcome = if verdict.result.is_ok() { "ok" } else { "failed" };
                this.metrics.client_verified(outcome);
                *this.verdict.borrow_mut() = Some(verdict);
            } else if slot.is_none() {
                this.metrics.client_verified(Refusal::CertificateQueue.counted().label());
                this.busy.set(true);
            }
            this.verifying.set(false);
            this.changed.notify_waiters();
            drop(this);
            if let Some(slot) = slot {
                slot.pause().await;
            }
        });
    }

    /// Verifies the certificate again when the client CA changes and when a validity period begins or
    /// ends, and notifies when the certificate is no longer valid. It must run as long as the connection.
    pub async fn follow(self: &Rc<Self>) -> Infallible {
        let mut changes = self.tls.client_ca_changes();
        loop {
            changes.mark_unchanged();
            let has_result = self.verified().await;
            let now = wall_clock();
            if self.validity(now).is_some_and(|validity| validity.is_err()) {
                self.changed.notify_waiters();
            }
            let pause = if has_result { self.until_next_change(now) } else { BUSY_PAUSE };
            tokio::select! {
                _ = changes.changed() => {}
                () = sleep(pause) => {}
            }
        }
    }

    /// Returns with the reason when the certificate is no longer valid. [`Self::follow`] must run at the same time.
    pub async fn expired(&self) -> String {
        loop {
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            if let Some(Err(reason)) = self.validity(wall_clock()) {
                let subject = self.info().map(|info| info.subject.to_string()).unwrap_or_default();
                return format!("the client certificate of {subject} is no longer valid: {reason}");
            }
            changed.await;
        }
    }

    /// The time from `now` to the next begin or end of a validity period, at most [`CLOCK_INTERVAL`].
    fn until_next_change(&self, now: SystemTime) -> Duration {
        let verdict = self.verdict.borrow();
        let changes = [
            verdict.as_ref().and_then(ChainVerdict::until),
            self.info().map(|info| info.not_before),
            self.info().map(|info| info.not_after + Duration::from_millis(1)),
        ];
        let pauses = changes.into_iter().flatten().filter_map(|at| at.duration_since(now).ok());
        pauses.filter(|pause| !pause.is_zero()).fold(CLOCK_INTERVAL, Duration::min)
    }
}

/// Ready with the reason when an [`IdentityProof`] is no longer valid.
pub type ProofExpiry = Pin<Box<dyn Future<Output = String>>>;

/// Proves that a request may use the connections of its credential class.
#[derive(Clone)]
pub struct IdentityProof(Option<Rc<ClientCertificate>>);

impl IdentityProof {
    /// The proof of a request of `class`. A request with a token or without a credential needs no proof,
    /// because the apiserver authenticates it.
    pub fn new(class: CredentialClass, certificate: Option<&Rc<ClientCertificate>>) -> Self {
        Self(certificate.filter(|_| matches!(class, CredentialClass::Identity(_))).cloned())
    }

    /// The subject of the certificate, if the class needs one.
    pub fn subject(&self) -> Option<&Subject> {
        self.0.as_ref()?.info().map(|info| &info.subject)
    }

    /// Whether the proof is known to be valid at `now`.
    pub fn is_current(&self, now: SystemTime) -> bool {
        let Some(certificate) = &self.0 else { return true };
        matches!(certificate.validity(now), Some(Ok(_)))
    }

    /// Returns once the proof is known to be valid. If it is not valid, this never returns, and
    /// [`Self::expiry`] becomes ready. [`ClientCertificate::follow`] may not have noticed the expiry yet,
    /// because its timers stop while the machine is suspended and the clock does not.
    pub async fn confirmed(&self) {
        let Some(certificate) = &self.0 else { return };
        certificate.until_verified().await;
        if !self.is_current(wall_clock()) {
            certificate.changed.notify_waiters();
            pending::<()>().await;
        }
    }

    /// A future that is ready with the reason when the proof is no longer valid. `None` if the class needs
    /// no proof. [`ClientCertificate::follow`] must run at the same time, as it does for each connection.
    pub fn expiry(&self) -> Option<ProofExpiry> {
        let certificate = Rc::clone(self.0.as_ref()?);
        Some(Box::pin(async move { certificate.expired().await }))
    }

    /// Like [`Self::expiry`], for a tunnel. A tunnel outlives the HTTP connection, so this runs
    /// [`ClientCertificate::follow`] itself.
    pub async fn follow_until_expiry(&self) -> String {
        let Some(certificate) = &self.0 else { pending().await };
        tokio::select! {
            reason = certificate.expired() => reason,
            never = certificate.follow() => match never {},
        }
    }
}
