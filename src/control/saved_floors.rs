//! Saves the version floors of an upstream, so that clients keep theirs across a restart of jackstay.
//!
//! The file is written at the start, then at most once a minute if a floor has changed, when the process begins to
//! drain, and when it ends, because its connections raise floors until then. A process that another one has taken over
//! from does not write it at its end: the file is that of the other one. It contains keyed hashes of clients, and their
//! key, but no name and no token. A file that is corrupt or of another upstream is reported and ignored.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use jackstay_core::reads::FloorVersions;
use jackstay_sys::simulation::run_blocking;
use jackstay_sys::{clock, files};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::time::{sleep_until, timeout};

use crate::upstream::Upstream;
use crate::upstream::client_key::{ClientHasher, ClientKey};
use crate::upstream::version_floors::{MAX_FLOORS, NamedFloor};

/// Shortest time between two writes.
const INTERVAL: Duration = Duration::from_secs(60);
/// When the file is read again. A process that this one has taken over from writes it once more when it drains.
const READ_AGAIN: [Duration; 2] = [Duration::from_secs(2), Duration::from_secs(10)];
/// How long a process that ends waits for the last write. A disk may hang.
pub const LAST_WRITE: Duration = Duration::from_secs(1);
/// Version of the format. A file with another version is ignored.
const VERSION: u64 = 1;
/// Maximum size of a file in bytes. A floor takes about 120 bytes.
const MAX_FILE: u64 = 2 << 20;

/// The content of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SavedFloors {
    /// The key of the hashes.
    pub secret: [u8; 32],
    /// The floors.
    pub floors: Vec<NamedFloor>,
}

