//! The last good set of endpoints on disk, so that a restart finds the cluster although every seed
//! is gone.
//!
//! What is read is a candidate like any other: a probe decides, not the file. What is written was
//! said by a source and had an endpoint that served. A file that is corrupt, foreign or empty is
//! reported and ignored; a directory that cannot be written is a warning.

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use super::merge::{Candidate, SavedEndpoints};
use crate::config::EndpointAddress;
use crate::net::files::atomic_write::{self, PUBLIC};
use crate::net::files::bounded_read;
use crate::observe::utc::Utc;
use crate::upstream::endpoint_sources::EndpointSource;

/// Version of the format; a file of another one is foreign.
const VERSION: u64 = 1;
/// Largest file read. Ours have a hundred bytes for each endpoint.
const MAX_FILE: u64 = 256 << 10;
/// Most entries that are written or read.
const MAX_ENTRIES: usize = 256;

/// What was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Saved {
    /// The endpoints.
    pub entries: SavedEndpoints,
    /// How old that knowledge is.
    pub age: Duration,
}

/// Why a file is not used.
#[derive(Debug)]
pub enum StateError {
    /// There is none, which is how every first start is.
    Missing,
    /// The file or its directory, in the words of the system.
    Io(io::Error),
    /// It is not what we write.
    Corrupt(String),
    /// It is of another upstream, or of another version.
    Foreign(String),
    /// It holds nothing that could be used.
    Empty,
}

impl fmt::Display for StateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => f.write_str("no state was saved yet"),
            Self::Io(error) => error.fmt(f),
            Self::Corrupt(why) => write!(f, "not a state file: {why}; it is ignored"),
            Self::Foreign(why) => write!(f, "{why}; it is ignored"),
            Self::Empty => f.write_str("no usable endpoint in it; it is ignored"),
        }
    }
}

/// The file of an upstream. Its name has only letters, digits and dashes.
pub fn path(dir: &Path, upstream: &str) -> PathBuf {
    dir.join(format!("{upstream}.json"))
}

/// Reads the file of `upstream`.
///
/// # Errors
/// Why it is not used.
pub fn read(dir: &Path, upstream: &str, now: SystemTime) -> Result<Saved, StateError> {
    let text =
        bounded_read::read_text(&path(dir, upstream), MAX_FILE).map_err(|error| {
            match error.kind() {
                io::ErrorKind::NotFound => StateError::Missing,
                io::ErrorKind::FileTooLarge => StateError::Corrupt(error.to_string()),
                io::ErrorKind::InvalidData => StateError::Corrupt("not text".into()),
                _ => StateError::Io(error),
            }
        })?;
    parse(&text, upstream, now)
}

fn parse(text: &str, upstream: &str, now: SystemTime) -> Result<Saved, StateError> {
    let value: Value =
        serde_json::from_str(text).map_err(|error| StateError::Corrupt(error.to_string()))?;
    let foreign = |what: &str| StateError::Foreign(what.to_owned());
    match value["version"].as_u64() {
        Some(VERSION) => {}
        Some(other) => return Err(foreign(&format!("version {other} of the format"))),
        None => return Err(StateError::Corrupt("no version".into())),
    }
    if value["upstream"] != upstream {
        return Err(foreign(&format!("the endpoints of another upstream, {}", value["upstream"])));
    }
    let saved_at = value["saved_at_seconds"].as_u64().unwrap_or(0);
    let now = now.duration_since(UNIX_EPOCH).unwrap_or_default();
    let age = now.saturating_sub(Duration::from_secs(saved_at));
    let list = value["endpoints"].as_array().map_or(&[][..], Vec::as_slice);
    let entries: SavedEndpoints = list.iter().take(MAX_ENTRIES).filter_map(entry).collect();
    if entries.is_empty() { Err(StateError::Empty) } else { Ok(Saved { entries, age }) }
}

