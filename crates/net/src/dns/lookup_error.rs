//! Why a lookup failed.

use std::error::Error;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hickory_resolver::net::NetError;
use hickory_resolver::proto::ProtoError;

/// Limit of a query for one name and family, with all attempts and name servers.
pub const QUERY_LIMIT: Duration = Duration::from_secs(5);

/// Why a lookup, or the query of one family, failed.
#[derive(Debug, Clone)]
pub enum LookupError {
    /// The configuration of the resolver, in this file, cannot be used.
    ResolverFile(PathBuf, Arc<dyn Error + Send + Sync>),
    /// The text is not a name that can be looked up.
    InvalidName(ProtoError),
    /// There is no such name.
    NoSuchName,
    /// The name has no address.
    NoAddress,
    /// No name server has answered within the limit of a query.
    TimedOut,
    /// The query failed.
    Query(NetError),
}

impl fmt::Display for LookupError {
    /// The resolver's own text for name servers that do not answer is `no connections available`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ResolverFile(file, error) => write!(f, "{}: {error}", file.display()),
            Self::InvalidName(error) => error.fmt(f),
            Self::NoSuchName => f.write_str("there is no such name"),
            Self::NoAddress => f.write_str("it has no address"),
            Self::TimedOut => {
                write!(f, "no name server answers within {} s", QUERY_LIMIT.as_secs())
            }
            Self::Query(NetError::NoConnections) => f.write_str("no name server answers"),
            Self::Query(NetError::Timeout) => f.write_str("no name server answers in time"),
            Self::Query(NetError::Io(error)) => write!(f, "no name server answers: {error}"),
            Self::Query(other) => other.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lookup_error_of_an_unreachable_name_server_names_the_name_server() {
        let refused = std::io::Error::from(std::io::ErrorKind::ConnectionRefused);
        for (error, expected) in [
            (NetError::NoConnections, "no name server answers"),
            (NetError::Timeout, "no name server answers in time"),
            (refused.into(), "no name server answers: connection refused"),
        ] {
            assert_eq!(LookupError::Query(error).to_string(), expected);
        }
    }
}
