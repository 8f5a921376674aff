//! Versions of Kubernetes: what an apiserver reports at `/version`, and what a client says in its User-Agent.

use std::fmt;

use serde_json::Value;

/// Longest response of `/version` that is read, in bytes. kube-apiserver's has about 400.
pub const MAX_RESPONSE: usize = 16 * 1024;
/// Longest `gitVersion` that is accepted, in bytes. Builds of vendors have suffixes such as `-gke.1447000`.
const MAX_GIT_VERSION: usize = 64;
/// The clients whose version is that of Kubernetes, whatever else their User-Agent says.
const COMPONENTS: [&str; 7] = [
    "kubelet",
    "kubectl",
    "kube-proxy",
    "kube-controller-manager",
    "kube-scheduler",
    "kubeadm",
    "cloud-controller-manager",
];

/// The major and minor version, such as 1.36. They order as the releases do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MinorVersion {
    major: u16,
    minor: u16,
}

impl MinorVersion {
    /// The version `major.minor`; `None` if `major` is 0, which no release of Kubernetes has.
    pub const fn new(major: u16, minor: u16) -> Option<Self> {
        if major == 0 { None } else { Some(Self { major, minor }) }
    }

    /// The number of minor versions between two versions; `None` if their major versions differ.
    pub fn distance(self, other: Self) -> Option<u16> {
        (self.major == other.major).then(|| self.minor.abs_diff(other.minor))
    }

    /// The minor version alone.
    pub fn minor(self) -> u16 {
        self.minor
    }

    /// A number that orders as the versions do, for an atomic variable. 0 means `None`.
    pub fn to_number(version: Option<Self>) -> u32 {
        version.map_or(0, |version| u32::from(version.major) << 16 | u32::from(version.minor))
    }

    /// The version with this number.
    pub fn from_number(number: u32) -> Option<Self> {
        Self::new((number >> 16) as u16, number as u16)
    }

    /// Parses the beginning of `v1.36.2`, `1.36` or `v1.36.0-alpha.1`.
    fn parse_prefix(text: &str) -> Option<Self> {
        let text = text.strip_prefix('v').unwrap_or(text);
        let (major, rest) = text.split_once('.')?;
        let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        Self::new(number(major)?, number(&rest[..end])?)
    }
}

impl fmt::Display for MinorVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Why a response of `/version` names no version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum VersionError {
    /// It is longer than the limit.
    #[error("/version is longer than {MAX_RESPONSE} bytes")]
    TooLong,
    /// It is not JSON.
    #[error("/version is not JSON")]
    NotJson,
    /// It has no `gitVersion`.
    #[error("/version has no gitVersion")]
    NoGitVersion,
    /// Its `gitVersion` is empty, too long, or has characters that are not visible ASCII.
    #[error("gitVersion of /version is not a text of 1 to {MAX_GIT_VERSION} visible characters")]
    GitVersion,
    /// Neither `major` and `minor` nor the beginning of `gitVersion` are numbers.
    #[error("major and minor of /version are not numbers")]
    Numbers,
    /// Its status is not 200 but this one.
    #[error("/version answers {0}")]
    Status(u16),
}

/// The version that an apiserver reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerVersion {
    /// Major and minor version.
    pub minor: MinorVersion,
    /// The complete version, such as `v1.36.2`.
    pub git_version: Box<str>,
}

impl ServerVersion {
    /// Parses the response of `/version`, an `apimachinery/pkg/version.Info`.
    ///
    /// `major` and `minor` are texts. Vendors append a `+` to `minor` (`20+`). Both may be empty in a build
    /// without version information, and are then taken from `gitVersion`.
    ///
    /// # Errors
    /// The response names no version.
    pub fn parse(body: &[u8]) -> Result<Self, VersionError> {
        if body.len() > MAX_RESPONSE {
            return Err(VersionError::TooLong);
        }
        let info: Value = serde_json::from_slice(body).map_err(|_| VersionError::NotJson)?;
        let git_version = info["gitVersion"].as_str().ok_or(VersionError::NoGitVersion)?;
        let is_printable = git_version.bytes().all(|byte| byte.is_ascii_graphic());
        if git_version.is_empty() || git_version.len() > MAX_GIT_VERSION || !is_printable {
            return Err(VersionError::GitVersion);
        }
        let part = |key: &str| number(info[key].as_str()?.trim_end_matches('+'));
        let minor = part("major")
            .zip(part("minor"))
            .and_then(|(major, minor)| MinorVersion::new(major, minor))
            .or_else(|| MinorVersion::parse_prefix(git_version))
            .ok_or(VersionError::Numbers)?;
        Ok(Self { minor, git_version: git_version.into() })
    }
}

/// The version of Kubernetes that a client says it has; `None` for a client of another version scheme.
///
/// client-go's default is `kubelet/v1.37.0 (linux/amd64) kubernetes/0c5b1c1`: program, version, system and the
/// commit of Kubernetes (`client-go/rest`, `DefaultKubernetesUserAgent`). A program that only uses client-go
/// has the version `v0.0.0`, and programs with a User-Agent of their own do not name the commit.
pub fn of_user_agent(user_agent: &[u8]) -> Option<MinorVersion> {
    let text = std::str::from_utf8(user_agent).ok()?;
    let (product, comment) = text.split_once(' ').unwrap_or((text, ""));
    let (name, version) = product.split_once('/')?;
    let names_commit = comment.contains(" kubernetes/") && version.starts_with("v1.");
    let is_kubernetes = names_commit || COMPONENTS.contains(&name);
    is_kubernetes.then(|| MinorVersion::parse_prefix(version)).flatten()
}