/// One endpoint, if it is one that we could have written.
fn entry(value: &Value) -> Option<(EndpointSource, Candidate)> {
    let source = EndpointSource::from_name(value["source"].as_str()?)?;
    let address = EndpointAddress::parse(value["address"].as_str()?).ok()?;
    let server_name = value["server_name"].as_str().map(str::to_owned);
    let remembered =
        matches!(source, EndpointSource::File | EndpointSource::Dns | EndpointSource::Slices);
    let name_is_good = server_name
        .as_deref()
        .is_none_or(|name| rustls::pki_types::ServerName::try_from(name).is_ok());
    (remembered && name_is_good && !address.is_name())
        .then_some((source, Candidate { address, server_name }))
}

/// Replaces the file in one step.
///
/// # Errors
/// What the system says; the old file stays.
pub fn write(
    dir: &Path,
    upstream: &str,
    entries: &SavedEndpoints,
    now: SystemTime,
) -> io::Result<()> {
    let endpoints: Vec<Value> = entries
        .iter()
        .take(MAX_ENTRIES)
        .map(|(source, entry)| {
            json!({
                "address": entry.address.to_string(),
                "server_name": entry.server_name,
                "source": source.as_str(),
            })
        })
        .collect();
    let text = json!({
        "version": VERSION,
        "upstream": upstream,
        "saved_at": Utc(now).seconds(),
        "saved_at_seconds": now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs(),
        "endpoints": endpoints,
    });
    fs::create_dir_all(dir)?;
    atomic_write::replace(&path(dir, upstream), format!("{text:#}\n").as_bytes(), PUBLIC)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::EndpointAddress;

    fn entries() -> SavedEndpoints {
        let entry = |host: &str, name: Option<&str>| Candidate {
            address: EndpointAddress { host: host.into(), port: 6443 },
            server_name: name.map(str::to_owned),
        };
        vec![
            (EndpointSource::Slices, entry("10.0.0.1", Some("kubernetes.default.svc"))),
            (EndpointSource::File, entry("fd00::3", None)),
        ]
    }

    #[test]
    fn what_is_written_is_read_and_has_an_age() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("deep/er");
        let then = SystemTime::now();
        assert!(matches!(read(&dir, "u", then), Err(StateError::Missing)));
        write(&dir, "u", &entries(), then).unwrap();
        write(&dir, "u", &entries(), then).unwrap();
        let saved = read(&dir, "u", then + Duration::from_secs(90)).unwrap();
        assert_eq!(saved.entries, entries());
        assert!((89..=91).contains(&saved.age.as_secs()), "{:?}", saved.age);
        let back = read(&dir, "u", then - Duration::from_secs(90)).unwrap();
        assert_eq!(back.age, Duration::ZERO, "a clock that went back");
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 1, "no temporary file is left");
    }

    #[test]
    fn what_is_not_ours_is_ignored_with_a_reason() {
        let dir = tempfile::tempdir().unwrap();
        let now = SystemTime::now();
        write(dir.path(), "other", &entries(), now).unwrap();
        let other = fs::read_to_string(path(dir.path(), "other")).unwrap();
        let big = format!("{}{}", " ".repeat(MAX_FILE as usize), other);
        for (text, expected) in [
            (other.as_bytes(), "the endpoints of another upstream, \"other\"; it is ignored"),
            (b"", "not a state file: EOF"),
            (b"\xff\xfe", "not a state file: not text"),
            (b"[]", "not a state file: no version"),
            (&other.as_bytes()[..40], "not a state file: "),
            (big.as_bytes(), "not a state file: larger than"),
            (br#"{"version":2}"#, "version 2 of the format; it is ignored"),
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
    fn a_directory_that_cannot_be_written_is_an_error_and_no_more() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(write(&file, "u", &entries(), SystemTime::now()).is_err());
        assert!(matches!(read(&file, "u", SystemTime::now()), Err(StateError::Io(_))));
    }
}
