//! Why the text of a key is not a valid value.

use std::borrow::Cow;
use std::error::Error;
use std::fmt;

use jackstay_core::discovery::address::quote;
use jackstay_core::request::path_prefix::PathPrefixError;

/// Why a text is not a valid value of its key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ValueError {
    /// It is not of the expected form.
    Not {
        /// The text.
        text: String,
        /// The expected form: a noun, with examples.
        expected: Cow<'static, str>,
    },
    /// It is empty and must name a file.
    NoFile,
    /// It has a NUL byte, so it cannot be a path.
    NulInPath(String),
    /// The list has it already.
    Duplicate(String),
    /// A server name for which connections are routed is an IP address.
    RouteOfIp(String),
    /// A server name of connections that are passed through is an IP address.
    PassedThroughIp(String),
    /// A path prefix is no path that clients send.
    PathPrefix(String, PathPrefixError),
    /// The name in the certificates of apiservers is neither a DNS name nor an IP address.
    InvalidServerName(String),
}

impl ValueError {
    /// `text` is not of the form `expected`.
    pub(super) fn not(text: &str, expected: impl Into<Cow<'static, str>>) -> Self {
        Self::Not { text: text.to_owned(), expected: expected.into() }
    }
}

impl fmt::Display for ValueError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Not { text, expected } => write!(f, "{} is not {expected}", quote(text)),
            Self::NoFile => f.write_str("is required: the path of a file"),
            Self::NulInPath(text) => write!(f, "{} cannot be a path", quote(text)),
            Self::Duplicate(text) => write!(f, "{} appears twice", quote(text)),
            Self::RouteOfIp(text) => write!(
                f,
                "{} is an IP address: no client sends one as server name (RFC 6066); \
                 connections without one use the listener's upstream",
                quote(text)
            ),
            Self::PassedThroughIp(text) => write!(
                f,
                "{} is an IP address: no client sends one as server name (RFC 6066); write a DNS name in the \
                 apiservers' certificates",
                quote(text)
            ),
            Self::PathPrefix(text, error) => write!(f, "{} {error}", quote(text)),
            Self::InvalidServerName(text) => {
                write!(f, "{} is neither a DNS name nor an IP address", quote(text))
            }
        }
    }
}

impl Error for ValueError {}
