//! The version of an endpoint, as the prober has read it.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use jackstay_core::kubernetes_version::{MinorVersion, ServerVersion, VersionError};

/// The version of an endpoint; unknown at first.
#[derive(Debug, Default)]
pub(super) struct EndpointVersion {
    /// A copy of the minor version, for readers that must not wait for the lock: the number of a [`MinorVersion`].
    minor: AtomicU32,
    /// The version, or why the response of `/version` names none.
    known: Mutex<Option<Result<ServerVersion, VersionError>>>,
}

impl EndpointVersion {
    fn known(&self) -> MutexGuard<'_, Option<Result<ServerVersion, VersionError>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The complete version, or why it is unknown, for `/status`.
    pub(super) fn status(&self) -> (Option<String>, Option<String>) {
        match &*self.known() {
            None => (None, None),
            Some(Ok(version)) => (Some(version.git_version.to_string()), None),
            Some(Err(reason)) => (None, Some(reason.to_string())),
        }
    }

    /// Major and minor version; `None` while unknown. One atomic load.
    pub(super) fn minor(&self) -> Option<MinorVersion> {
        MinorVersion::from_number(self.minor.load(Ordering::Relaxed))
    }

    /// The version; `None` while unknown.
    pub(super) fn get(&self) -> Option<ServerVersion> {
        self.known().clone()?.ok()
    }

    /// Records what `/version` has answered, or why that is no version. Logs a change. Returns whether it is one.
    pub(super) fn record(
        &self,
        read: Result<ServerVersion, VersionError>,
        (upstream, endpoint): (&str, &str),
    ) -> bool {
        let mut known = self.known();
        if known.as_ref() == Some(&read) {
            return false;
        }
        let before = known.replace(read.clone());
        let minor = read.as_ref().ok().map(|version| version.minor);
        self.minor.store(MinorVersion::to_number(minor), Ordering::Relaxed);
        drop(known);
        match (read, before) {
            (Ok(version), Some(Ok(before))) => {
                let (version, before) = (&*version.git_version, &*before.git_version);
                tracing::info!(upstream, endpoint, version, before, "endpoint version changed");
            }
            (Ok(version), _) => {
                let version = &*version.git_version;
                tracing::debug!(upstream, endpoint, version, "endpoint version read");
            }
            (Err(error), _) => {
                let reason = error.to_string();
                tracing::info!(upstream, endpoint, reason, "endpoint version unknown");
            }
        }
        true
    }
}
