//! Why the text of a key is not a valid value.

use std::borrow::Cow;

use jackstay_core::discovery::address::quote;
use jackstay_core::request::path_prefix::PathPrefixError;

/// Why a text is not a valid value of its key.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ValueError {
    /// It is not of the expected form.
    #[error("{} is not {expected}", quote(.text))]
    Not {
        /// The text.
        text: String,
        /// The expected form: a noun, with examples.
        expected: Cow<'static, str>,
    },
    /// It is empty and must name a file.
    #[error("is required: the path of a file")]
    NoFile,
    /// It has a NUL byte, so it cannot be a path.
    #[error("{} cannot be a path", quote(.0))]
    NulInPath(String),
    /// The list has it already.
    #[error("{} appears twice", quote(.0))]
    Duplicate(String),
    /// A server name for which connections are routed is an IP address.
    #[error(
        "{} is an IP address: no client sends one as server name (RFC 6066); connections without one use the \
         listener's upstream",
        quote(.0)
    )]
    RouteOfIp(String),
    /// A server name of connections that are passed through is an IP address.
    #[error(
        "{} is an IP address: no client sends one as server name (RFC 6066); write a DNS name in the \
         apiservers' certificates",
        quote(.0)
    )]
    PassedThroughIp(String),
    /// A path prefix is no path that clients send.
    #[error("{} {error}", quote(.0), error = .1)]
    PathPrefix(String, PathPrefixError),
    /// The name in the certificates of apiservers is neither a DNS name nor an IP address.
    #[error("{} is neither a DNS name nor an IP address", quote(.0))]
    InvalidServerName(String),
}

impl ValueError {
    /// `text` is not of the form `expected`.
    pub(super) fn not(text: &str, expected: impl Into<Cow<'static, str>>) -> Self {
        Self::Not { text: text.to_owned(), expected: expected.into() }
    }
}
