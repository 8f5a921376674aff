//! The wire format of a Kubernetes watch: frames, events and resource versions.
//!
//! [`frame`] splits the bytes of a response body into whole frames without copying them. [`parse`]
//! reads from a frame the few fields that resuming needs: type, `resourceVersion`, the annotation that
//! ends the initial events, and the code of an error. [`version`] compares resource versions.
//!
//! The codec has no I/O and no clock, and it uses nothing else of the proxy.

use self::event::{Event, Unreadable};
use http::HeaderValue;

pub mod event;
pub mod frame;
mod json;
mod partial_frame;
mod protobuf;
pub mod version;

/// How the events of a watch response are encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Encoding {
    /// One JSON object and a newline for each event.
    Json,
    /// A big-endian length of four bytes and a `WatchEvent` message for each event.
    Protobuf,
}

impl Encoding {
    /// Returns the encoding of a watch response with this Content-Type, or `None` if the codec cannot
    /// read it (`application/cbor-seq`, for example).
    ///
    /// kube-apiserver sends `application/json` or
    /// `application/vnd.kubernetes.protobuf;stream=watch` (apiserver, `endpoints/handlers/watch.go`);
    /// other servers send `application/json;stream=watch`.
    pub fn from_content_type(content_type: &str) -> Option<Self> {
        let mut parts = content_type.split(';').map(str::trim);
        let essence = parts.next()?;
        let stream = parts
            .filter_map(|parameter| parameter.split_once('='))
            .find(|(name, _)| name.trim_end().eq_ignore_ascii_case("stream"))
            .map(|(_, value)| value.trim().trim_matches('"'));
        if stream.is_some_and(|value| !value.eq_ignore_ascii_case("watch")) {
            return None;
        }
        if essence.eq_ignore_ascii_case("application/json") {
            Some(Self::Json)
        } else if essence.eq_ignore_ascii_case("application/vnd.kubernetes.protobuf")
            && stream.is_some()
        {
            Some(Self::Protobuf)
        } else {
            None
        }
    }

    /// [`Self::from_content_type`] for a header value. A value that is not text has no encoding.
    pub fn from_header(content_type: Option<&HeaderValue>) -> Option<Self> {
        Self::from_content_type(content_type?.to_str().ok()?)
    }
}

/// Parses one whole frame.
///
/// # Errors
/// The frame is not an event in this encoding.
pub fn parse(encoding: Encoding, frame: &[u8]) -> Result<Event<'_>, Unreadable> {
    let event = match encoding {
        Encoding::Json => json::event(frame),
        Encoding::Protobuf => protobuf::event(frame),
    };
    event.ok_or(Unreadable)
}

#[cfg(test)]
mod tests {
    use super::Encoding::{self, Json, Protobuf};

    #[test]
    fn encoding_follows_the_content_type() {
        for (content_type, encoding) in [
            ("application/json", Some(Json)),
            ("Application/JSON; charset=utf-8", Some(Json)),
            ("application/json;stream=watch", Some(Json)),
            ("application/vnd.kubernetes.protobuf;stream=watch", Some(Protobuf)),
            ("application/vnd.kubernetes.protobuf; stream=\"watch\"", Some(Protobuf)),
            ("application/vnd.kubernetes.protobuf", None),
            ("application/json;stream=other", None),
            ("application/cbor-seq", None),
            ("application/cbor;stream=watch", None),
            ("text/plain", None),
            ("", None),
        ] {
            assert_eq!(Encoding::from_content_type(content_type), encoding, "{content_type}");
        }
    }
}
