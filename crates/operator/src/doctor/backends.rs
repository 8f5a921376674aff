//! Finds out whether an address leads to several apiservers, as [`jackstay_core::backends`] tells them apart.

use std::net::SocketAddr;
use std::time::Instant;

use http::StatusCode;
use jackstay_core::backends::{
    KnownBackends, ObservedBackend, SURVEY, advertised_address, certificate_hash,
};
use jackstay_sys::clock;
use tokio::time::timeout_at;

use super::observations::AddressBackends;
use super::probe::{PeerConfig, ProbeConnection, StepTimer, get, open};
use super::target::Target;

/// Opens [`SURVEY`] connections to an address, one after the other, and reads which apiservers they have reached. What was
/// not read until the deadline is left out.
pub(super) async fn examine(
    target: &Target,
    address: SocketAddr,
    deadline: Instant,
) -> AddressBackends {
    let mut survey = BackendSurvey::default();
    let connections = async {
        for _ in 0..SURVEY {
            let mut timer = StepTimer::start(clock::now());
            if let Ok(mut opened) = open(&mut timer, address, &target.peer).await {
                survey.observe(&mut opened, &target.peer).await;
            }
        }
    };
    let _ = timeout_at(deadline.into(), connections).await;
    survey.result(address)
}

/// What the connections to one address have shown.
#[derive(Default)]
pub(super) struct BackendSurvey {
    known: KnownBackends,
    connections: usize,
}

impl BackendSurvey {
    /// Reads which apiserver a new connection has reached.
    pub(super) async fn observe(&mut self, opened: &mut ProbeConnection, peer: &PeerConfig) {
        let Some(certificate) = &opened.certificate else { return };
        let certificate = certificate_hash(certificate);
        // An anonymous user may not read it.
        let address = if peer.authenticated { advertised(opened, peer).await } else { None };
        if self.connections == 0 {
            self.known.begin_survey(clock::now());
        }
        self.known.observe(ObservedBackend { certificate, address }, clock::now());
        self.connections += 1;
    }

    /// The result for the address.
    pub(super) fn result(&self, address: SocketAddr) -> AddressBackends {
        let backends: Vec<String> =
            self.known.present().into_iter().map(|backend| backend.name.into_string()).collect();
        AddressBackends {
            address,
            kind: self.known.kind(),
            backends,
            connections: self.connections,
        }
    }
}

/// The address that the apiserver advertises.
async fn advertised(opened: &mut ProbeConnection, peer: &PeerConfig) -> Option<Box<str>> {
    let (status, body, _) = get(&mut opened.send, "/api", peer).await.ok()?;
    (status == StatusCode::OK).then(|| advertised_address(body.as_bytes()))?
}

#[cfg(test)]
mod tests;
