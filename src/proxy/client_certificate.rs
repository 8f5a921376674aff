//! What a client has proven by its certificate, and for how long.
//!
//! kube-apiserver authenticates a request once, when it begins: its x509 authenticator verifies the
//! chain against the client CA and the clock of that moment
//! (`apiserver/pkg/authentication/request/x509/x509.go`, called by `WithAuthentication`). What runs is
//! not looked at again. A watch ends by the timeout that its client gave (client-go's reflectors: 5 to
//! 10 minutes), or after 30 to 60 minutes (`--min-request-timeout`, doubled at random in
//! `handlers/get.go`); its client then needs a valid certificate to go on. An exec, attach or
//! port-forward ends when it has been idle for 4 h (kubelet's `streamingConnectionIdleTimeout`).
//!
//! jackstay keeps watches alive and carries both on connections with a credential of its own, so
//! here a proof is more than a check at the beginning:
//!
//! * Each request, each resume and each move of a watch needs a proof that holds at that moment, under
//!   the CA and the clock of that moment.
//! * A watch or tunnel ends when the proof that it began with does: a watch cleanly where its client
//!   can go on from there, as by the apiserver's own timeout; its next request gets the 401.
//! * Any other request runs to its end, as it does directly.
//!
//! The verdict on the chain is kept for the connection ([`client_chain`]); this file asks for it,
//! follows its end, and wakes what depends on it.

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
use crate::observe::utc::Utc;
use crate::upstream::credentials::CredentialClass;

/// How often the clock is looked at: it may be set.
const CLOCK_LOOK: Duration = Duration::from_secs(60);
/// When a verification is tried again that found the queue full.
const BUSY_PAUSE: Duration = Duration::from_secs(1);

/// What a client has shown in its TLS handshake.
pub struct ClientCertificate {
    chain: Arc<ClientChain>,
    info: Result<CertInfo, String>,
    tls: Arc<ServingTls>,
    metrics: Arc<ListenerMetrics>,
    verdict: RefCell<Option<ChainVerdict>>,
    verifying: Cell<bool>,
    /// The last verification did not happen: too many waited.
    busy: Cell<bool>,
    /// Told when a verdict has come, or failed to, and when a proof has ended.
    changed: Notify,
}

impl ClientCertificate {
    /// The peer of a finished handshake; `None` without a certificate.
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

    /// Its certificate, whether it proves anything or not.
    pub fn certificate(&self) -> Option<&CertInfo> {
        self.info.as_ref().ok()
    }

    /// Its certificate, if that is valid at `now` under the client CA in force, or why it is not.
    /// `None`: the chain has still to be verified ([`Self::verified`]).
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

    /// Waits until [`Self::proven`] has an answer; false if too many chains wait to be verified.
    pub async fn verified(self: &Rc<Self>) -> bool {
        self.busy.set(false);
        loop {
            // Registered before the look, so that no verdict falls between look and wait.
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            if self.proven(SystemTime::now()).is_some() {
                return true;
            }
            if self.busy.get() {
                return false;
            }
            self.verify();
            changed.await;
        }
    }

    /// Has the chain verified, once at a time: of a client that opens and cancels requests, too.
    fn verify(self: &Rc<Self>) {
        if self.verifying.replace(true) {
            return;
        }
        let this = Rc::clone(self);
        spawn_local(async move {
            let mut turn = client_chain::acquire_slot(&this.chain).await;
            let ca = this.tls.client_ca().clone();
            // No other reference: the connection is closed and needs no verdict.
            let wanted = Rc::strong_count(&this) > 1;
            if let (Some(turn), Some(ca), true) = (&mut turn, ca, wanted) {
                let verdict = turn.verify(&this.chain, &ca).await;
                let outcome = if verdict.result.is_ok() { "ok" } else { "failed" };
                this.metrics.client_verified(outcome);
                *this.verdict.borrow_mut() = Some(verdict);
            } else if turn.is_none() {
                this.metrics.client_verified("busy");
                this.busy.set(true);
            }
            this.verifying.set(false);
            this.changed.notify_waiters();
            drop(this);
            if let Some(turn) = turn {
                turn.rest().await;
            }
        });
    }

