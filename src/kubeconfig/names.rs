//! Which name is verified in the certificates of the apiservers, chosen after a look at what they
//! name.
//!
//! Two places need one: `tls.server_name` of the upstream, where empty means each endpoint's own
//! host, and `tls-server-name` of a kubeconfig whose connections are passed through, where one name
//! has to do for every apiserver. kubeadm gives each apiserver a certificate with its own address,
//! and `kubernetes` in all of them (`cmd/kubeadm/app/util/pkiutil`, `GetAPIServerAltNames`).

use std::net::IpAddr;

/// Names that kubeadm and most installers put into every apiserver's certificate.
const COMMON: [&str; 2] = ["kubernetes", "kubernetes.default.svc"];

/// What an apiserver's certificate names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateNames {
    /// Host and port, as an endpoint of a configuration.
    pub address: String,
    /// Its host.
    pub host: String,
    /// The names and addresses in the certificate.
    pub names: Vec<String>,
}

/// What is known of the apiservers.
#[derive(Debug, Clone, Copy)]
pub struct NameInputs<'a> {
    /// The host in the kubeconfig.
    pub host: &'a str,
    /// The name that was given explicitly: verified now, or asked for by the user.
    pub given: Option<&'a str>,
    /// How many endpoints there are.
    pub endpoints: usize,
    /// The certificates that were seen; none without a connection.
    pub certificates: &'a [CertificateNames],
}

/// The names to verify.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct VerifiedNames {
    /// `tls.server_name`; `None`: each endpoint's own host.
    pub upstream: Option<String>,
    /// `tls-server-name` where clients verify the apiservers themselves.
    pub client: String,
    /// What the user should know.
    pub notes: Vec<String>,
    /// What the user should know where clients verify the apiservers themselves.
    pub client_notes: Vec<String>,
}

