//! Selects the names that are verified in the apiservers' certificates.
//!
//! Two settings name one: `tls.server_name` of the upstream, whose default is the host of each endpoint,
//! and `tls-server-name` of a kubeconfig in mode `passthrough`, which applies to all apiservers:
//!
//! | certificates | `tls.server_name` | `tls-server-name` |
//! |---|---|---|
//! | none was read | the given name, or else the host in the kubeconfig if it is a name and there are several endpoints | the given name, or else `kubernetes` if the host is an address and there are several endpoints, or else the host |
//! | some were read | the given name if it is shared, or else none if each contains its own host, or else a shared name | a shared name, or else the given name or the host, with a note |
//!
//! A shared name is in every certificate that was read. The given name is preferred, then the host if it
//! is a name, then [`COMMON_NAMES`], the host, and any name in the first certificate that is
//! [verified](CertificateNames::is_verified). Without certificates the table assumes that an address is in
//! one certificate only, and that the given name, or a host that is a name, is in all. kubeadm puts the
//! address of the one apiserver, and `kubernetes`, into its certificate (`cmd/kubeadm/app/util/pkiutil`,
//! `GetAPIServerAltNames`).
//!
//! Every certificate here has a chain to the cluster's CA. That does not make it one of an apiserver: the CA
//! may also sign the serving certificates of kubelets, and each node could present its own to a user who
//! connects to an apiserver. Clients that verify its name would then send their requests to that node. So a
//! name that only a certificate contains is taken from a server that is verified by the name that the user
//! gave for it. [`COMMON_NAMES`] are safe, because only apiservers have them.

use std::net::IpAddr;

use jackstay_config::server_name_matches;
use jackstay_core::discovery::address::parse_ip;

/// Names that kubeadm and most installers put into every apiserver's certificate.
const COMMON_NAMES: [&str; 2] = ["kubernetes", "kubernetes.default.svc"];

/// The names in an apiserver's certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateNames {
    /// Host and port of the apiserver, as an endpoint of the configuration is written.
    pub address: String,
    /// Host of the apiserver.
    pub host: String,
    /// The names and addresses in the certificate, whose chain was verified.
    pub names: Vec<String>,
    /// Whether the server has completed a handshake in which the certificate was valid for the name that
    /// clients of this address verify.
    pub is_verified: bool,
}

/// The input of a selection.
#[derive(Debug, Clone, Copy)]
pub struct NameInputs<'a> {
    /// The host in the kubeconfig.
    pub host: &'a str,
    /// The name on the command line, or else `tls-server-name` of the kubeconfig.
    pub given: Option<&'a str>,
    /// Number of endpoints.
    pub endpoints: usize,
    /// The certificates that were read; empty if no apiserver was connected.
    pub certificates: &'a [CertificateNames],
}

/// The names to verify.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct VerifiedNames {
    /// `tls.server_name`; `None` means the host of each endpoint.
    pub upstream: Option<String>,
    /// `tls-server-name` for clients that verify the apiservers themselves.
    pub client: String,
    /// Messages to the user.
    pub notes: Vec<String>,
    /// Messages to the user if clients verify the apiservers themselves.
    pub client_notes: Vec<String>,
}

impl VerifiedNames {
    /// The name for clients if it is a DNS name that all certificates have, as far as that is known.
    pub fn shared_name(&self) -> Option<&str> {
        let is_address = self.client.parse::<IpAddr>().is_ok();
        Some(&*self.client).filter(|_| !is_address && self.client_notes.is_empty())
    }
}

impl CertificateNames {
    /// The names, for people.
    fn listed(&self) -> String {
        if self.names.is_empty() {
            return "no name, since it has no subject alternative name".to_owned();
        }
        self.names.join(", ")
    }

    /// Whether the certificate contains a name or an address. A wildcard matches one label (RFC 6125).
    fn contains(&self, wanted: &str) -> bool {
        if let Ok(ip) = wanted.parse::<IpAddr>() {
            return self.names.iter().any(|name| name.parse() == Ok(ip));
        }
        let rest = wanted.split_once('.').map(|(_, rest)| rest);
        self.names.iter().any(|name| match (name.strip_prefix("*."), rest) {
            (Some(parent), Some(rest)) => parent.eq_ignore_ascii_case(rest),
            _ => name.eq_ignore_ascii_case(wanted),
        })
    }
}

/// Selects the names, as the table of the module says.
pub fn select(inputs: &NameInputs<'_>) -> VerifiedNames {
    if inputs.certificates.is_empty() {
        select_without_certificates(inputs)
    } else {
        select_from_certificates(inputs)
    }
}

