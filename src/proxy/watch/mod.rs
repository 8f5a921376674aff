//! Watches that outlive their apiserver: the pure half, without I/O and without a clock.
//!
//! The path of a watch, in the order in which it happens:
//!
//! 1. [`request`] says whether a request is a watch we can keep alive, and what to ask upstream.
//! 2. [`frame`] cuts the answer into whole frames, without copying them; what it must hold back of
//!    those that are not whole has a bound ([`held`]).
//! 3. [`event`] reads of each frame what matters: its type and its resourceVersion ([`version`]).
//! 4. [`state`] decides what becomes of the frame, and of the watch when its stream is lost, in the
//!    words of [`verdict`]; [`resume`] judges the answers to the attempts at going on elsewhere,
//!    [`allowance`] bounds them, and [`bookmarks`] sees that those come which used to.
//! 5. [`relay`] ties 2 to 4 together for the body that streams to the client.
//!
//! What a client sees is one stream: whole frames, each event once, in the order of their
//! resourceVersions, or an end that makes it start over where starting over is the only honest way.

use http::HeaderValue;

pub mod allowance;
pub mod attempt;
pub mod bookmarks;
pub mod event;
pub mod frame;
pub mod held;
pub mod limits;
pub mod outage;
pub mod relay;
pub mod request;
pub mod resume;
pub mod state;
pub mod verdict;
pub mod version;

#[cfg(test)]
mod tests;

/// How the events of a watch are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Encoding {
    /// One object and a newline for each event.
    Json,
    /// A big-endian length of four bytes, then a `WatchEvent` message.
    Protobuf,
}

impl Encoding {
    /// The encoding of a watch response with this Content-Type.
    ///
    /// kube-apiserver says `application/json` (other servers add `;stream=watch`) and
    /// `application/vnd.kubernetes.protobuf;stream=watch` (apiserver,
    /// `endpoints/handlers/watch.go`). Anything else, such as `application/cbor-seq`, is a stream
    /// that we cannot read.
    pub fn from_content_type(content_type: &str) -> Option<Self> {
        let mut parts = content_type.split(';').map(str::trim);
        let essence = parts.next()?;
        let stream = parts
            .filter_map(|p| p.split_once('='))
            .find(|(name, _)| name.trim_end().eq_ignore_ascii_case("stream"))
            .map(|(_, value)| value.trim().trim_matches('"'));
        if stream.is_some_and(|s| !s.eq_ignore_ascii_case("watch")) {
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

    /// [`Self::from_content_type`] for a header; a value that is not text is no encoding of ours.
    pub fn from_header(content_type: Option<&HeaderValue>) -> Option<Self> {
        Self::from_content_type(content_type?.to_str().ok()?)
    }
}
