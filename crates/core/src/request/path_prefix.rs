//! The path below which a server has the API of a cluster, such as `/k8s/clusters/c-1` of Rancher.
//!
//! Clients send it before each path, from the `server` of their kubeconfig: `rest.NewRequest` and `Request.AbsPath` in
//! client-go join it with `path.Join`, which resolves `.`, `..` and repeated slashes, and `URL.String` encodes the
//! result (`shouldEscape` with `encodePath` in Go's net/url). A prefix is therefore compared decoded, and jackstay's
//! own requests encode it as Go does.

use std::borrow::Cow;
use std::fmt::{self, Write as _};

use super::query::unescape_path;

/// A path below which the API is. Empty for a server that has it at the root.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PathPrefix {
    /// Empty, or with a leading and without a trailing slash.
    decoded: Box<str>,
    encoded: Box<str>,
}

/// Why a text is no path prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PathPrefixError {
    /// It does not begin with a slash.
    #[error("must begin with a slash, such as /k8s/clusters/c-1")]
    NoSlash,
    /// It has a query or a fragment.
    #[error("must be a path without a query or a fragment")]
    Query,
    /// An escape such as `%2` is incomplete, or what it encodes is no UTF-8.
    #[error("has an invalid percent-encoding")]
    Escape,
    /// It has a character that no path contains.
    #[error("has a space or a control character")]
    Character,
    /// It has a segment `.` or `..`.
    #[error("has a segment . or .., which clients resolve: write the path that it leads to")]
    DotSegment,
}

impl PathPrefix {
    /// Parses a prefix. Slashes at the end and repeated ones are removed, as clients do.
    ///
    /// # Errors
    /// It is not a path that clients send.
    pub fn parse(text: &str) -> Result<Self, PathPrefixError> {
        let decoded = decode(text)?;
        if segments(&decoded).any(|segment| matches!(segment, "." | "..")) {
            return Err(PathPrefixError::DotSegment);
        }
        Ok(Self::of_segments(segments(&decoded)))
    }

    /// The prefix that clients send if the URL of their server has this path.
    ///
    /// # Errors
    /// It is not a path that clients send.
    pub fn of_url_path(path: &str) -> Result<Self, PathPrefixError> {
        let decoded = decode(path)?;
        let mut kept = Vec::new();
        for segment in segments(&decoded) {
            match segment {
                "." => {}
                ".." => drop(kept.pop()),
                segment => kept.push(segment),
            }
        }
        Ok(Self::of_segments(kept.into_iter()))
    }

    fn of_segments<'a>(segments: impl Iterator<Item = &'a str>) -> Self {
        let decoded = segments.fold(String::new(), |path, segment| path + "/" + segment);
        let encoded = encode(&decoded);
        Self { decoded: decoded.into(), encoded: encoded.into() }
    }

    /// Whether the server has the API at the root.
    pub fn is_empty(&self) -> bool {
        self.decoded.is_empty()
    }

    /// The prefix as clients send it.
    pub fn encoded(&self) -> &str {
        &self.encoded
    }

    /// The decoded prefix.
    pub fn decoded(&self) -> &str {
        &self.decoded
    }

    /// The part of a decoded path that is below the prefix; `None` for a path outside.
    pub fn strip<'a>(&self, path: &'a str) -> Option<&'a str> {
        path.strip_prefix(&*self.decoded)
            .filter(|rest| self.is_empty() || rest.is_empty() || rest.starts_with('/'))
    }

    /// [`Self::strip`] for a path as a client has sent it.
    pub fn strip_sent<'a>(&self, path: &'a str) -> Option<Cow<'a, str>> {
        match unescape_path(path)? {
            Cow::Borrowed(path) => self.strip(path).map(Cow::Borrowed),
            Cow::Owned(path) => self.strip(&path).map(|rest| Cow::Owned(rest.to_owned())),
        }
    }
}

impl fmt::Display for PathPrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.encoded)
    }
}

fn segments(path: &str) -> impl Iterator<Item = &str> {
    path.split('/').filter(|segment| !segment.is_empty())
}

fn decode(text: &str) -> Result<String, PathPrefixError> {
    if text.contains(['?', '#']) {
        return Err(PathPrefixError::Query);
    }
    if !text.is_empty() && !text.starts_with('/') {
        return Err(PathPrefixError::NoSlash);
    }
    let is_wrong = |c: char| c.is_ascii_control() || c == ' ';
    if text.contains(is_wrong) {
        return Err(PathPrefixError::Character);
    }
    let decoded = unescape_path(text).ok_or(PathPrefixError::Escape)?.into_owned();
    if decoded.contains(char::REPLACEMENT_CHARACTER) {
        return Err(PathPrefixError::Escape);
    }
    Ok(decoded)
}