/// Selects the name of a client whose connection is passed through only with one of the `accepted` names, which may be
/// patterns. `None` if some certificates were read and no accepted name is in all of them. The accepted names are those
/// of jackstay's configuration, so no name is taken from a certificate that a pattern does not match.
pub fn select_passed_through(
    accepted: &[String],
    certificates: &[CertificateNames],
) -> Option<VerifiedNames> {
    let is_shared = |name: &&str| certificates.iter().all(|certificate| certificate.contains(name));
    let is_accepted = |name: &&str| accepted.iter().any(|p| server_name_matches(p, name));
    let exact = accepted.iter().map(String::as_str).filter(|name| !name.contains('*'));
    let verified = certificates.iter().find(|certificate| certificate.is_verified);
    let matching = names_to_verify(verified).filter(is_accepted);
    let mut names = exact.chain(COMMON_NAMES.into_iter().filter(is_accepted)).chain(matching);
    let client = names.find(is_shared)?.to_owned();
    let mut client_notes = Vec::new();
    if certificates.is_empty() {
        client_notes.push(format!(
            "tls-server-name is {client:?}, and the certificates were not read: it must be in those of all apiservers"
        ));
    }
    Some(VerifiedNames { client, client_notes, ..VerifiedNames::default() })
}

fn select_without_certificates(inputs: &NameInputs<'_>) -> VerifiedNames {
    let mut selected = VerifiedNames::default();
    let several_endpoints = inputs.endpoints > 1;
    let is_address = parse_ip(inputs.host).is_some();
    let shared_host = (several_endpoints && !is_address).then_some(inputs.host);
    selected.upstream = inputs.given.or(shared_host).map(ToOwned::to_owned);
    let client = match inputs.given {
        Some(given) => given,
        None if several_endpoints && is_address => {
            selected.client_notes.push(format!(
                "tls-server-name is {0:?}, which kubeadm and most installers put into every \
                 apiserver's certificate; the certificates were not read, and --tls-server-name sets \
                 another name",
                COMMON_NAMES[0]
            ));
            COMMON_NAMES[0]
        }
        None => inputs.host,
    };
    client.clone_into(&mut selected.client);
    selected
}

fn select_from_certificates(inputs: &NameInputs<'_>) -> VerifiedNames {
    let mut selected = VerifiedNames::default();
    let certificates = inputs.certificates;
    let is_shared = |name: &str| certificates.iter().all(|certificate| certificate.contains(name));
    let is_address = parse_ip(inputs.host).is_some();
    let host_name = Some(inputs.host).filter(|_| !is_address);
    let given = inputs.given.filter(|given| {
        let lacking = certificates.iter().find(|certificate| !certificate.contains(given));
        if let Some(certificate) = lacking {
            selected.notes.push(format!(
                "the certificate of {} is not for {given:?}; it is for {}",
                certificate.address,
                certificate.listed()
            ));
        }
        lacking.is_none()
    });
    // The host may be shared even if it is an address: with one certificate, or if each has all addresses.
    let shared_name = || {
        let preferred =
            [given, host_name].into_iter().flatten().chain(COMMON_NAMES).chain([inputs.host]);
        let verified = certificates.iter().find(|certificate| certificate.is_verified);
        preferred.chain(names_to_verify(verified)).find(|name| is_shared(name))
    };
    let without_own_host: Vec<&CertificateNames> = certificates
        .iter()
        .filter(|certificate| !certificate.contains(&certificate.host))
        .collect();
    selected.upstream = match given {
        Some(given) => Some(given),
        None if without_own_host.is_empty() => None,
        None => shared_name(),
    }
    .map(ToOwned::to_owned);
    if selected.upstream.is_none() {
        for certificate in without_own_host {
            selected.notes.push(format!(
                "the certificate of {} is not for its own address, it is for {}: jackstay will not \
                 use this apiserver; write the endpoint with a name in its certificate, or add the \
                 address to the certificate (certSANs of kubeadm)",
                certificate.address,
                certificate.listed()
            ));
        }
    }
    if let Some(name) = shared_name() {
        name.clone_into(&mut selected.client);
        return selected;
    }
    select_without_shared_name(inputs, &mut selected);
    selected
}

