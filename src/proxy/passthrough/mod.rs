//! L4: forwards connections byte for byte. TLS is end to end between the client and the apiserver, so
//! jackstay needs no certificate and any client can use it.
//!
//! A flow is a client connection together with its connection to an endpoint. The path of a flow:
//!
//! 1. [`forwarder`] accepts the connection, and [`flow`] runs its flow.
//! 2. [`routing`] chooses the upstream: by original destination, by server name ([`client_hello`]), or
//!    the upstream of the listener.
//! 3. [`connect`] connects to the best endpoint, and tries others as well if that one does not answer.
//! 4. [`pump`] copies the bytes in both directions. [`super::admission::flow_memory`] charges what it holds.
//! 5. [`flow_table`] checks all flows of a worker in one task, and ends flows that are dead, must leave their
//!    endpoint or exceed a timeout ([`flow_entry`] has the reasons).
//! 6. [`flow`] counts the flow once, with the reason for its end, or with `done`.
//!
//! A failure of one side is passed on unchanged: a reset as a reset, an end of stream as an end of that
//! direction. jackstay ends a flow with a reset, because a client reconnects at once after a reset and waits
//! for a long time if the connection is silent.

pub mod client_hello;
mod connect;
pub mod flow;
pub mod flow_entry;
pub mod flow_table;
pub mod forwarder;
mod pump;
pub mod routing;
