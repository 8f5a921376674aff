//! The wire format of a Kubernetes watch: frames, events and resource versions.
//!
//! [`frame`] splits the bytes of a response body into frames. [`parse`] reads the few fields of a frame that
//! resuming needs: type, `resourceVersion`, the annotation that ends the initial events, and the code of an
//! error. [`version`] compares resource versions. [`head`] reads the version of other responses.
//!
//! The codec has no I/O and no clock. It depends on no other module of jackstay except the byte budget for
//! buffered frames.

use self::event::Event;
use http::{StatusCode, header, response};

pub(crate) mod cbor;
pub mod error_event;
pub mod event;
pub mod frame;
pub mod head;
mod item_end;
mod json;
pub(crate) mod protobuf;
pub mod version;

/// How the events of a watch response are encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Encoding {
    /// One JSON object and a newline for each event.
    Json,
    /// A big-endian length of four bytes and a `WatchEvent` message for each event.
    Protobuf,
    /// One CBOR data item for each event (KEP-4222).
    Cbor,
}

impl Encoding {
    /// Every encoding.
    pub const ALL: [Self; 3] = [Self::Json, Self::Protobuf, Self::Cbor];

    /// The encoding of a response, whose content coding is decoded before; `None` if the codec cannot read it.
    pub fn of_response(head: &response::Parts) -> Option<Self> {
        if head.status != StatusCode::OK {
            return None;
        }
        Self::from_content_type(head.headers.get(header::CONTENT_TYPE)?.to_str().ok()?)
    }

    /// The encoding of a watch response with this Content-Type.
    ///
    /// kube-apiserver sends `application/json`, `application/vnd.kubernetes.protobuf;stream=watch` or
    /// `application/cbor-seq` (apiserver, `endpoints/handlers/watch.go`); other servers send
    /// `application/json;stream=watch`.
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
        let is_protobuf = essence.eq_ignore_ascii_case("application/vnd.kubernetes.protobuf");
        if essence.eq_ignore_ascii_case("application/json") {
            return Some(Self::Json);
        }
        if essence.eq_ignore_ascii_case("application/cbor-seq") {
            return Some(Self::Cbor);
        }
        (is_protobuf && stream.is_some()).then_some(Self::Protobuf)
    }

    /// The media types in an `Accept` header that request this encoding by name.
    pub fn accepted_types(self) -> &'static [&'static str] {
        match self {
            Self::Json => &["application/json"],
            Self::Protobuf => &["application/vnd.kubernetes.protobuf"],
            // kube-apiserver answers the first one with the second one.
            Self::Cbor => &["application/cbor", "application/cbor-seq"],
        }
    }
}

/// Parses one whole frame; `None` if the frame is unreadable.
pub fn parse(encoding: Encoding, frame: &[u8]) -> Option<Event<'_>> {
    match encoding {
        Encoding::Json => json::event(frame),
        Encoding::Protobuf => protobuf::event(frame),
        Encoding::Cbor => cbor::event(frame),
    }
}

#[cfg(test)]
mod tests {
    use super::Encoding::{self, Cbor, Json, Protobuf};

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
            ("application/cbor-seq", Some(Cbor)),
            ("application/cbor", None),
            ("application/cbor;stream=watch", None),
            ("text/plain", None),
            ("", None),
        ] {
            assert_eq!(Encoding::from_content_type(content_type), encoding, "{content_type}");
        }
    }
}