/// No name is in all certificates that clients verify. The note says what to do.
fn select_without_shared_name(inputs: &NameInputs<'_>, selected: &mut VerifiedNames) {
    let certificates = inputs.certificates;
    let is_shared = |name: &str| certificates.iter().all(|certificate| certificate.contains(name));
    inputs.given.unwrap_or(inputs.host).clone_into(&mut selected.client);
    let listed: Vec<String> = certificates
        .iter()
        .map(|certificate| {
            format!("{} names {}", certificate.address, certificate.names.join(", "))
        })
        .collect();
    let unverified = names_to_verify(certificates.first()).find(|name| is_shared(name));
    selected.client_notes.push(match unverified {
        Some(name) => format!(
            "tls-server-name is {:?}, which is not in the certificates ({}); {name:?} is not used, \
             because no server has proven to be an apiserver of this cluster: if these are the \
             apiservers, choose the name with --tls-server-name",
            selected.client,
            listed.join("; "),
        ),
        None => format!(
            "no name is in every apiserver's certificate ({}): clients whose connections are passed \
             through reach only those with {:?}; add one name to all (certSANs of kubeadm), or use \
             --mode terminate",
            listed.join("; "),
            selected.client
        ),
    });
}

/// The names in a certificate that a client can verify. A wildcard is a pattern.
fn names_to_verify(certificate: Option<&CertificateNames>) -> impl Iterator<Item = &str> {
    let names = certificate.into_iter().flat_map(|certificate| &certificate.names);
    names.map(String::as_str).filter(|name| !name.contains('*'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn certificate(host: &str, names: &[&str]) -> CertificateNames {
        let names = names.iter().map(ToString::to_string).collect();
        let mut certificate = CertificateNames {
            address: format!("{host}:6443"),
            host: host.to_owned(),
            names,
            is_verified: false,
        };
        certificate.is_verified = certificate.contains(host);
        certificate
    }

    /// A certificate with the names of kubeadm.
    fn kubeadm(host: &str) -> CertificateNames {
        certificate(host, &["n1", "kubernetes", "kubernetes.default.svc", "10.96.0.1", host])
    }

    fn selected(
        host: &str,
        given: Option<&str>,
        endpoints: usize,
        certificates: &[CertificateNames],
    ) -> (Option<String>, String, usize) {
        let names = select(&NameInputs { host, given, endpoints, certificates });
        (names.upstream, names.client, names.notes.len() + names.client_notes.len())
    }

    fn expected(
        upstream: Option<&str>,
        client: &str,
        notes: usize,
    ) -> (Option<String>, String, usize) {
        (upstream.map(ToOwned::to_owned), client.to_owned(), notes)
    }

    #[test]
    fn select_kubeadm_certificates_verify_each_host_and_kubernetes_for_clients() {
        let three: Vec<CertificateNames> =
            ["10.0.0.1", "10.0.0.2", "10.0.0.3"].map(kubeadm).to_vec();
        assert_eq!(selected("10.0.0.1", None, 3, &three), expected(None, "kubernetes", 0));
        assert_eq!(selected("10.0.0.1", None, 1, &three[..1]), expected(None, "kubernetes", 0));
        // A certificate that could not be read changes nothing.
        assert_eq!(selected("10.0.0.1", None, 3, &three[..2]), expected(None, "kubernetes", 0));
        // The given name is only in the first certificate.
        let given = Some("10.0.0.1");
        assert_eq!(selected("10.0.0.1", given, 3, &three), expected(None, "kubernetes", 1));
        let given = Some("kubernetes.default.svc");
        let name = "kubernetes.default.svc";
        assert_eq!(selected("10.0.0.1", given, 3, &three), expected(Some(name), name, 0));
    }

    #[test]
    fn select_name_in_all_certificates_is_preferred() {
        let lb = |host| certificate(host, &["*.example.com", "10.0.0.1"]);
        let behind_lb = [lb("lb.example.com"), lb("10.0.0.1"), lb("10.0.0.2")];
        let name = "lb.example.com";
        assert_eq!(selected(name, None, 3, &behind_lb), expected(Some(name), name, 0));
        assert_eq!(selected(name, None, 1, &behind_lb[..1]), expected(None, name, 0));
        let private =
            [certificate("10.0.0.1", &["api", "10.0.0.1"]), certificate("10.0.0.2", &["API"])];
        assert_eq!(selected("10.0.0.1", None, 2, &private), expected(Some("api"), "api", 0));
        let overlapping = [
            certificate("10.0.0.1", &["10.0.0.1", "10.0.0.2"]),
            certificate("10.0.0.2", &["10.0.0.2"]),
        ];
        assert_eq!(selected("10.0.0.1", None, 2, &overlapping), expected(None, "10.0.0.2", 0));
    }

    #[test]
    fn select_without_a_shared_name_adds_a_note() {
        let disjoint =
            [certificate("10.0.0.1", &["10.0.0.1"]), certificate("10.0.0.2", &["10.0.0.2"])];
        assert_eq!(selected("10.0.0.1", None, 2, &disjoint), expected(None, "10.0.0.1", 1));
        let inputs =
            NameInputs { host: "10.0.0.1", given: None, endpoints: 2, certificates: &disjoint };
        let names = select(&inputs);
        assert!(names.client_notes[0].contains("10.0.0.2:6443 names 10.0.0.2"), "{names:?}");
        let wrong_address =
            [certificate("10.0.0.1", &["10.0.0.1"]), certificate("10.0.0.2", &["10.9.9.9"])];
        let names = select(&NameInputs { certificates: &wrong_address, ..inputs });
        assert!(names.notes[0].starts_with("the certificate of 10.0.0.2:6443 is not for its own"));
    }

    #[test]
    fn select_takes_no_name_from_a_server_that_is_not_verified() {
        // The serving certificate of a kubelet, which the cluster's CA may have signed too.
        let kubelet = certificate("10.0.0.1", &["node-7", "10.0.0.7"]);
        let certificates = [kubelet];
        assert_eq!(selected("10.0.0.1", None, 1, &certificates), expected(None, "10.0.0.1", 2));
        assert_eq!(selected("10.0.0.1", Some("api"), 1, &certificates), expected(None, "api", 3));
        let given = Some("node-7");
        assert_eq!(selected("10.0.0.1", given, 1, &certificates), expected(given, "node-7", 0));
        let inputs =
            NameInputs { host: "10.0.0.1", given: None, endpoints: 1, certificates: &certificates };
        let names = select(&inputs);
        assert!(names.client_notes[0].contains("\"node-7\" is not used"), "{names:?}");
        // One of several servers is not verified: its names are not taken, those of the other may be.
        let two = [certificates[0].clone(), certificate("10.0.0.7", &["node-7", "10.0.0.7"])];
        assert_eq!(selected("10.0.0.1", None, 2, &two).1, "node-7");
        let unverified =
            two.map(|certificate| CertificateNames { is_verified: false, ..certificate });
        assert_eq!(selected("10.0.0.1", None, 2, &unverified).1, "10.0.0.1");
        // Only apiservers have the well-known names.
        let apiserver = [certificate("10.0.0.1", &["api", "kubernetes"])];
        let name = Some("kubernetes");
        assert_eq!(selected("10.0.0.1", None, 1, &apiserver), expected(name, "kubernetes", 0));
    }

    #[test]
    fn select_without_certificates_never_shares_an_address() {
        assert_eq!(selected("10.0.0.1", None, 1, &[]), expected(None, "10.0.0.1", 0));
        assert_eq!(selected("10.0.0.1", None, 3, &[]), expected(None, "kubernetes", 1));
        assert_eq!(selected("fd00::1", None, 2, &[]), expected(None, "kubernetes", 1));
        assert_eq!(selected("lb.example", None, 1, &[]), expected(None, "lb.example", 0));
        assert_eq!(
            selected("lb.example", None, 3, &[]),
            expected(Some("lb.example"), "lb.example", 0)
        );
        assert_eq!(selected("10.0.0.1", Some("api"), 3, &[]), expected(Some("api"), "api", 0));
    }

    #[test]
    fn select_passed_through_takes_an_accepted_name_that_all_certificates_have() {
        let name = |accepted: &[&str], certificates: &[CertificateNames]| {
            let accepted: Vec<String> = accepted.iter().map(ToString::to_string).collect();
            select_passed_through(&accepted, certificates).map(|names| names.client)
        };
        let two = [kubeadm("10.0.0.1"), kubeadm("10.0.0.2")];
        let default = "kubernetes.default.svc";
        assert_eq!(name(&["api", default], &two).as_deref(), Some(default));
        assert_eq!(name(&["*.default.svc"], &two).as_deref(), Some(default));
        assert_eq!(name(&["api", "*.example.com"], &two), None);
        assert_eq!(name(&["api"], &[]).as_deref(), Some("api"), "no certificate was read");
        // A pattern does not take the name of a server that is not verified.
        let kubelet = certificate("10.0.0.1", &["node-7.example.com", "10.0.0.7"]);
        assert_eq!(name(&["*.example.com"], &[kubelet]), None);
        let verified = certificate("10.0.0.1", &["api.example.com", "10.0.0.1"]);
        assert_eq!(name(&["*.example.com"], &[verified]).as_deref(), Some("api.example.com"));
    }

    #[test]
    fn contains_wildcard_matches_one_label() {
        let wild = certificate("x", &["*.example.com"]);
        assert!(wild.contains("a.Example.com") && !wild.contains("a.b.example.com"));
        assert!(!wild.contains("example.com") && !wild.contains("*"));
        assert!(certificate("x", &["fd00:0::1"]).contains("fd00::1"));
    }
}
