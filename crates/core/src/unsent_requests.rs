//! Which requests on an abandoned connection the apiserver cannot have read.
//!
//! The kernel sends the bytes of a connection in order. A request whose HEADERS were never sent as a whole cannot be
//! decoded (RFC 9113, 4.3: a header block is processed once it is complete), and so no handler has seen it. The kernel
//! must first be kept from sending the rest: the socket is bound to an interface that does not exist
//! (`SO_BINDTOIFINDEX`), after which no route is found and no segment can leave (Linux, `sock_bindtoindex_locked` and
//! `ip_route_output_key_hash_rcu`). Then `TCP_INFO` says how much was sent, and the socket is closed with a reset.
//!
//! | HEADERS of the request | sent | conclusion |
//! |---|---|---|
//! | still in h2, the cork or TLS | anything | unsent |
//! | in the send queue, of its last record a byte is missing | less than that record | unsent |
//! | in the send queue, perhaps completely sent | the record or more | may be processed |
//! | sent, and its body is unsent | | may be processed: a handler may run before the body is complete |
//! | no longer in the ledger | | may be processed |
//! | anything, the kernel has handed over more than it counts as sent | unknown | may be processed |
//!
//! `tcpi_notsent_bytes` alone is no proof. If the lower layers refuse a large segment, TCP counts all of it as unsent,
//! although some of the packets into which it was split may have left (`dev_hard_start_xmit` and `ip_finish_output_gso`
//! return the result of one packet for all). `tcpi_bytes_sent` counts what was handed over, whatever became of it
//! (`__tcp_transmit_skb`), so both must agree, or what was handed over must have fitted one packet.

use std::collections::VecDeque;

use crate::tcp_info::TcpInfo;

/// Requests that the ledger remembers, the latest ones; earlier ones count as sent. An apiserver allows 100 streams.
const MAX_REQUESTS: usize = 256;
/// What TLS adds to each record at least: its head, and an authentication tag of 16 bytes (RFC 8446, 5.2; TLS 1.2 adds
/// more for AES-GCM). A record without its last byte cannot be authenticated.
const RECORD_OVERHEAD: u64 = 5 + 16;

/// What the kernel says of the sending side of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SendProgress {
    /// Bytes that the kernel has taken from this process since the connection was opened.
    pub accepted: u64,
    /// Bytes of these that TCP has never sent (`tcpi_notsent_bytes`).
    pub not_sent: u32,
    /// Bytes that TCP has handed to IP, without retransmissions (`tcpi_bytes_sent - tcpi_bytes_retrans`, Linux 4.19).
    pub handed_over: Option<u64>,
    /// Maximum segment size of this side, in bytes.
    pub segment: u32,
}

impl SendProgress {
    /// What the kernel says of a connection of which it has taken `accepted` bytes.
    pub fn new(accepted: u64, info: &TcpInfo) -> Self {
        let (not_sent, segment) = (info.notsent_bytes, info.send_mss);
        Self { accepted, not_sent, handed_over: info.handed_over, segment }
    }
}

/// The heads of the requests of one connection, and where they are in the bytes of TCP.
#[derive(Debug, Default)]
pub struct UnsentRequests {
    /// Stream, and the bytes that the kernel had taken before the last byte of the head. Both grow.
    heads: VecDeque<(u32, u64)>,
    /// When nothing was unsent for the last time: bytes that the kernel had taken, and the segment size.
    drained: Option<(u64, u32)>,
}

impl UnsentRequests {
    /// The header block of this stream, or its trailers, are being passed on to TLS. `accepted`: what the kernel had taken
    /// before the last byte of it was passed on, or earlier.
    pub fn head_written(&mut self, stream: u32, accepted: u64) {
        if self.heads.back().is_some_and(|(last, _)| *last >= stream) {
            return; // trailers
        }
        if self.heads.len() == MAX_REQUESTS {
            self.heads.pop_front();
        }
        self.heads.push_back((stream, accepted));
    }

    /// A look at the connection while it is in use.
    pub fn observe(&mut self, progress: &SendProgress) {
        if progress.not_sent == 0 {
            self.drained = Some((progress.accepted, progress.segment));
        }
    }

    /// Whether the head of a request may be unsent, so that it is worth to keep the kernel from sending.
    pub fn may_be_unsent(&self, progress: &SendProgress) -> bool {
        let sent = progress.accepted.saturating_sub(progress.not_sent.into());
        // h2 keeps what is behind bytes that the kernel does not send.
        progress.not_sent > 0
            || self.heads.back().is_some_and(|(_, before)| before + RECORD_OVERHEAD + 1 > sent)
    }

