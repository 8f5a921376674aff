//! TCP and Unix sockets, and the stream adapters between a socket and TLS or HTTP/2.
//!
//! * [`listening`] opens listening sockets, [`connector`] opens upstream connections,
//!   [`tcp_options`] sets the options of both; [`unix_listener`] is for the admin and takeover sockets.
//! * [`interception`] reads the original destination of a redirected connection; [`interfaces`] lists
//!   the addresses of this host.
//! * [`tcp_info`] is the kernel's evidence about a connection; [`tracked_stream`] makes it readable
//!   while TLS owns the stream.
//! * [`read_ahead`] and [`cork`] batch reads and writes; [`splice`] moves bytes inside the kernel.
//! * [`prefixed_stream`], [`drain_reads`] and [`linger`] handle the begin and the end of a stream.

pub mod connector;
pub mod cork;
pub mod drain_reads;
pub mod interception;
pub mod interfaces;
pub mod linger;
pub mod listening;
pub mod prefixed_stream;
pub mod read_ahead;
pub mod splice;
pub mod tcp_info;
pub mod tcp_options;
pub mod tracked_stream;
pub mod unix_listener;
