//! The decisions of jackstay.
//!
//! Nothing here does I/O, reads a clock or starts a thread: what happened, the time, a random number
//! generator and answers to questions ([`request::attempts::Facts`]) come in as arguments, and what to do goes out. The
//! shell executes it.
//!
//! * [`request`]: what a request asks for, whether its head is acceptable, and whether it may be sent again.
//! * [`reads`]: how the reads of a client do not go back in time.
//! * [`watch`]: how a watch continues on another apiserver without losing or repeating an event.
//! * [`connection`] and [`endpoint_health`] for L7, [`flow_health`] for L4: what is dead, from the
//!   evidence of PINGs and of the kernel ([`tcp_info`]).
//! * [`discovery`]: which endpoints there are; [`probe`]: when `/readyz` is asked, and what a result means.
//! * [`pool`]: which stream a request gets, and which connections of a [`credential_class`] are opened and drained.
//! * [`placement`]: which watches move to another apiserver.
//! * [`balance`], [`connect`], [`outage`]: which connection or endpoint is picked, and when one is tried again.
//! * [`endpoint_condition`]: whether another endpoint is better than that of a request.
//! * [`backoff`]: the pauses after failures in a row.
//! * [`restore`] and [`shared_etcd`]: whether etcd was restored from a backup, and which resources are stored in it.
//! * [`lag`], [`kubernetes_version`] and [`kubernetes_features`]: how apiservers of one cluster differ.
//! * [`line_pacing`]: how much a transfer may have in flight on a slow line;
//!   [`receive_windows`]: how much a stream may send ahead; [`http2_frames`]: frame headers in a byte stream;
//!   [`frame_budgets`]: how many of each type a peer may send; [`header_table`]: what its header blocks leave behind;
//!   [`tls_records`]: where TLS records end.
//! * [`canary`]: when an apiserver of a newer version gets no share of the requests.
//! * [`fault_lines`] and [`error_report`]: which faults the log reports, and as how many lines; [`open_streams`] and
//!   [`quantity`]: their figures.
//! * [`admission`]: what clients may take.
//! * [`drain`]: when listeners, their connections and their watches end.
//! * [`takeover`]: how a new process takes the place of a running one.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::disallowed_methods, clippy::too_many_lines))]

pub mod admission;
pub mod backends;
pub mod backoff;
pub mod balance;
pub mod canary;
pub mod connect;
pub mod connection;
pub mod credential_class;
pub mod discovery;
pub mod drain;
pub mod endpoint_condition;
pub mod endpoint_health;
pub mod endpoint_state;
pub mod error_report;
pub mod fault_lines;
pub mod flow_health;
pub mod frame_budgets;
pub mod group_health;
pub mod header_table;
pub mod http2_frames;
pub mod kubernetes_features;
pub mod kubernetes_version;
pub mod lag;
pub mod line_delay;
pub mod line_pacing;
pub mod open_streams;
pub mod outage;
pub mod placement;
pub mod pool;
pub mod probe;
pub mod quantity;
pub mod reads;
pub mod receive_windows;
pub mod request;
pub mod restore;
mod round_trips;
pub mod shared_etcd;
pub mod takeover;
pub mod tcp_info;
pub mod tls_records;
pub mod unsent_requests;
pub mod watch;
