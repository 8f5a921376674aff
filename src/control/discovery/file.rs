//! Endpoints in a file: one address a line, `#` starts a comment; read again when it changes.
//!
//! The file is looked at every second, as certificates are: a rename over it and the swap of a
//! mounted directory are seen alike. Names are refused: they belong in `endpoints`, which are
//! looked up.

use std::path::{Path, PathBuf};
use std::rc::Rc;

use super::merge::Candidate;
use super::objects::DiscoveredEndpoints;
use super::source_states::SourceStates;
use crate::config::EndpointAddress;
use crate::control::certificates::ticks;
use crate::control::file_watch::FileWatch;
use crate::net::files::bounded_read;
use crate::upstream::endpoint_sources::EndpointSource;

/// Largest file read.
const MAX_FILE: u64 = 1 << 20;

/// Follows the file until it is dropped.
pub async fn follow(path: PathBuf, board: Rc<SourceStates>) {
    let mut files = FileWatch::new(vec![path.clone()]);
    files.unsettled = true;
    let mut ticks = ticks();
    loop {
        ticks.tick().await;
        if files.changed() {
            let read = read(&path);
            files.unsettled = read.is_err();
            match read {
                Ok(text) => board.update(EndpointSource::File, parse(&text), true),
                Err(why) => board.fail(EndpointSource::File, &why),
            }
        } else {
            // It says what it said.
            board.confirm(EndpointSource::File);
        }
    }
}

/// Reads the file as it is now.
///
/// # Errors
/// It cannot be read or is too large, with its path.
pub fn read(path: &Path) -> Result<String, String> {
    let text = bounded_read::read_text(path, MAX_FILE);
    text.map_err(|error| format!("{}: {error}", path.display()))
}

/// What the file says.
pub fn parse(text: &str) -> DiscoveredEndpoints {
    let mut said = DiscoveredEndpoints::default();
    for (number, line) in text.trim_start_matches('\u{feff}').lines().enumerate() {
        let line = line.split('#').next().unwrap_or_default().trim();
        if line.is_empty() {
            continue;
        }
        let address = EndpointAddress::parse(line).and_then(|address| {
            if address.is_name() {
                let host = &address.host;
                return Err(format!("{host:?} is a name: write it in endpoints, not in this file"));
            }
            Ok(address)
        });
        match address {
            Ok(address) => said.entries.push(Candidate { address, server_name: None }),
            Err(why) => {
                said.refused_count += 1;
                if said.refused.len() < 20 {
                    said.refused.push(format!("line {}: {why}", number + 1));
                }
            }
        }
    }
    said
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_comments_and_what_is_refused() {
        let said = parse(
            "\u{feff}# apiservers\n\n10.0.0.1:6443\r\n  [fd00::3]:6443 # the third\nlocalhost:1\n\
             10.0.0.1\napi.example.com:6443\n0.0.0.0:1\n10.0.0.9:0\n\u{0}\n",
        );
        let labels: Vec<_> = said.entries.iter().map(|e| e.address.to_string()).collect();
        assert_eq!(labels, ["10.0.0.1:6443", "[fd00::3]:6443", "localhost:1"]);
        assert_eq!(said.refused_count, 5, "{:?}", said.refused);
        assert!(said.refused[0].starts_with("line 6: \"10.0.0.1\" has no port"), "{said:?}");
        assert!(said.refused[1].contains("is a name"), "{said:?}");
        assert_eq!(parse(""), DiscoveredEndpoints::default());
    }

    #[test]
    fn a_file_that_cannot_be_read() {
        let dir = tempfile::tempdir().unwrap();
        assert!(read(&dir.path().join("none")).unwrap_err().contains("none"));
        assert!(read(dir.path()).is_err());
        let path = dir.path().join("big");
        std::fs::write(&path, vec![b'#'; MAX_FILE as usize + 1]).unwrap();
        assert!(read(&path).unwrap_err().contains("larger than"));
        std::fs::write(&path, b"\xff").unwrap();
        assert!(read(&path).is_err());
    }
}