    /// The lowest stream whose request the apiserver cannot have read; those above it were not read either, because
    /// streams are opened in their order (RFC 9113, 5.1.1). `last`: the last state, after which nothing can be sent. `None`
    /// if it proves nothing.
    pub fn first_unsent(&self, last: &SendProgress) -> Option<u32> {
        let sent = self.sent(last)?;
        let unsent = |&&(_, before): &&(u32, u64)| before + RECORD_OVERHEAD + 1 > sent;
        match self.heads.iter().find(unsent) {
            Some(&(stream, _)) => Some(stream),
            // What h2 still keeps was opened later.
            None => self.heads.back().map(|&(stream, _)| stream + 2),
        }
    }

    /// The number of bytes above which no byte has left.
    fn sent(&self, last: &SendProgress) -> Option<u64> {
        let sent = last.accepted.checked_sub(last.not_sent.into())?;
        let fits_one_packet = self.drained.is_some_and(|(accepted, segment)| {
            last.accepted - accepted.min(last.accepted) <= u64::from(segment.min(last.segment))
        });
        (last.handed_over == Some(sent) || last.handed_over.is_some() && fits_one_packet)
            .then_some(sent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(accepted: u64, not_sent: u32, handed_over: impl Into<Option<u64>>) -> SendProgress {
        SendProgress { accepted, not_sent, handed_over: handed_over.into(), segment: 1_448 }
    }

    /// Three requests: each was written when the kernel had taken everything before, as records of 300 bytes.
    fn three() -> UnsentRequests {
        let mut ledger = UnsentRequests::default();
        for (stream, accepted) in [(1, 1_000), (3, 1_300), (5, 1_600)] {
            ledger.head_written(stream, accepted);
        }
        ledger
    }

    #[test]
    fn request_is_unsent_if_its_last_record_cannot_have_arrived_as_a_whole() {
        for (name, last, expected) in [
            ("all sent", at(1_900, 0, 1_900), Some(7)),
            ("nothing of the last one", at(1_900, 300, 1_600), Some(5)),
            ("the head of its record", at(1_900, 295, 1_605), Some(5)),
            ("as much as the shortest record", at(1_900, 279, 1_621), Some(5)),
            ("perhaps its whole record", at(1_900, 278, 1_622), Some(7)),
            ("nothing of the last two", at(1_900, 600, 1_300), Some(3)),
            ("nothing of any", at(1_900, 1_000, 900), Some(1)),
            ("the last one is in TLS", at(1_600, 0, 1_600), Some(5)),
            ("the last one is in TLS, that before is unsent", at(1_600, 300, 1_300), Some(3)),
            ("a packet was refused, which may have been split", at(1_900, 300, 1_900), None),
            ("a kernel before Linux 4.19", at(1_900, 300, None), None),
            ("contradictory", at(100, 300, 0), None),
        ] {
            assert_eq!(three().first_unsent(&last), expected, "{name}");
        }
        assert_eq!(UnsentRequests::default().first_unsent(&at(500, 0, 500)), None);
    }

    #[test]
    fn refused_packet_proves_something_if_everything_since_fits_one_packet() {
        for (name, drained, segment, expected) in [
            ("drained before the last one", at(1_600, 0, 1_600), 1_448, Some(5)),
            (
                "drained long before, also with an earlier refusal",
                at(1_000, 0, 9_000),
                1_448,
                Some(5),
            ),
            ("more than a packet since", at(400, 0, 400), 1_448, None),
            ("packets have become smaller", at(1_000, 0, 1_000), 500, None),
            ("it was not drained", at(1_600, 1, 1_599), 1_448, None),
        ] {
            let mut ledger = three();
            ledger.observe(&drained);
            let last = SendProgress { segment, ..at(1_900, 300, 1_900) };
            assert_eq!(ledger.first_unsent(&last), expected, "{name}");
        }
    }

    #[test]
    fn forgotten_request_counts_as_sent() {
        let mut ledger = UnsentRequests::default();
        let requests = 2 * MAX_REQUESTS as u32;
        for request in 0..requests {
            ledger.head_written(2 * request + 1, u64::from(request) * 300);
        }
        assert_eq!(ledger.heads.len(), MAX_REQUESTS);
        let all = requests * 300;
        let first_kept = 2 * (requests - MAX_REQUESTS as u32) + 1;
        assert_eq!(ledger.first_unsent(&at(all.into(), all, 0)), Some(first_kept));
    }
}
