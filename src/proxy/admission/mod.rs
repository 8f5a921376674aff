//! Who may connect, shake hands, ask and hold memory.
//!
//! A *source* is the user of a client on this node, else its address ([`jackstay_sys::sockets::source`]). What a client
//! has proven is its [rank](jackstay_core::credential_class::ClientRank). The decisions are in
//! [`jackstay_core::admission`]; this module executes them for one worker.
//!
//! | resource | limit and its configuration key | share of a source | what waits, and what jackstay closes |
//! |---|---|---|---|
//! | slots ([`connection_slots`]) | connections of a listener (`limits.max_connections`) | fewer than are free, so at most half; an eighth is left to identities, whatever they have already; fewer if the process may open few descriptors | nothing waits; idle connections without an identity are closed for new ones, flows that have begun are not |
//! | TLS handshakes ([`handshake_queue`], [`handshake_memory`]) | 128 in progress in the process; 10 s (`limits.handshake_timeout`) | fewer in progress than are free, but always one; 200 a second after a burst of 400 | handshakes wait in turns by source; one in progress for a second is ended for another one of its source |
//! | certificate chains ([`jackstay_net::tls::client_chain`]) | 1,024 short ones and 16 long ones wait; 6 certificates, 32 KiB | half of the free places | chains wait in turns by source |
//! | first request ([`super::http_connection`]) | 10 s (`limits.header_timeout`) | | |
//! | requests with unproven tokens ([`unproven_requests`]) | 128 in progress on a worker, each for 5 s in the queue | 32 in progress, 256 waiting | requests wait in turns by source; a source with rejected tokens is slowed |
//! | upgrades without a proven token ([`unproven_requests`]) | 32 in progress on a worker | 8 in progress, 64 waiting | as requests |
//! | proven tokens ([`proven_tokens`]) | 4,096 on a listener of a worker | the oldest of the source with the most is forgotten | |
//! | streams of a connection ([`super::http_connection`]) | 1,000 (`limits.max_streams`); 250 without an identity | | |
//! | request heads ([`jackstay_core::request::hygiene`]) | 64 KiB (`limits.max_header_bytes`) | | |
//! | memory ([`client_memory`], [`flow_memory`], [`tunnel_memory`], [`socket_memory`]) | one account (`memory_limit`), of which a rank has a part ([`jackstay_core::admission::MemoryBudget`]) | as much as it leaves free | idle connections, stalled readers and long-running requests, lower ranks first |
//! | closed connections that wait for their clients ([`super::lingering`]) | 1,024 of the process, and an eighth of the descriptors; 1 s, and 30 s with bytes that the client has not acknowledged | the source with the most loses its oldest | that one is reset; a connection to which nothing was sent does not wait |
//! | responses that are not read ([`super::body_progress`]) | 5 min (`limits.stall_timeout`) | | |
//! | frames ([`jackstay_net::frame_limiter`]) | budgets by kind | | |
//!
//! A flow ([`super::passthrough`]) is bounded in the same way in both modes. Its slot is taken until it ends, as by a
//! request in progress, and only its source's share limits how many it takes. It never has a slot of the reserve, so
//! identities connect however many flows there are, of however many sources. Its memory, including the `ClientHello`
//! while it connects, is that of an unproven client. In mode `terminate` its `ClientHello` is read in the turn of a
//! handshake.
//!
//! A client that jackstay refuses, or whose connection it closes, gets the answer of this table, which is that of
//! [`jackstay_core::admission::Refusal`]. [`listener_admission::ListenerAdmission::count`] counts it.
//!
//! | refusal | configuration keys | reason | metric, label | answer |
//! |---|---|---|---|---|
//! | `SlotsFull` | `limits.max_connections` | `connection refused: in use are all of` | `jackstay_downstream_refused_total`, `cap` | `Close` |
//! | `SourceShare` | `limits.max_connections`, `limits.source_prefix_v6` | `connection refused: its source uses its share of` | `jackstay_downstream_refused_total`, `source` | `Close` |
//! | `NotProven` | `limits.max_connections` | `connection closed: it proved no identity` | `jackstay_downstream_refused_total`, `source` | `Close` |
//! | `Evicted` | `limits.max_connections` | `idle connection closed for a new one: few of` | `jackstay_downstream_refused_total`, `evicted` | `GoAway` |
//! | `Descriptors` | fixed | `connection refused because it cannot be accepted` | `jackstay_downstream_refused_total`, `descriptors` | `Reset` |
//! | `Handshake` | fixed | `TLS handshake failed` | `jackstay_downstream_refused_total`, `handshake` | `Close` |
//! | `HandshakeTimeout` | `limits.handshake_timeout` | `TLS handshake timed out` | `jackstay_downstream_refused_total`, `timeout` | `Close` |
//! | `NoRequest` | `limits.header_timeout` | `no request received` | `jackstay_downstream_refused_total`, `timeout` | `GoAway` |
//! | `Frames` | fixed | `its client exceeded a limit of frames` | `jackstay_downstream_frame_limit_total`, `frame` | `EnhanceYourCalm` |
//! | `ConnectionMemory` | `memory_limit` | `connection refused for lack of memory (memory_limit, jackstay_memory_budget_bytes)` | `jackstay_shed_total`, `connection_refused` | `Close` |
//! | `RequestMemory` | `memory_limit` | `memory for clients is short: see memory_limit and jackstay_memory_budget_bytes` | `jackstay_shed_total`, `stream_refused` | `RefusedStream` |
//! | `IdleConnection` | `memory_limit` | `idle, and memory is short` | `jackstay_shed_total`, `idle_connection` | `GoAway` |
//! | `StalledReader` | `memory_limit` | `the client takes no bytes, and memory is short (memory_limit)` | `jackstay_shed_total`, `stalled_reader` | `ResetStream` |
//! | `LongRunning` | `memory_limit` | `closed for lack of memory` | `jackstay_shed_total`, `long_running` | `Close` |
//! | `Lingering` | fixed | `closed connection reset before its client has closed it: too many wait for that` | `jackstay_shed_total`, `lingering` | `Reset` |
//! | `UnprovenRequests` | fixed | `too many requests with unproven tokens of this client's user or address wait` | `jackstay_shed_total`, `queue_full` | `Status(429)` |
//! | `UnprovenUpgrades` | fixed | `too many upgrades without a proven token of this client's user or address wait` | `jackstay_shed_total`, `queue_full` | `Status(429)` |
//! | `CertificateQueue` | fixed | `the client certificate chain is not verified yet: too many others wait for that` | `jackstay_client_verifications_total`, `busy` | `Status(429)` |
//! | `HeadSize` | `limits.max_header_bytes` | `the request's headers are larger than` | `jackstay_own_errors_total`, `header_too_large` | `Status(431)` |
//! | `Streams` | `limits.max_streams` | `too many streams` | none | `RefusedStream` |
//! | `StalledStream` | `limits.stall_timeout` | `the client takes no bytes` | `jackstay_responses_cut_total`, `client` | `ResetStream` |
//! | `UpstreamStreams` | `connections.max`, `connections.max_streams` | `every stream to the apiservers is taken: see connections.max and connections.max_streams` | `jackstay_own_errors_total`, `limit` | `Status(429)` |
//!
//! [`listener_admission::ListenerAdmission`] admits the connections of a listener. Slots are counted for each listener
//! on each worker, handshakes for each worker, turns of requests for each worker and upstream. The account of memory is
//! one for the process, which the application creates.

pub(super) mod client_memory;
pub(super) mod connection_slots;
pub(super) mod flow_memory;
pub(super) mod handshake_memory;
pub mod handshake_queue;
pub(super) mod head_memory;
pub mod listener_admission;
pub mod proven_tokens;
pub(super) mod request_windows;
pub(super) mod response_reserve;
pub mod socket_memory;
pub(super) mod tunnel_memory;
pub(super) mod unproven_requests;

#[cfg(test)]
mod tests;
