//! What round trips have shown of the line to the endpoint.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use jackstay_core::line_delay::LineDelays;
use jackstay_core::line_pacing::{LineMemory, LinePacing, QueueBounds};
use jackstay_core::pool::EndpointKey;
use jackstay_core::tcp_info::TcpInfo;

use crate::observe::EndpointMetrics;
use crate::observe::events::{Change, EventKind};

/// What the endpoints of an upstream have in common: the line of this host.
#[derive(Debug, Default)]
pub struct HostLine(Mutex<LineDelays>);

impl HostLine {
    fn delays(&self) -> MutexGuard<'_, LineDelays> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Its round trips have become late. The gauge shows by how much: it changes all the time.
const LATE: Change<'_> = Change {
    from: "on time",
    to: "late",
    reason: "round trips show that the queue of a slow line is long, because of a transfer of this host or of others",
    effect: "deadlines are longer (jackstay_endpoint_line_delay_seconds), so a dead path is noticed later",
    ..ON_TIME
};

/// They are short again.
const ON_TIME: Change<'_> = Change {
    kind: EventKind::Endpoint,
    upstream: None,
    name: "",
    detail: "",
    from: "late",
    to: "on time",
    reason: "round trips are short again",
    effect: "",
    bad: false,
};

/// The line to one endpoint.
#[derive(Debug)]
pub(super) struct Line {
    endpoint: EndpointKey,
    memory: Mutex<LineMemory>,
    host: Arc<HostLine>,
    /// The delay that metrics and `/status` show, in milliseconds.
    shown: AtomicU64,
}

impl Line {
    pub(super) fn new(endpoint: EndpointKey, host: &Arc<HostLine>) -> Self {
        let (memory, shown) = Default::default();
        Self { endpoint, memory, host: Arc::clone(host), shown }
    }

    /// Looks at a connection. If its bounds have changed, they are set with `bound`.
    pub(super) fn pace(
        &self,
        pacing: &mut LinePacing,
        info: &TcpInfo,
        metrics: &EndpointMetrics,
        now: Instant,
        bound: impl FnOnce(QueueBounds) -> io::Result<()>,
    ) {
        if !pacing.is_due(now) {
            return;
        }
        let change = {
            let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
            let change = pacing.look(info, &mut memory, now);
            let is_bounded = change.is_some() || pacing.bounds() != QueueBounds::default();
            if pacing.is_active() && is_bounded {
                memory.record(pacing.bounds(), now);
            }
            change
        };
        if let Some(queue) = pacing.queue() {
            self.host.delays().record(self.endpoint, queue, now);
        }
        if let Some(change) = change {
            if pacing.is_active() {
                metrics.paced(change);
            }
            // Without it, the line is as slow as it was.
            let _ = bound(change.bounds);
        }
    }

    /// By how much answers may be late. Reports it if it has changed.
    pub(super) fn delay(
        &self,
        (upstream, endpoint): (&str, &str),
        metrics: &EndpointMetrics,
        now: Instant,
    ) -> Duration {
        let delay = self.host.delays().get(self.endpoint, now);
        let millis = delay.as_millis() as u64;
        let before = self.shown.swap(millis, Ordering::Relaxed);
        if before != millis {
            metrics.line_delay(delay);
        }
        if (before == 0) != (millis == 0) {
            metrics.events().changed(&Change {
                upstream: Some(upstream),
                name: endpoint,
                ..if millis == 0 { ON_TIME } else { LATE }
            });
        }
        delay
    }

    /// The delay that was last reported.
    pub(super) fn shown_delay(&self) -> Option<Duration> {
        Some(self.shown.load(Ordering::Relaxed)).filter(|ms| *ms > 0).map(Duration::from_millis)
    }
}
