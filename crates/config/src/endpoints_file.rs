//! The file of endpoints that `endpoints_file` names: one address per line, `#` starts a comment.
//!
//! A DNS name is rejected: names belong in `endpoints`, where they are resolved.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use jackstay_core::discovery::address::{AddressError, EndpointAddress};
use jackstay_core::discovery::source::{Candidate, DiscoveredEndpoints};
use jackstay_sys::files;

/// Largest file that is read, in bytes.
const MAX_FILE: u64 = 1 << 20;

/// Reads the text of the file.
///
/// # Errors
/// The file cannot be read or is larger than 1 MiB.
pub fn read(path: &Path) -> Result<String, EndpointsFileError> {
    let text = files::read_text(path, MAX_FILE);
    text.map_err(|error| EndpointsFileError { path: path.to_owned(), error })
}

/// Why the file of endpoints cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {error}")]
pub struct EndpointsFileError {
    /// Its path.
    pub path: PathBuf,
    /// What the file system returns, or that the file is too large or not text.
    #[source]
    pub error: io::Error,
}

/// Parses the text of the file. The reason for a rejected line names its number.
pub fn parse(text: &str) -> DiscoveredEndpoints {
    let mut found = DiscoveredEndpoints::default();
    for (number, line) in text.trim_start_matches('\u{feff}').lines().enumerate() {
        let line = line.split('#').next().unwrap_or_default().trim();
        if line.is_empty() {
            continue;
        }
        match parse_line(line) {
            Ok(address) => found.candidates.push(Candidate { address, server_name: None }),
            Err(why) => found.reject(format!("line {}: {why}", number + 1), 1),
        }
    }
    found
}

/// Why a line of the file is not an endpoint.
enum LineError {
    /// It is not the address of an apiserver.
    Address(AddressError),
    /// Its host is a DNS name.
    Name(String),
}

impl fmt::Display for LineError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(error) => error.fmt(f),
            Self::Name(host) => {
                write!(f, "{host:?} is a name: write it in endpoints, not in this file")
            }
        }
    }
}

fn parse_line(line: &str) -> Result<EndpointAddress, LineError> {
    let address = EndpointAddress::parse(line).map_err(LineError::Address)?;
    if address.is_name() {
        return Err(LineError::Name(address.host));
    }
    Ok(address)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_addresses_and_comments_rejects_names_and_bad_lines() {
        let found = parse(
            "\u{feff}# apiservers\n\n10.0.0.1:6443\r\n  [fd00::3]:6443 # the third\nlocalhost:1\n\
             10.0.0.1\napi.example.com:6443\n0.0.0.0:1\n10.0.0.9:0\n\u{0}\n",
        );
        let addresses: Vec<_> = found.candidates.iter().map(|c| c.address.to_string()).collect();
        assert_eq!(addresses, ["10.0.0.1:6443", "[fd00::3]:6443", "localhost:1"]);
        let rejected = &found.rejected;
        assert_eq!(found.rejected_count, 5, "{rejected:?}");
        assert!(rejected[0].starts_with("line 6: \"10.0.0.1\" has no port"), "{rejected:?}");
        assert!(rejected[1].contains("is a name"), "{rejected:?}");
        assert_eq!(parse(""), DiscoveredEndpoints::default());
    }

    #[test]
    fn read_missing_large_or_binary_file_fails() {
        let dir = tempfile::tempdir().unwrap();
        assert!(read(&dir.path().join("none")).unwrap_err().to_string().contains("none"));
        assert!(read(dir.path()).is_err());
        let path = dir.path().join("big");
        std::fs::write(&path, vec![b'#'; MAX_FILE as usize + 1]).unwrap();
        assert_eq!(read(&path).unwrap_err().error.kind(), io::ErrorKind::FileTooLarge);
        std::fs::write(&path, b"\xff").unwrap();
        assert!(read(&path).is_err());
    }
}