/// Encodes a path as Go's `URL.EscapedPath` does without a `RawPath`.
fn encode(path: &str) -> String {
    let mut encoded = String::with_capacity(path.len());
    for byte in path.bytes() {
        let is_kept = byte.is_ascii_alphanumeric() || b"-_.~$&+,/:;=@".contains(&byte);
        if is_kept {
            encoded.push(char::from(byte));
        } else {
            // Writing to a String does not fail.
            let _ = write!(encoded, "%{byte:02X}");
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_normalises_slashes_and_encoding() {
        for (text, encoded, decoded) in [
            ("", "", ""),
            ("/", "", ""),
            ("//", "", ""),
            ("/k8s/clusters/c-1", "/k8s/clusters/c-1", "/k8s/clusters/c-1"),
            ("/k8s//clusters/c-1//", "/k8s/clusters/c-1", "/k8s/clusters/c-1"),
            ("/clusters/root:org:ws", "/clusters/root:org:ws", "/clusters/root:org:ws"),
            ("/clusters/root%3Aorg%3aws", "/clusters/root:org:ws", "/clusters/root:org:ws"),
            ("/a%2Fb", "/a/b", "/a/b"),
            ("/a%20b%3Fc", "/a%20b%3Fc", "/a b?c"),
            (
                "/v1/teleport/Y2x1c3Rlcg/Y2x1c3Rlcg",
                "/v1/teleport/Y2x1c3Rlcg/Y2x1c3Rlcg",
                "/v1/teleport/Y2x1c3Rlcg/Y2x1c3Rlcg",
            ),
            ("/a(b)", "/a%28b%29", "/a(b)"),
            ("/v1/a$&+,;=@~!*'", "/v1/a$&+,;=@~%21%2A%27", "/v1/a$&+,;=@~!*'"),
            ("/ä", "/%C3%A4", "/ä"),
        ] {
            let prefix = PathPrefix::parse(text).unwrap();
            assert_eq!((prefix.encoded(), prefix.decoded()), (encoded, decoded), "{text}");
            assert_eq!(PathPrefix::parse(prefix.encoded()), Ok(prefix), "{text}");
        }
    }

    #[test]
    fn parse_refuses_what_clients_do_not_send() {
        use PathPrefixError::{Character, DotSegment, Escape, NoSlash, Query};
        for (text, error) in [
            ("k8s/clusters", NoSlash),
            ("/k8s?a=b", Query),
            ("/k8s#a", Query),
            ("/k8s/%2", Escape),
            ("/k8s/%zz", Escape),
            ("/%ff", Escape),
            ("/a b", Character),
            ("/a\nb", Character),
            ("/k8s/../c", DotSegment),
            ("/k8s/%2E%2e/c", DotSegment),
            ("/./k8s", DotSegment),
        ] {
            assert_eq!(PathPrefix::parse(text), Err(error), "{text}");
        }
    }

    #[test]
    fn of_url_path_resolves_dots_as_clients_do() {
        for (path, expected) in [
            ("/k8s/../clusters/./c-1/", "/clusters/c-1"),
            ("/../..", ""),
            ("", ""),
            ("/k8s/%2e%2e/c", "/c"),
        ] {
            assert_eq!(PathPrefix::of_url_path(path).unwrap().encoded(), expected, "{path}");
        }
    }

    #[test]
    fn strip_ends_at_a_segment() {
        let prefix = PathPrefix::parse("/k8s/clusters/c-1").unwrap();
        for (path, below) in [
            ("/k8s/clusters/c-1/api/v1/pods", Some("/api/v1/pods")),
            ("/k8s/clusters/c-1", Some("")),
            ("/k8s/clusters/c-10/api/v1/pods", None),
            ("/api/v1/pods", None),
            ("/k8s/clusters", None),
        ] {
            assert_eq!(prefix.strip(path), below, "{path}");
        }
        assert_eq!(PathPrefix::default().strip("/api"), Some("/api"));
        assert_eq!(PathPrefix::default().strip("*"), Some("*"));
        let sent = prefix.strip_sent("/k8s/clusters%2Fc-1/api/v1/pods");
        assert_eq!(sent.as_deref(), Some("/api/v1/pods"));
        assert_eq!(prefix.strip_sent("/api/v1/pods"), None);
    }
}
