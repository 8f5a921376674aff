//! Plans a new local CA and serving certificate in place of those that will expire.

use std::path::Path;
use std::time::SystemTime;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use kube::config::Cluster;
use rustls::pki_types::CertificateDer;

use super::error::SetupError;
use super::node_name;
use super::plan::OutputFile;
use super::serving::ServingFiles;
use crate::net::tls::certificate::cert_info;
use crate::net::tls::local_ca;
use crate::net::tls::pem_files::valid_certificates;

/// A planned renewal.
pub struct RenewalPlan {
    /// The certificate of the new CA and, while it is valid, that of the old one, PEM. A client that trusts both
    /// is served before and after the serving certificate is replaced.
    ca_pem: Vec<u8>,
    /// The old CAs, by which kubeconfigs that need the new one are known.
    old: Vec<CertificateDer<'static>>,
    /// The file of the CA.
    pub ca: OutputFile,
    /// The file of the serving certificate, to be written after the kubeconfigs.
    pub serving: OutputFile,
}

/// Whether a renewal is due.
pub enum Renewal {
    /// The certificate is to be renewed after this time.
    NotDue(SystemTime),
    /// The new files.
    Planned(RenewalPlan),
}

/// Plans the renewal of the serving certificate in `serving` and of its CA if it is due, or if `force` is set.
///
/// # Errors
/// A file cannot be used, or a certificate cannot be issued.
pub fn plan(serving: &Path, now: SystemTime, force: bool) -> Result<Renewal, SetupError> {
    let files = ServingFiles::of_serving(serving);
    let existing = files.read()?;
    if existing.is_current(now) && !force {
        return Ok(Renewal::NotDue(local_ca::renewal_time(&existing.info)));
    }
    let old_ca = cert_info(&existing.ca[0]).map_err(SetupError::LocalCaCertificate)?;
    let name = old_ca.subject.common_name().unwrap_or("jackstay");
    // An earlier version accepted names that kubectl refuses in a CA.
    let names: Vec<String> =
        existing.names.iter().filter_map(|name| node_name::parse(name).ok()).collect();
    let created = local_ca::create_serving_cert(name, &names, now).map_err(SetupError::Issue)?;
    let mut ca_pem = created.ca.clone().into_bytes();
    if now < old_ca.not_after {
        ca_pem.extend_from_slice(first_certificate(&existing.ca_pem));
    }
    let [ca, serving] = files.outputs(&created, &ca_pem);
    Ok(Renewal::Planned(RenewalPlan { ca_pem, old: existing.ca, ca, serving }))
}

impl RenewalPlan {
    /// Replaces the old CA in a cluster of a kubeconfig by the new one. Returns whether the cluster trusted it.
    pub fn update(&self, cluster: &mut Cluster) -> bool {
        let data = cluster.certificate_authority_data.as_deref().unwrap_or_default();
        let trusted = STANDARD.decode(data).map(|pem| valid_certificates(&pem)).unwrap_or_default();
        let is_old = trusted.iter().any(|certificate| self.old.contains(certificate));
        if is_old {
            cluster.certificate_authority_data = Some(STANDARD.encode(&self.ca_pem));
        }
        is_old
    }
}

/// The PEM of the first certificate.
fn first_certificate(pem: &[u8]) -> &[u8] {
    const END: &[u8] = b"-----END CERTIFICATE-----";
    let end = pem.windows(END.len()).position(|window| window == END);
    end.map_or(pem, |at| &pem[..at + END.len()])
}

#[cfg(test)]
mod tests {
    use super::*;
    use jackstay_sys::utc::wall_clock;
    use std::time::Duration;

    #[test]
    fn plan_is_due_after_two_thirds_of_the_lifetime_and_keeps_the_old_ca() {
        let dir = tempfile::tempdir().unwrap();
        let serving = dir.path().join("serving.pem");
        let now = wall_clock();
        let days = |days: u64| now + Duration::from_secs(days * 24 * 3600);
        let names = ["127.0.0.1".to_owned(), "node-1".to_owned()];
        let created = local_ca::create_serving_cert("jackstay on node-1", &names, now).unwrap();
        let files = ServingFiles::of_serving(&serving);
        assert!(plan(&serving, now, false).is_err(), "there is no certificate");
        for file in files.outputs(&created, created.ca.as_bytes()) {
            std::fs::write(&file.path, &file.bytes).unwrap();
        }
        let Ok(Renewal::NotDue(time)) = plan(&serving, days(240), false) else { panic!("due") };
        assert!(time > days(242) && time < days(244), "{time:?}");
        let Ok(Renewal::Planned(renewed)) = plan(&serving, days(250), false) else {
            panic!("not due")
        };
        let ca = valid_certificates(&renewed.ca.bytes);
        assert_eq!((ca.len(), &ca[1]), (2, &valid_certificates(created.ca.as_bytes())[0]));
        assert!(renewed.serving.bytes != created.pair.as_bytes());
        let cluster = |pem: &str| Cluster {
            certificate_authority_data: Some(STANDARD.encode(pem)),
            ..Cluster::default()
        };
        let mut trusting = cluster(&created.ca);
        assert!(renewed.update(&mut trusting));
        let data = trusting.certificate_authority_data.clone().unwrap();
        assert_eq!(STANDARD.decode(data).unwrap(), renewed.ca.bytes);
        let mut other = cluster("");
        assert!(!renewed.update(&mut other) && !renewed.update(&mut Cluster::default()));
        // The next renewal keeps the CA before it, but not the one before that.
        for file in [&renewed.ca, &renewed.serving] {
            std::fs::write(&file.path, &file.bytes).unwrap();
        }
        let Ok(Renewal::Planned(again)) = plan(&serving, days(251), true) else { panic!("forced") };
        assert_eq!(valid_certificates(&again.ca.bytes)[1], ca[0]);
        assert!(again.update(&mut trusting), "a kubeconfig with both CAs is updated");
        // An expired CA is not kept.
        let Ok(Renewal::Planned(late)) = plan(&serving, days(700), false) else {
            panic!("not due")
        };
        assert_eq!(valid_certificates(&late.ca.bytes).len(), 1);
        let names = files.read().unwrap().names;
        assert_eq!(names, ["127.0.0.1", "node-1"]);
    }
}
