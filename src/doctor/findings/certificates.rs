//! Causes in certificates: those of the servers, and our own.

use super::{Cause, Finding, note, problem};
use crate::doctor::observations::{Failure, Kind, Observations, Step};
use crate::observe::counted;

/// A certificate that ends within 14 days is told.
const SOON_S: i64 = 14 * 86_400;

pub(super) fn certificates(seen: &Observations, found: &mut Vec<Finding>) {
    for endpoint in &seen.endpoints {
        let address = &endpoint.address;
        let shown = endpoint.certificate.as_ref();
        // A handshake that is cut or not answered says nothing of the certificate.
        let says = |failure: &&Failure| !matches!(failure.kind, Kind::Timeout | Kind::Reset);
        if let Some(failure) = endpoint.failures(Step::Tls).find(says) {
            let subject = shown.map_or("?", |c| c.subject.as_str());
            let (cause, what, advice) = match failure.kind {
                Kind::Expired => (
                    Cause::CertificateExpired,
                    format!(
                        "The certificate of {address} has expired on {}.",
                        shown.map_or("?", |c| c.not_after.as_str())
                    ),
                    "Renew it (`kubeadm certs renew apiserver`), and restart the apiserver.".into(),
                ),
                Kind::NotYetValid => (
                    Cause::CertificateNotYetValid,
                    format!(
                        "The certificate of {address} is valid only from {}.",
                        shown.map_or("?", |c| c.not_before.as_str())
                    ),
                    "Is this machine's clock right?".into(),
                ),
                Kind::UnknownIssuer => (
                    Cause::WrongCa,
                    format!("The certificate of {address} is not signed by the CA it should be."),
                    format!(
                        "It is signed by {}: is the CA file that of this cluster, and is this an \
                         apiserver of it?",
                        shown.map_or("?", |c| c.issuer.as_str())
                    ),
                ),
                Kind::WrongName => (
                    Cause::SanMissing,
                    format!(
                        "The certificate of {address} is not for the name {:?}.",
                        endpoint.server_name
                    ),
                    format!(
                        "It is for {}: set server_name to one of these, or add the name to the \
                         certificate.",
                        shown.map_or("?".into(), |c| c.names.join(", "))
                    ),
                ),
                _ => (
                    Cause::Tls,
                    format!("TLS with {address} fails."),
                    "Is this an apiserver, and is nothing in between that ends TLS?".into(),
                ),
            };
            let because = format!("{} (the certificate of {subject})", failure.text);
            found.push(problem(80, cause, what, because, advice).about(address));
        } else if let Some(certificate) = shown.filter(|c| c.expires_in_s < SOON_S) {
            let finding = note(
                Cause::ExpiresSoon,
                format!(
                    "The certificate of {address} expires in {}.",
                    span(certificate.expires_in_s)
                ),
                format!("it is valid until {}", certificate.not_after),
                "Renew it in time.",
            );
            found.push(finding.about(address));
        }
    }
}

/// The client certificates that were shown, each once.
pub(super) fn shown(seen: &Observations, found: &mut Vec<Finding>) {
    let mut told = Vec::new();
    for shown in seen.endpoints.iter().filter_map(|endpoint| endpoint.shown.as_ref()) {
        if told.contains(&shown) || shown.expires_in_s >= SOON_S {
            continue;
        }
        told.push(shown);
        let advice = "Have a new one issued (`kubeadm certs renew admin.conf`; kubelet renews its \
                      own if its clock is right).";
        found.push(if shown.expires_in_s < 0 {
            problem(
                74,
                Cause::ClientCertificateExpired,
                format!("The client certificate of {} has expired.", shown.subject),
                format!("it was valid until {}", shown.not_after),
                advice,
            )
        } else {
            let (subject, span) = (&shown.subject, span(shown.expires_in_s));
            note(
                Cause::ExpiresSoon,
                format!("The client certificate of {subject} expires in {span}."),
                format!("it is valid until {}", shown.not_after),
                advice,
            )
        });
    }
}

/// A time to come, in the unit that fits it.
fn span(seconds: i64) -> String {
    match seconds / 3600 {
        ..1 => "less than an hour".to_owned(),
        hours @ 1..48 => counted(hours, "hour"),
        hours => counted(hours / 24, "day"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_left_is_never_none() {
        let shown = [(59, "less than an hour"), (3600, "1 hour"), (90_000, "25 hours")];
        for (seconds, words) in shown.into_iter().chain([(2 * 86_400, "2 days")]) {
            assert_eq!(span(seconds), words);
        }
    }
}
