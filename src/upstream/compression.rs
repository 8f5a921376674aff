//! Whether watches of one upstream ask for gzip.
//!
//! A stream that cannot be decoded is left, and its watch asks again or is listed again by its client. For a pause no
//! watch of the upstream asks for gzip then, so that a server with broken compression costs one stream of each pause
//! and not every list, and neither does a shortage of memory.

use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;
use jackstay_core::watch::gzip::GzipError;
use jackstay_sys::utc::Utc;
use serde::Serialize;

/// How long no watch asks for gzip after a stream that could not be decoded.
const PAUSE: Duration = Duration::from_secs(600);
/// The same if there was no memory for it.
const MEMORY_PAUSE: Duration = Duration::from_secs(30);

/// The state of one upstream, which all workers share.
#[derive(Debug, Default)]
pub struct Compression {
    last_failure: ArcSwapOption<Failure>,
}

#[derive(Debug)]
struct Failure {
    until: Instant,
    status: GzipFailure,
}

/// A stream that could not be decoded, for `/status`.
#[derive(Debug, Clone, Serialize)]
pub struct GzipFailure {
    endpoint: Box<str>,
    reason: &'static str,
    /// When it was found, RFC 3339.
    since: String,
}

impl Compression {
    /// Whether no watch asks for gzip, because of a failure.
    pub fn is_paused(&self, now: Instant) -> bool {
        self.paused_until().is_some_and(|until| now < until)
    }

    /// A stream of `endpoint` could not be decoded. Returns whether that ends the requests for gzip.
    pub fn failed(&self, endpoint: &str, error: GzipError, now: Instant) -> bool {
        let is_first = !self.is_paused(now);
        let pause = if error == GzipError::Memory { MEMORY_PAUSE } else { PAUSE };
        let until = now + pause;
        // A lack of memory does not end the pause after a broken stream.
        if self.paused_until().is_some_and(|earlier| earlier > until) {
            return false;
        }
        let status = GzipFailure {
            endpoint: endpoint.into(),
            reason: error.as_str(),
            since: Utc::now().seconds(),
        };
        self.last_failure.store(Some(Arc::new(Failure { until, status })));
        is_first
    }

    fn paused_until(&self) -> Option<Instant> {
        self.last_failure.load().as_ref().map(|failure| failure.until)
    }

    /// Why watches do not ask for gzip; `None` if they do, or if the configuration decides.
    pub fn failure(&self, now: Instant) -> Option<GzipFailure> {
        let failure = self.last_failure.load();
        let failure = failure.as_ref()?;
        (now < failure.until).then(|| failure.status.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failure_pauses_the_requests_for_gzip() {
        let compression = Compression::default();
        let begin = jackstay_sys::clock::now();
        assert!(!compression.is_paused(begin));
        let endpoint = "10.0.0.1:6443";
        assert!(compression.failed(endpoint, GzipError::Ratio, begin));
        let error = GzipError::Invalid("bytes that are no gzip member");
        let later = begin + Duration::from_secs(60);
        assert!(!compression.failed(endpoint, error, later), "the second one");
        assert_eq!(compression.failure(later).unwrap().reason, "bytes that are no gzip member");
        assert!(compression.is_paused(later + PAUSE / 2));
        assert!(!compression.is_paused(later + PAUSE));
        assert!(compression.failure(later + PAUSE).is_none());
        assert!(compression.failed(endpoint, GzipError::Memory, begin + 3 * PAUSE));
        assert!(compression.is_paused(begin + 3 * PAUSE + MEMORY_PAUSE / 2));
        assert!(!compression.is_paused(begin + 3 * PAUSE + MEMORY_PAUSE));

        assert!(compression.failed(endpoint, error, begin + 4 * PAUSE));
        assert!(!compression.failed(endpoint, GzipError::Memory, begin + 4 * PAUSE));
        assert!(compression.is_paused(begin + 4 * PAUSE + 2 * MEMORY_PAUSE));
    }
}
