//! How long the head of a response is held.
//!
//! jackstay holds a head until the first part of the body, the prefix, has arrived. Until it forwards the first byte it can
//! send the request again, so that the client does not notice a lost connection. But the body may begin late or never: the
//! log of a quiet container, a watch at a path that no API has, the events of an extension server, NDJSON. Their clients
//! wait for the head, so each hold has an end:
//!
//! | request | the head is held until | at the latest |
//! |---|---|---|
//! | get, list, discovery, any other GET; a review or dry run; a write | [`PREFIX_SIZE`] bytes or the end of the body | [`HOLD`] after the head |
//! | log | the first bytes | the same |
//! | watch, service proxy | not at all | |
//!
//! The time ends only on a connection that receives: a PONG or a frame has arrived since the last part of this response. On
//! a connection that is suspect, or on which nothing has arrived, the response may be lost. It is held until one of both
//! changes, and such a request is hedged, sent again, or ended as one without a head.

use std::time::{Duration, Instant};

use super::info::RequestKind;

/// How long a head is held for the prefix of its body.
pub const HOLD: Duration = Duration::from_secs(1);

/// Size at which a prefix is forwarded, in bytes: enough for discovery, an object or a short list. It fits into the receive
/// window of the stream, so it needs no more memory than a client that reads nothing.
pub const PREFIX_SIZE: usize = 64 * 1024;

/// How often a connection is looked at that has received nothing in [`HOLD`].
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// How much longer a head is held on a connection that is not suspect and receives nothing, because no PING is sent on it.
const WITHOUT_PING: Duration = Duration::from_secs(2);

/// The bytes of its body for which the head of a response to such a request is held; `None` if it is not held. Until they
/// have arrived the request counts as one that waits for its head, so that its connection sends a PING.
pub const fn prefix_size(kind: RequestKind) -> Option<usize> {
    match kind {
        RequestKind::Read | RequestKind::NonMutating | RequestKind::Write => Some(PREFIX_SIZE),
        RequestKind::Log => Some(1),
        RequestKind::Watch | RequestKind::Tunnel => None,
    }
}

/// What is known of a connection on which a head is held.
#[derive(Debug, Clone, Copy)]
pub struct Evidence {
    /// Whether its PING is late or unanswered.
    pub is_suspect: bool,
    /// When bytes last arrived on it.
    pub last_received: Instant,
}

/// The hold of one head.
#[derive(Debug, Clone, Copy)]
pub struct HeadHold {
    arrived: Instant,
    last_part: Instant,
    due: Instant,
}

impl HeadHold {
    /// The hold of a head that has arrived at this time.
    pub fn new(arrived: Instant) -> Self {
        Self { arrived, last_part: arrived, due: arrived + HOLD }
    }

    /// When [`Self::check`] is due.
    pub fn due(&self) -> Instant {
        self.due
    }

    /// A part of the body has arrived, which is evidence for the connection. Returns whether the hold is over.
    pub fn received(&mut self, now: Instant) -> bool {
        self.last_part = now;
        now >= self.arrived + HOLD
    }

    /// Returns whether the hold is over. If it is not, another check is due later.
    pub fn check(&mut self, connection: Evidence, now: Instant) -> bool {
        if now < self.due {
            return false;
        }
        let receives = connection.last_received > self.last_part
            || now >= self.last_part.max(self.arrived + HOLD) + WITHOUT_PING;
        if receives && !connection.is_suspect {
            return true;
        }
        self.due = now + CHECK_INTERVAL;
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// When the hold of a head is over, in milliseconds after the head. `parts` of the body and `bytes` on the connection
    /// arrive at these times, and the connection is suspect in this range.
    fn held(parts: &[u32], bytes: &[u32], suspect: std::ops::Range<u32>) -> Option<u32> {
        let start = Instant::now();
        let mut hold = HeadHold::new(start);
        let mut last_received = start;
        (0..20_000).find(|&at| {
            let now = start + at * MS;
            if bytes.contains(&at) {
                last_received = now;
            }
            let evidence = Evidence { is_suspect: suspect.contains(&at), last_received };
            if parts.contains(&at) {
                last_received = now;
                return hold.received(now);
            }
            now >= hold.due() && hold.check(evidence, now)
        })
    }

    #[test]
    fn head_goes_on_after_a_second_on_a_connection_that_receives() {
        for (parts, bytes, suspect, expected) in [
            // A PONG has arrived since the head or the last part.
            (&[][..], &[120][..], 0..0, Some(1_000)),
            (&[300], &[420], 0..0, Some(1_000)),
            // Nothing has: the PONG of a PING after the last part is waited for, or the next part.
            (&[950], &[120, 1_070], 0..0, Some(1_100)),
            (&[950, 1_040], &[120], 0..0, Some(1_040)),
            // One part in a second does not hold the head any longer.
            (&[999, 1_999, 2_999, 3_999], &[], 0..0, Some(1_999)),
            // A suspect connection is not trusted, whatever has arrived before.
            (&[], &[120], 200..4_000, Some(4_000)),
            (&[], &[120, 4_050], 200..4_050, Some(4_100)),
            // Without an answer and without trouble, no PING was sent.
            (&[], &[], 0..0, Some(3_000)),
            (&[], &[], 200..20_000, None),
        ] {
            assert_eq!(
                held(parts, bytes, suspect.clone()),
                expected,
                "{parts:?} {bytes:?} {suspect:?}"
            );
        }
    }

    #[test]
    fn only_responses_that_may_be_asked_for_again_or_explained_are_held() {
        let of = |kind| prefix_size(kind);
        assert_eq!(of(RequestKind::Read), Some(PREFIX_SIZE));
        assert_eq!(of(RequestKind::NonMutating), Some(PREFIX_SIZE));
        assert_eq!(of(RequestKind::Write), Some(PREFIX_SIZE));
        assert_eq!(of(RequestKind::Log), Some(1));
        assert_eq!((of(RequestKind::Watch), of(RequestKind::Tunnel)), (None, None));
    }
}
