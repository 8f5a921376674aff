//! Rules for causes in the server certificates and the client certificates.

use jackstay_core::quantity::quantity;

use super::finding::{Cause, Finding, note, problem};
use crate::doctor::observations::{
    EndpointObservation, Failure, FailureKind, Observations, ServerCertificate, Step,
};

/// Certificates that expire within 14 days are reported.
const SOON_S: i64 = 14 * 86_400;

pub(super) fn server(observations: &Observations, found: &mut Vec<Finding>) {
    for endpoint in &observations.endpoints {
        let address = &endpoint.address;
        let shown = endpoint.certificate.as_ref();
        // A handshake that times out or is reset says nothing about the certificate.
        let concerns_certificate =
            |failure: &&Failure| !matches!(failure.kind, FailureKind::Timeout | FailureKind::Reset);
        if let Some(failure) = endpoint.failures(Step::Tls).find(concerns_certificate) {
            found.push(server_failure(endpoint, failure).about(address));
        } else if let Some(certificate) = shown.filter(|c| c.expires_in_s < SOON_S) {
            let span = format_span(certificate.expires_in_s);
            let finding = note(
                Cause::ExpiresSoon,
                format!("The certificate of {address} expires in {span}."),
                format!("valid until {}", certificate.not_after),
                "Renew it before then.",
            );
            found.push(finding.about(address));
        }
    }
}

/// The cause of a handshake that failed because of the certificate of the endpoint.
fn server_failure(endpoint: &EndpointObservation, failure: &Failure) -> Finding {
    let (cause, what, advice) = server_cause(endpoint, failure.kind);
    let Some(remedy) = &failure.remedy else {
        return problem(cause, what, failure.text.clone(), advice);
    };
    let because = failure.text.strip_suffix(remedy.as_str()).unwrap_or(&failure.text);
    let because = because.trim_end_matches(": ");
    problem(cause, what, because, sentence(remedy))
}

/// A remedy as a sentence of its own.
fn sentence(remedy: &str) -> String {
    let mut chars = remedy.chars();
    let first = chars.next().map(|c| c.to_ascii_uppercase());
    first.into_iter().chain(chars).chain(['.']).collect()
}

/// The cause, what is wrong and what to do.
fn server_cause(endpoint: &EndpointObservation, kind: FailureKind) -> (Cause, String, String) {
    let (address, shown) = (&endpoint.address, endpoint.certificate.as_ref());
    let field = |text: fn(&ServerCertificate) -> &str| shown.map_or("?", text);
    let certificate = format!("The certificate of {address}");
    match kind {
        FailureKind::Expired => (
            Cause::CertificateExpired,
            format!("{certificate} expired on {}.", field(|c| &c.not_after)),
            "Renew it (`kubeadm certs renew apiserver`) and restart the apiserver.".into(),
        ),
        FailureKind::NotYetValid => (
            Cause::CertificateNotYetValid,
            format!("{certificate} is valid only from {}.", field(|c| &c.not_before)),
            "Check the clock of this machine.".into(),
        ),
        FailureKind::UnknownIssuer => (
            Cause::WrongCa,
            format!("{certificate} is signed by another CA."),
            format!(
                "It is signed by {}: check that the CA file and the endpoint belong to the \
                 same cluster.",
                field(|c| &c.issuer)
            ),
        ),
        FailureKind::WrongName => (
            Cause::SanMissing,
            format!("{certificate} does not contain the name {:?}.", endpoint.server_name),
            "Set server_name to a name that it contains, or add the name to the certificate."
                .into(),
        ),
        FailureKind::PlainHttp => (
            Cause::Tls,
            format!("{address} speaks plain HTTP, not TLS."),
            "Name a port on which the apiserver, or the load balancer in front of it, speaks \
             TLS; kubeadm uses 6443."
                .into(),
        ),
        FailureKind::NotTls => (
            Cause::Tls,
            format!("{address} does not speak TLS: it is another service."),
            "Check the address and the port; kubeadm uses 6443.".into(),
        ),
        FailureKind::Certificate => {
            (Cause::Tls, format!("{certificate} is not accepted."), "Reissue it.".into())
        }
        _ => (
            Cause::Tls,
            format!("TLS with {address} fails."),
            "Check that it is an apiserver and that no proxy in between terminates TLS.".into(),
        ),
    }
}

/// Reports each client certificate once, even if it was presented to several endpoints.
pub(super) fn client(observations: &Observations, found: &mut Vec<Finding>) {
    let mut reported = Vec::new();
    for shown in observations.endpoints.iter().filter_map(|endpoint| endpoint.shown.as_ref()) {
        if reported.contains(&shown) {
            continue;
        }
        reported.push(shown);
        let certificate = format!("The client certificate of {}", shown.subject);
        if shown.is_version_1 {
            found.push(note(
                Cause::ClientCertificateVersion1,
                format!("{certificate} is X.509 version 1."),
                "an apiserver accepts it; jackstay cannot verify it with `mode: terminate` and answers 401",
                "Reissue it as version 3 (`openssl x509 -req … -extfile FILE`), or use `mode: passthrough`.",
            ));
        }
        if shown.expires_in_s >= SOON_S {
            continue;
        }
        let because = format!("valid until {}", shown.not_after);
        let advice = "Renew it (`kubeadm certs renew admin.conf`); kubelet renews its own if the \
                      clock is right.";
        found.push(if shown.expires_in_s < 0 {
            problem(Cause::ClientCertificateExpired, certificate + " has expired.", because, advice)
        } else {
            let span = format_span(shown.expires_in_s);
            note(Cause::ExpiresSoon, format!("{certificate} expires in {span}."), because, advice)
        });
    }
}

/// A time span in hours or days.
fn format_span(seconds: i64) -> String {
    match seconds / 3600 {
        ..1 => "less than an hour".to_owned(),
        hours @ 1..48 => quantity(hours, "hour"),
        hours => quantity(hours / 24, "day"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn format_span_uses_the_unit_that_fits() {
        let shown = [(59, "less than an hour"), (3600, "1 hour"), (90_000, "25 hours")];
        for (seconds, words) in shown.into_iter().chain([(2 * 86_400, "2 days")]) {
            assert_eq!(format_span(seconds), words);
        }
    }
}
