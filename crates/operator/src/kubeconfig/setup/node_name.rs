//! The name of this machine in the serving certificate of a listener and in the constraints of its CA.
//!
//! kubelet accepts DNS subdomains in lower case as node names (`k8s.io/apimachinery`, `IsDNS1123Subdomain`). Go refuses
//! a CA with a DNS constraint that has an empty label, a final dot, or characters outside printable ASCII
//! (`crypto/x509`, `domainToReverseLabels`), and with it kubectl refuses every server of this CA. So names are those of
//! DNS, with underscores, which Go accepts in the names of servers (`crypto/x509`, `validHostname`).

use std::net::IpAddr;

/// Maximum length of a DNS name, and of a label (RFC 1035 section 2.3.4).
const MAX_NAME: usize = 253;
const MAX_LABEL: usize = 63;

/// Why a text cannot be the name of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NodeNameError {
    /// It is empty.
    #[error("it is empty")]
    Empty,
    /// The name or a label is too long.
    #[error("a DNS name has at most 253 characters, and 63 between two dots")]
    TooLong,
    /// A label is empty.
    #[error("two dots follow one another, or the name begins with a dot")]
    EmptyLabel,
    /// It is a pattern.
    #[error("it is a pattern; write the name of this machine")]
    Wildcard,
    /// It has characters outside ASCII.
    #[error("a DNS name has only ASCII characters; write it in Punycode (xn--…)")]
    NotAscii,
    /// It has a character that a DNS name does not have.
    #[error("a DNS name has no {0:?}")]
    Character(char),
    /// A label begins or ends with a hyphen.
    #[error("a part of a DNS name neither begins nor ends with a hyphen")]
    Hyphen,
    /// Its last label is a number, as in an IP address.
    #[error("it is neither an IP address nor a DNS name, whose last part is not a number")]
    Number,
}

/// The name in the form in which certificates have it: an IP address, or a DNS name in lower case without a final dot.
///
/// # Errors
/// Go cannot use the name in a certificate.
pub fn parse(name: &str) -> Result<String, NodeNameError> {
    if let Ok(address) = name.parse::<IpAddr>() {
        return Ok(address.to_string());
    }
    if !name.is_ascii() {
        return Err(NodeNameError::NotAscii);
    }
    let name = name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase();
    if name.is_empty() {
        return Err(NodeNameError::Empty);
    }
    if name.contains('*') {
        return Err(NodeNameError::Wildcard);
    }
    let is_known = |c: &char| c.is_ascii_alphanumeric() || "-_.".contains(*c);
    if let Some(other) = name.chars().find(|c| !is_known(c)) {
        return Err(NodeNameError::Character(other));
    }
    if name.len() > MAX_NAME || name.split('.').any(|label| label.len() > MAX_LABEL) {
        return Err(NodeNameError::TooLong);
    }
    if name.split('.').any(str::is_empty) {
        return Err(NodeNameError::EmptyLabel);
    }
    if name.split('.').any(|label| label.starts_with('-') || label.ends_with('-')) {
        return Err(NodeNameError::Hyphen);
    }
    let last = name.rsplit('.').next().unwrap_or_default();
    if last.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(NodeNameError::Number);
    }
    Ok(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_accepts_names_of_go_and_normalises_them() {
        let long = format!("{}.{}", "a".repeat(63), "b".repeat(63));
        for (name, expected) in [
            ("node-1", "node-1"),
            ("Node-1.Example.COM.", "node-1.example.com"),
            ("node_1", "node_1"),
            ("1node", "1node"),
            ("10-0-0-1", "10-0-0-1"),
            ("10.0.0.1", "10.0.0.1"),
            ("FD00::1", "fd00::1"),
            ("xn--nud-1-fta", "xn--nud-1-fta"),
            (&long, &long),
        ] {
            assert_eq!(parse(name).as_deref(), Ok(expected), "{name}");
        }
    }

    #[test]
    fn parse_refuses_names_with_a_reason() {
        use NodeNameError::*;
        let (label, name) = ("a".repeat(64), ["a"; 128].join("."));
        for (name, expected) in [
            ("", Empty),
            (".", Empty),
            ("my host", Character(' ')),
            ("bob's-laptop", Character('\'')),
            ("a/b", Character('/')),
            ("a\nb", Character('\n')),
            ("[::1]", Character('[')),
            ("fe80::1%eth0", Character(':')),
            ("nœud-1", NotAscii),
            ("node..1", EmptyLabel),
            (".node", EmptyLabel),
            ("node..", EmptyLabel),
            ("*.example.com", Wildcard),
            ("-node", Hyphen),
            ("node-.a", Hyphen),
            ("10.0.1", Number),
            ("42", Number),
            (&label, TooLong),
            (&name, TooLong),
        ] {
            assert_eq!(parse(name), Err(expected), "{name}");
        }
    }
}
