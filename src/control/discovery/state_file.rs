//! The state file: the endpoints of an upstream from every source except the static one. After a restart
//! jackstay finds the cluster even if no configured address or name works any more.
//!
//! Saved endpoints are candidates like any other: a probe decides whether they are used. The file is
//! written only while one of its endpoints is usable. A file that is corrupt, of another upstream or
//! empty is reported and ignored.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use jackstay_core::discovery::address::EndpointAddress;
use jackstay_core::discovery::source::{Candidate, EndpointSource, SavedEndpoints};
use jackstay_sys::files;
use jackstay_sys::utc::Utc;
use serde_json::{Value, json};

/// Version of the format. A file with another version is ignored.
const VERSION: u64 = 1;
/// Maximum size of a file in bytes. An endpoint takes about 100 bytes.
const MAX_FILE: u64 = 256 << 10;
/// Maximum number of endpoints that are written or read.
const MAX_ENDPOINTS: usize = 256;

/// The content of a state file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SavedState {
    /// The endpoints of each source.
    pub endpoints: SavedEndpoints,
    /// Time since the endpoints were last confirmed; zero if the clock went back.
    pub age: Duration,
}

/// Why a state file is not used.
#[derive(Debug, thiserror::Error)]
pub enum StateFileError {
    /// It cannot be read.
    #[error("{0}")]
    Io(#[source] io::Error),
    /// It is too large, or not text.
    #[error("not a state file: {0}; the file is ignored")]
    NotText(#[source] io::Error),
    /// Its content is ignored.
    #[error("{0}; the file is ignored")]
    Content(#[source] StateContentError),
}

/// Why the content of a state file is ignored.
#[derive(Debug, thiserror::Error)]
pub enum StateContentError {
    /// It is not JSON.
    #[error("not a state file: {0}")]
    NotJson(#[source] serde_json::Error),
    /// It has no version.
    #[error("not a state file: no version")]
    NoVersion,
    /// Its format has another version.
    #[error("format version {0} is not supported")]
    OtherVersion(u64),
    /// It is the file of another upstream; the JSON value of its name.
    #[error("the endpoints of another upstream, {0}")]
    OtherUpstream(Value),
    /// It has no usable endpoint.
    #[error("no usable endpoint in it")]
    Empty,
}

/// The path of the state file of `upstream`. The name of an upstream is a valid file name.
pub fn path(dir: &Path, upstream: &str) -> PathBuf {
    dir.join(format!("{upstream}.json"))
}

/// Reads the state file of `upstream`; `None` if it does not exist, as at the first start.
///
/// # Errors
/// The file cannot be read, or is ignored.
pub fn read(
    dir: &Path,
    upstream: &str,
    now: SystemTime,
) -> Result<Option<SavedState>, StateFileError> {
    match files::read_text(&path(dir, upstream), MAX_FILE) {
        Ok(text) => parse(&text, upstream, now).map(Some).map_err(StateFileError::Content),
        Err(error) => match error.kind() {
            io::ErrorKind::NotFound => Ok(None),
            io::ErrorKind::FileTooLarge | io::ErrorKind::InvalidData => {
                Err(StateFileError::NotText(error))
            }
            _ => Err(StateFileError::Io(error)),
        },
    }
}

/// Parses the content of the state file of `upstream`.
///
/// # Errors
/// Why the file is ignored.
pub fn parse(text: &str, upstream: &str, now: SystemTime) -> Result<SavedState, StateContentError> {
    let mut value: Value = serde_json::from_str(text).map_err(StateContentError::NotJson)?;
    match value["version"].as_u64() {
        Some(VERSION) => {}
        Some(other) => return Err(StateContentError::OtherVersion(other)),
        None => return Err(StateContentError::NoVersion),
    }
    if value["upstream"] != upstream {
        return Err(StateContentError::OtherUpstream(value["upstream"].take()));
    }
    let saved_at = value["saved_at_seconds"].as_u64().unwrap_or(0);
    let now = now.duration_since(UNIX_EPOCH).unwrap_or_default();
    let age = now.saturating_sub(Duration::from_secs(saved_at));
    let list = value["endpoints"].as_array().map_or(&[][..], Vec::as_slice);
    let endpoints: SavedEndpoints =
        list.iter().take(MAX_ENDPOINTS).filter_map(parse_endpoint).collect();
    if endpoints.is_empty() {
        return Err(StateContentError::Empty);
    }
    Ok(SavedState { endpoints, age })
}

/// Parses one endpoint; `None` if [`write()`] cannot have written it.
fn parse_endpoint(value: &Value) -> Option<(EndpointSource, Candidate)> {
    let source = EndpointSource::from_name(value["source"].as_str()?)?;
    let address = EndpointAddress::parse(value["address"].as_str()?).ok()?;
    let server_name = value["server_name"].as_str().map(str::to_owned);
    let is_saved =
        matches!(source, EndpointSource::File | EndpointSource::Dns | EndpointSource::Slices);
    let name_is_valid = server_name
        .as_deref()
        .is_none_or(|name| rustls::pki_types::ServerName::try_from(name).is_ok());
    (is_saved && name_is_valid && !address.is_name())
        .then_some((source, Candidate { address, server_name }))
}

/// Writes the state file atomically: a new file is synced and renamed over the old one.
///
/// # Errors
/// The file cannot be written. The old one stays, unless only the final sync of the directory failed.
pub fn write(
    dir: &Path,
    upstream: &str,
    endpoints: &SavedEndpoints,
    saved_at: SystemTime,
) -> io::Result<()> {
    let endpoints: Vec<Value> = endpoints
        .iter()
        .take(MAX_ENDPOINTS)
        .map(|(source, candidate)| {
            json!({
                "address": candidate.address.to_string(),
                "server_name": candidate.server_name,
                "source": source.as_str(),
            })
        })
        .collect();
    let text = json!({
        "version": VERSION,
        "upstream": upstream,
        "saved_at": Utc(saved_at).seconds(),
        "saved_at_seconds": saved_at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs(),
        "endpoints": endpoints,
    });
    fs::create_dir_all(dir)?;
    files::replace(&path(dir, upstream), format!("{text:#}\n").as_bytes(), files::PUBLIC)
}

#[cfg(test)]
mod tests {
    use super::*;
    use jackstay_sys::utc::wall_clock;

    fn endpoints() -> SavedEndpoints {
        let candidate = |host: &str, name: Option<&str>| Candidate {
            address: EndpointAddress { host: host.into(), port: 6443 },
            server_name: name.map(str::to_owned),
        };
        vec![
            (EndpointSource::Slices, candidate("10.0.0.1", Some("kubernetes.default.svc"))),
            (EndpointSource::File, candidate("fd00::3", None)),
        ]
    }

    #[test]
    fn read_written_file_returns_endpoints_and_age() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("deep/er");
        let then = wall_clock();
        assert_eq!(read(&dir, "u", then).unwrap(), None);
        write(&dir, "u", &endpoints(), then).unwrap();
        write(&dir, "u", &endpoints(), then).unwrap();
        let saved = read(&dir, "u", then + Duration::from_secs(90)).unwrap().unwrap();
        assert_eq!(saved.endpoints, endpoints());
        assert!((89..=91).contains(&saved.age.as_secs()), "{:?}", saved.age);
        let back = read(&dir, "u", then - Duration::from_secs(90)).unwrap().unwrap();
        assert_eq!(back.age, Duration::ZERO, "a clock that went back");
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 1, "no temporary file is left");
    }

    #[test]
    fn read_foreign_or_corrupt_file_says_why_it_is_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let now = wall_clock();
        write(dir.path(), "other", &endpoints(), now).unwrap();
        let other = fs::read_to_string(path(dir.path(), "other")).unwrap();
        let big = format!("{}{}", " ".repeat(MAX_FILE as usize), other);
        for (text, expected) in [
            (other.as_bytes(), "the endpoints of another upstream, \"other\"; the file is ignored"),
            (b"", "not a state file: EOF"),
            (b"\xff\xfe", "not a state file: not a text file"),
            (b"[]", "not a state file: no version"),
            (&other.as_bytes()[..40], "not a state file: "),
            (big.as_bytes(), "not a state file: larger than"),
            (br#"{"version":2}"#, "format version 2 is not supported; the file is ignored"),
            (br#"{"version":1,"upstream":"u"}"#, "no usable endpoint in it"),
            (
                br#"{"version":1,"upstream":"u","endpoints":[{"address":"evil:6443","source":"dns"},
                    {"address":"10.0.0.1:6443","source":"static"}, 3, {"address":"10.0.0.1:0"},
                    {"address":"10.0.0.1:1","source":"dns","server_name":"no name"}]}"#,
                "no usable endpoint in it",
            ),
        ] {
            fs::write(path(dir.path(), "u"), text).unwrap();
            let error = read(dir.path(), "u", now).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
    }

    #[test]
    fn read_and_write_fail_if_the_directory_is_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(write(&file, "u", &endpoints(), wall_clock()).is_err());
        assert!(read(&file, "u", wall_clock()).is_err());
    }
}