/// A number of ASCII digits only.
fn number(text: &str) -> Option<u16> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn server_version_is_parsed_from_version_info() {
        for (body, expected) in [
            (r#"{"major":"1","minor":"36","gitVersion":"v1.36.2"}"#, Ok(("1.36", "v1.36.2"))),
            (
                r#"{"major":"1","minor":"20+","gitVersion":"v1.20.2-gke"}"#,
                Ok(("1.20", "v1.20.2-gke")),
            ),
            (r#"{"major":"","minor":"","gitVersion":"v1.20.2"}"#, Ok(("1.20", "v1.20.2"))),
            (r#"{"gitVersion":"v1.36.0-alpha.1+abc"}"#, Ok(("1.36", "v1.36.0-alpha.1+abc"))),
            (r#"{"major":"1","minor":"36"}"#, Err("no gitVersion")),
            (r#"{"major":"x","minor":"36","gitVersion":"latest"}"#, Err("not numbers")),
            (r#"{"major":"0","minor":"0","gitVersion":"v0.0.0-master"}"#, Err("not numbers")),
            (r#"{"major":"1","minor":"-36","gitVersion":"v"}"#, Err("not numbers")),
            (r#"{"major":"1","minor":"+3","gitVersion":"v"}"#, Err("not numbers")),
            (r#"{"major":"1","minor":"1152921504606846976","gitVersion":"x"}"#, Err("not numbers")),
            (r#"{"major":1,"minor":36,"gitVersion":7}"#, Err("no gitVersion")),
            (r#"{"gitVersion":"v1.36.0\u001b[2J"}"#, Err("visible characters")),
            (r#"{"gitVersion":""}"#, Err("visible characters")),
            ("[]", Err("no gitVersion")),
            ("<html>", Err("not JSON")),
            ("", Err("not JSON")),
            ("\u{ff}", Err("not JSON")),
        ] {
            let parsed = ServerVersion::parse(body.as_bytes());
            match (parsed, expected) {
                (Ok(version), Ok((minor, git_version))) => {
                    assert_eq!(
                        (&*version.minor.to_string(), &*version.git_version),
                        (minor, git_version)
                    );
                }
                (Err(error), Err(expected)) => {
                    assert!(error.to_string().contains(expected), "{body}: {error}");
                }
                (parsed, _) => panic!("{body}: {parsed:?}"),
            }
        }
        let long = format!(r#"{{"gitVersion":"v1.36.0","x":"{}"}}"#, "x".repeat(MAX_RESPONSE));
        assert_eq!(ServerVersion::parse(long.as_bytes()), Err(VersionError::TooLong));
        let long = format!(r#"{{"gitVersion":"v1.36.{}"}}"#, "0".repeat(MAX_GIT_VERSION));
        assert_eq!(ServerVersion::parse(long.as_bytes()), Err(VersionError::GitVersion));
    }

    #[test]
    fn user_agent_names_a_version_only_of_kubernetes() {
        for (agent, expected) in [
            ("kubelet/v1.37.0 (linux/amd64) kubernetes/0c5b1c1", Some("1.37")),
            ("kubectl/v1.36.2 (linux/arm64) kubernetes/abcdef0", Some("1.36")),
            (
                "kube-controller-manager/v1.36.0 (linux/amd64) kubernetes/abc/leader-election",
                Some("1.36"),
            ),
            ("kubelet/v1.37.0", Some("1.37")),
            ("kubelet/v1.20.2+debian", Some("1.20")),
            ("kubelet/1.36", Some("1.36")),
            ("k3s/v1.33.1+k3s1 (linux/amd64) kubernetes/1234567", Some("1.33")),
            ("argocd/v2.9.0 (linux/amd64) kubernetes/$Format", None),
            ("manager/v0.0.0 (linux/amd64) kubernetes/$Format", None),
            ("kubelet/v0.0.0 (linux/amd64) kubernetes/$Format", None),
            ("cilium-agent/v1.99.0 linux/amd64", None),
            ("Go-http-client/2.0", None),
            ("curl/8.5.0", None),
            ("kubelet", None),
            ("kubelet/", None),
            ("kubelet/latest", None),
            ("kubelet/v1", None),
            ("kubelet/v1.x", None),
            ("kubelet/v1.99999999999999999999", None),
            ("kubelet/v-1.+3", None),
            ("", None),
        ] {
            let version = of_user_agent(agent.as_bytes()).map(|version| version.to_string());
            assert_eq!(version.as_deref(), expected, "{agent}");
        }
        assert_eq!(of_user_agent(b"kubelet/v1.36.0 \xff"), None);
    }

    #[test]
    fn versions_order_and_convert_to_numbers() {
        let version = |major, minor| MinorVersion::new(major, minor).unwrap();
        assert!(version(1, 9) < version(1, 36) && version(1, 36) < version(2, 0));
        assert_eq!(version(1, 36).distance(version(1, 20)), Some(16));
        assert_eq!(version(1, 36).distance(version(2, 36)), None);
        for wanted in
            [None, Some(version(1, 0)), Some(version(1, 36)), Some(version(u16::MAX, u16::MAX))]
        {
            assert_eq!(MinorVersion::from_number(MinorVersion::to_number(wanted)), wanted);
        }
        assert_eq!(MinorVersion::from_number(36), None, "major version 0");
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_parsed_without_a_panic(body: Vec<u8>, text: String) {
            let _ = (ServerVersion::parse(&body), of_user_agent(&body), of_user_agent(text.as_bytes()));
            let _ = of_user_agent(format!("kubelet/{text}").as_bytes());
            let version = serde_json::json!({ "major": text, "minor": text, "gitVersion": text });
            let _ = ServerVersion::parse(version.to_string().as_bytes());
        }
    }
}