    /// Follows the proof for as long as something depends on it: has it verified when the client CA
    /// changes or a certificate begins or ceases to be valid, and tells of its end.
    pub async fn follow(self: &Rc<Self>) -> Infallible {
        let mut changes = self.tls.client_ca_changes();
        loop {
            changes.mark_unchanged();
            let known = self.verified().await;
            let now = SystemTime::now();
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

    /// How long what is known at `now` holds by the clock.
    fn until_next(&self, now: SystemTime) -> Duration {
        let verdict = self.verdict.borrow();
        let ends = [
            verdict.as_ref().and_then(ChainVerdict::until),
            self.certificate().map(|info| info.not_before),
            self.certificate().map(|info| info.not_after + Duration::from_millis(1)),
        ];
        let ahead = ends.into_iter().flatten().filter_map(|end| end.duration_since(now).ok());
        let ahead = ahead.filter(|pause| !pause.is_zero());
        ahead.fold(CLOCK_LOOK, Duration::min)
    }
}

/// Ready when a proof does not hold any more: why.
pub type ProofExpiry = Pin<Box<dyn Future<Output = String>>>;

/// What entitles a request to the connections of its class.
#[derive(Clone)]
pub struct IdentityProof(Option<Rc<ClientCertificate>>);

impl IdentityProof {
    /// That of a request of this class. Requests with a token or without a credential need none: the
    /// apiserver decides.
    pub fn new(class: CredentialClass, peer: Option<&Rc<ClientCertificate>>) -> Self {
        Self(peer.filter(|_| matches!(class, CredentialClass::Identity(_))).cloned())
    }

    /// The subject that is proven.
    pub fn subject(&self) -> Option<&Subject> {
        self.0.as_ref()?.certificate().map(|info| &info.subject)
    }

    /// Whether it is known to hold at `now`.
    pub fn is_current(&self, now: SystemTime) -> bool {
        self.0.as_ref().is_none_or(|peer| matches!(peer.proven(now), Some(Ok(_))))
    }

    /// Waits until it is known to hold; for ever, if it does not. [`Self::end`] is ready then, also
    /// where [`ClientCertificate::follow`] has not noticed yet: its timers stand still while a machine is suspended,
    /// and the clock does not.
    pub async fn confirmed(&self) {
        let Some(peer) = &self.0 else { return };
        while !peer.verified().await {
            sleep(BUSY_PAUSE).await;
        }
        if !self.is_current(SystemTime::now()) {
            peer.changed.notify_waiters();
            pending::<()>().await;
        }
    }

    /// Ready at its end: why it does not hold any more. `None` where no proof is needed. [`ClientCertificate::follow`]
    /// has to run meanwhile, as it does for each connection.
    pub fn end(&self) -> Option<ProofExpiry> {
        let peer = Rc::clone(self.0.as_ref()?);
        Some(Box::pin(Self::ended(peer)))
    }

    async fn ended(peer: Rc<ClientCertificate>) -> String {
        loop {
            let mut changed = pin!(peer.changed.notified());
            changed.as_mut().enable();
            if let Some(Err(why)) = peer.proven(SystemTime::now()) {
                let subject = peer.certificate().map(|info| info.subject.to_string());
                let subject = subject.unwrap_or_default();
                return format!("the client certificate of {subject} is no longer valid: {why}");
            }
            changed.await;
        }
    }

    /// The same for what outlives the client's HTTP connection, and follows the proof by itself.
    pub async fn followed_to_its_end(&self) -> String {
        let Some(peer) = &self.0 else { pending().await };
        tokio::select! {
            why = Self::ended(Rc::clone(peer)) => why,
            never = peer.follow() => match never {},
        }
    }
}