/// Why a file of floors is ignored.
#[derive(Debug, thiserror::Error)]
pub enum FloorsError {
    /// It cannot be read.
    #[error("{0}")]
    Io(#[source] io::Error),
    /// It does not have the form of such a file.
    #[error("not a file of floors: {0}")]
    Malformed(#[source] serde_json::Error),
    /// Its format has another version.
    #[error("format version {0} is not supported")]
    OtherVersion(u64),
    /// It is the file of the upstream of this name.
    #[error("the floors of another upstream, {0:?}")]
    OtherUpstream(String),
    /// The key in it is not 64 hexadecimal digits.
    #[error("the key is not 64 hexadecimal digits")]
    Key,
}

/// The form of the file.
#[derive(Serialize, Deserialize)]
struct File {
    version: u64,
    upstream: String,
    key: String,
    /// Client, resource, and the versions of objects, lists and bookmarks.
    floors: Vec<(String, String, u64, u64, u64)>,
}

/// The path of the file of `upstream`. The name of an upstream contains no dot, so it is no other file.
pub fn path(dir: &Path, upstream: &str) -> PathBuf {
    dir.join(format!("{upstream}.floors.json"))
}

/// The text of a file.
pub fn to_text(upstream: &str, saved: &SavedFloors) -> String {
    let floors = saved.floors.iter().take(MAX_FLOORS).map(|floor| {
        let ClientKey([high, low]) = floor.client;
        let FloorVersions { objects, lists, bookmarks } = floor.versions;
        (format!("{high:016x}{low:016x}"), floor.resource.to_string(), objects, lists, bookmarks)
    });
    let file = File {
        version: VERSION,
        upstream: upstream.to_owned(),
        key: saved.secret.iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}")),
        floors: floors.collect(),
    };
    // Cannot fail: there are no maps.
    serde_json::to_string(&file).unwrap_or_default() + "\n"
}

/// Parses the text of the file of `upstream`.
///
/// # Errors
/// Why the file is ignored.
pub fn parse(text: &str, upstream: &str) -> Result<SavedFloors, FloorsError> {
    let file: File = serde_json::from_str(text).map_err(FloorsError::Malformed)?;
    if file.version != VERSION {
        return Err(FloorsError::OtherVersion(file.version));
    }
    if file.upstream != upstream {
        return Err(FloorsError::OtherUpstream(file.upstream));
    }
    let number = |digits: &str| u64::from_str_radix(digits, 16).ok();
    let mut secret = [0; 32];
    if file.key.len() != 64 {
        return Err(FloorsError::Key);
    }
    for (at, chunk) in secret.chunks_exact_mut(8).enumerate() {
        let digits = file.key.get(16 * at..16 * (at + 1)).and_then(number);
        let word = digits.ok_or(FloorsError::Key)?;
        chunk.copy_from_slice(&word.to_be_bytes());
    }
    let floor = |(client, resource, objects, lists, bookmarks): (String, String, _, _, _)| {
        let half = |range| client.get(range).and_then(number);
        let client = ClientKey([half(0..16)?, half(16..32)?]);
        let versions = FloorVersions { objects, lists, bookmarks };
        Some(NamedFloor { client, resource: resource.into(), versions })
    };
    let floors = file.floors.into_iter().take(MAX_FLOORS).filter_map(floor).collect();
    Ok(SavedFloors { secret, floors })
}

/// What the file says whose floors it has: the name of the upstream, and the path below which its servers have the API.
/// Below another path is another cluster.
fn identity(upstream: &Upstream) -> String {
    [&*upstream.name, upstream.path_prefix.encoded()].concat()
}

/// Lets `upstream` keep floors, and restores and saves them in `state_dir`, which a reload may replace, until `ended`
/// becomes true, for which the process waits, or its sender is dropped. Without a directory the floors are kept in
/// memory only.
pub async fn run(
    upstream: Arc<Upstream>,
    state_dir: Arc<ArcSwap<Option<PathBuf>>>,
    mut draining: watch::Receiver<bool>,
    mut ended: watch::Receiver<bool>,
) {
    let started = clock::now();
    restore(&upstream, &state_dir).await;
    upstream.version_floors.set_hasher(ClientHasher::default());
    let mut saved = None;
    save_if_changed(&upstream, &state_dir, &mut saved).await;
    let read_again = async {
        for at in READ_AGAIN {
            sleep_until((started + at).into()).await;
            restore(&upstream, &state_dir).await;
        }
        std::future::pending::<()>().await;
    };
    let save = async {
        let mut notice = 0;
        loop {
            // Floors of a lost history must not be restored after the next start.
            let _ = timeout(INTERVAL, upstream.restores.recognised_after(notice)).await;
            notice = upstream.restores.recognised_notice();
            save_if_changed(&upstream, &state_dir, &mut saved).await;
        }
    };
    tokio::select! {
        () = read_again => {}
        () = save => {}
        _ = draining.wait_for(|draining| *draining) => {}
    }
    save_if_changed(&upstream, &state_dir, &mut saved).await;
    if ended.wait_for(|ended| *ended).await.is_ok() {
        save_if_changed(&upstream, &state_dir, &mut saved).await;
    }
}

/// Reads the file, on another thread, because a disk may hang.
async fn restore(upstream: &Upstream, state_dir: &ArcSwap<Option<PathBuf>>) {
    let Some(dir) = state_dir.load().as_ref().clone() else { return };
    let (path, name) = (path(&dir, &upstream.name), identity(upstream));
    let file = path.clone();
    let read = move || match files::read_text(&file, MAX_FILE) {
        Ok(text) => parse(&text, &name).map(Some),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(FloorsError::Io(error)),
    };
    let read = run_blocking(read).await;
    match read.unwrap_or_else(|error| Err(FloorsError::Io(io::Error::other(error)))) {
        Ok(Some(saved)) => {
            let is_same_history = upstream.restores.recognised_notice() == 0;
            if upstream.version_floors.set_hasher(ClientHasher::new(saved.secret))
                && is_same_history
            {
                upstream.version_floors.restore(&saved.floors, &upstream.resource_versions);
            }
        }
        Ok(None) => {}
        Err(error) => tracing::warn!(
            path = %path.display(),
            reason = error.to_string(),
            "saved version floors ignored: after this restart, a read may be older than one before it"
        ),
    }
}

/// Writes the file if its content is not `saved`, on another thread.
async fn save_if_changed(
    upstream: &Upstream,
    state_dir: &ArcSwap<Option<PathBuf>>,
    saved: &mut Option<SavedFloors>,
) {
    let Some(dir) = state_dir.load().as_ref().clone() else { return };
    let Some(hasher) = upstream.version_floors.hasher() else { return };
    let now = SavedFloors { secret: *hasher.secret(), floors: upstream.version_floors.all() };
    if saved.as_ref() == Some(&now) {
        return;
    }
    let (path, text) = (path(&dir, &upstream.name), to_text(&identity(upstream), &now));
    let file = path.clone();
    let write = move || {
        std::fs::create_dir_all(&dir)?;
        files::replace(&file, text.as_bytes(), files::PRIVATE)
    };
    match run_blocking(write).await.unwrap_or_else(|error| Err(io::Error::other(error))) {
        Ok(()) => *saved = Some(now),
        Err(error) => tracing::warn!(
            path = %path.display(),
            %error,
            "version floors not saved: after a restart, a read may be older than one before it"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn saved() -> SavedFloors {
        let floor = |client, resource: &str, objects| NamedFloor {
            client: ClientKey([client, u64::MAX]),
            resource: resource.into(),
            versions: FloorVersions { objects, lists: 2, bookmarks: u64::MAX },
        };
        SavedFloors {
            secret: std::array::from_fn(|at| at as u8 + 200),
            floors: vec![floor(1, "pods", 5), floor(2, "apps/deployments", 0)],
        }
    }

    #[test]
    fn parse_written_text_returns_the_floors() {
        assert_eq!(parse(&to_text("u", &saved()), "u").unwrap(), saved());
    }

    #[test]
    fn parse_foreign_or_corrupt_text_says_why_it_is_ignored() {
        let text = to_text("u", &saved());
        for (text, expected) in [
            (text.clone(), "the floors of another upstream, \"u\""),
            (text.replace("\"version\":1", "\"version\":2"), "format version 2 is not supported"),
            (text.replace("\"key\":\"", "\"key\":\"x"), "the floors of another"),
            (String::new(), "not a file of floors: EOF"),
            ("[]".to_owned(), "not a file of floors: "),
            (text[..60].to_owned(), "not a file of floors: "),
        ] {
            let error = parse(&text, "v").unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
        for key in ["", "x", &"g".repeat(64), &"é".repeat(32)] {
            let text = format!(r#"{{"version":1,"upstream":"u","key":"{key}","floors":[]}}"#);
            assert!(matches!(parse(&text, "u"), Err(FloorsError::Key)), "{key}");
        }
        let floors = r#"["", "pods", 1, 2, 3], ["é", "pods", 1, 2, 3]"#;
        let text = format!(
            r#"{{"version":1,"upstream":"u","key":"{}","floors":[{floors}]}}"#,
            "0".repeat(64)
        );
        assert_eq!(parse(&text, "u").unwrap().floors, [], "no client");
    }
}