impl CertificateNames {
    /// Whether the certificate is for a name (RFC 6125: a wildcard stands for one label) or address.
    fn holds(&self, wanted: &str) -> bool {
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

/// Chooses.
pub fn choose(known: &NameInputs<'_>) -> VerifiedNames {
    let mut names = VerifiedNames::default();
    if known.certificates.is_empty() {
        unseen(known, &mut names);
    } else {
        seen(known, &mut names);
    }
    names
}

/// When no certificate was seen: an address belongs to one apiserver alone; a name that clients
/// verify already is held by every apiserver behind it.
fn unseen(known: &NameInputs<'_>, names: &mut VerifiedNames) {
    let several = known.endpoints > 1;
    let is_address = known.host.parse::<IpAddr>().is_ok();
    let own_name = (several && !is_address).then_some(known.host);
    names.upstream = known.given.or(own_name).map(ToOwned::to_owned);
    let client = match known.given {
        Some(given) => given,
        None if several && is_address => {
            names.client_notes.push(format!(
                "tls-server-name is {0:?}, which kubeadm and most installers put into every \
                 apiserver's certificate; they were not looked at, --tls-server-name names another",
                COMMON[0]
            ));
            COMMON[0]
        }
        None => known.host,
    };
    client.clone_into(&mut names.client);
}

fn seen(known: &NameInputs<'_>, names: &mut VerifiedNames) {
    let shared = |name: &str| known.certificates.iter().all(|shown| shown.holds(name));
    let is_address = known.host.parse::<IpAddr>().is_ok();
    let own_name = Some(known.host).filter(|_| !is_address);
    let given = known.given.filter(|given| {
        let lacks = known.certificates.iter().find(|shown| !shown.holds(given));
        if let Some(shown) = lacks {
            names.notes.push(format!(
                "the certificate of {} is not for {given:?}; it is for {}",
                shown.address,
                shown.names.join(", ")
            ));
        }
        lacks.is_none()
    });
    // An address of one of them is shared where there is one, or where each names all.
    let all =
        known.certificates[0].names.iter().map(String::as_str).filter(|name| !name.contains('*'));
    let candidates = || {
        let first = [given, own_name].into_iter().flatten().chain(COMMON);
        first.chain([known.host]).chain(all.clone()).find(|name| shared(name))
    };
    let each_has_its_own = known.certificates.iter().all(|shown| shown.holds(&shown.host));
    names.upstream = match given {
        Some(given) => Some(given),
        None if each_has_its_own => None,
        None => candidates(),
    }
    .map(ToOwned::to_owned);
    if names.upstream.is_none() && !each_has_its_own {
        for shown in known.certificates.iter().filter(|shown| !shown.holds(&shown.host)) {
            names.notes.push(format!(
                "the certificate of {} is not for its own address, it is for {}: jackstay will not \
                 use it; name it by what its certificate is for, or add the address (certSANs of \
                 kubeadm)",
                shown.address,
                shown.names.join(", ")
            ));
        }
    }
    if let Some(name) = candidates() {
        name.clone_into(&mut names.client);
        return;
    }
    known.given.unwrap_or(known.host).clone_into(&mut names.client);
    let certificates: Vec<String> = known
        .certificates
        .iter()
        .map(|shown| format!("{} names {}", shown.address, shown.names.join(", ")))
        .collect();
    names.client_notes.push(format!(
        "no name is in every apiserver's certificate ({}): clients whose connections are passed \
         through reach only those with {:?}; add one name to all (certSANs of kubeadm), or use \
         --mode terminate",
        certificates.join("; "),
        names.client
    ));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(host: &str, names: &[&str]) -> CertificateNames {
        let names = names.iter().map(ToString::to_string).collect();
        CertificateNames { address: format!("{host}:6443"), host: host.to_owned(), names }
    }

    /// As kubeadm makes them.
    fn kubeadm(host: &str) -> CertificateNames {
        shown(host, &["n1", "kubernetes", "kubernetes.default.svc", "10.96.0.1", host])
    }

    fn chosen(
        host: &str,
        given: Option<&str>,
        endpoints: usize,
        certificates: &[CertificateNames],
    ) -> (Option<String>, String, usize) {
        let names = choose(&NameInputs { host, given, endpoints, certificates });
        (names.upstream, names.client, names.notes.len() + names.client_notes.len())
    }

    fn is(upstream: Option<&str>, client: &str, notes: usize) -> (Option<String>, String, usize) {
        (upstream.map(ToOwned::to_owned), client.to_owned(), notes)
    }

    #[test]
    fn choose_leaves_the_upstream_to_each_host_and_shares_kubernetes_among_clients() {
        let three: Vec<CertificateNames> =
            ["10.0.0.1", "10.0.0.2", "10.0.0.3"].map(kubeadm).to_vec();
        assert_eq!(chosen("10.0.0.1", None, 3, &three), is(None, "kubernetes", 0));
        assert_eq!(chosen("10.0.0.1", None, 1, &three[..1]), is(None, "kubernetes", 0));
        // One that was not reached changes nothing.
        assert_eq!(chosen("10.0.0.1", None, 3, &three[..2]), is(None, "kubernetes", 0));
        // What kubectl verified was the address of the first alone.
        let given = Some("10.0.0.1");
        assert_eq!(chosen("10.0.0.1", given, 3, &three), is(None, "kubernetes", 1));
        let given = Some("kubernetes.default.svc");
        let name = "kubernetes.default.svc";
        assert_eq!(chosen("10.0.0.1", given, 3, &three), is(Some(name), name, 0));
    }

    #[test]
    fn choose_takes_a_name_that_all_certificates_hold() {
        let lb = |host| shown(host, &["*.example.com", "10.0.0.1"]);
        let behind = [lb("lb.example.com"), lb("10.0.0.1"), lb("10.0.0.2")];
        let name = "lb.example.com";
        assert_eq!(chosen(name, None, 3, &behind), is(Some(name), name, 0));
        assert_eq!(chosen(name, None, 1, &behind[..1]), is(None, name, 0));
        let private = [shown("10.0.0.1", &["api", "10.0.0.1"]), shown("10.0.0.2", &["API"])];
        assert_eq!(chosen("10.0.0.1", None, 2, &private), is(Some("api"), "api", 0));
        let both = [shown("10.0.0.1", &["10.0.0.1", "10.0.0.2"]), shown("10.0.0.2", &["10.0.0.2"])];
        assert_eq!(chosen("10.0.0.1", None, 2, &both), is(None, "10.0.0.2", 0));
    }

    #[test]
    fn choose_says_where_no_name_is_shared() {
        let apart = [shown("10.0.0.1", &["10.0.0.1"]), shown("10.0.0.2", &["10.0.0.2"])];
        assert_eq!(chosen("10.0.0.1", None, 2, &apart), is(None, "10.0.0.1", 1));
        let known =
            NameInputs { host: "10.0.0.1", given: None, endpoints: 2, certificates: &apart };
        let names = choose(&known);
        assert!(names.client_notes[0].contains("10.0.0.2:6443 names 10.0.0.2"), "{names:?}");
        let stray = [shown("10.0.0.1", &["10.0.0.1"]), shown("10.0.0.2", &["10.9.9.9"])];
        let names = choose(&NameInputs { certificates: &stray, ..known });
        assert!(names.notes[0].starts_with("the certificate of 10.0.0.2:6443 is not for its own"));
    }

    #[test]
    fn choose_without_certificates_never_shares_an_address() {
        assert_eq!(chosen("10.0.0.1", None, 1, &[]), is(None, "10.0.0.1", 0));
        assert_eq!(chosen("10.0.0.1", None, 3, &[]), is(None, "kubernetes", 1));
        assert_eq!(chosen("fd00::1", None, 2, &[]), is(None, "kubernetes", 1));
        assert_eq!(chosen("lb.example", None, 1, &[]), is(None, "lb.example", 0));
        assert_eq!(chosen("lb.example", None, 3, &[]), is(Some("lb.example"), "lb.example", 0));
        assert_eq!(chosen("10.0.0.1", Some("api"), 3, &[]), is(Some("api"), "api", 0));
    }

    #[test]
    fn a_wildcard_holds_one_label() {
        let wild = shown("x", &["*.example.com"]);
        assert!(wild.holds("a.Example.com") && !wild.holds("a.b.example.com"));
        assert!(!wild.holds("example.com") && !wild.holds("*"));
        assert!(shown("x", &["fd00:0::1"]).holds("fd00::1"));
    }
}
