//! L4: forwards connections byte for byte. TLS stays between the client and the apiserver, so no
//! certificate is needed and every client works.
//!
//! A flow is a client connection with its connection to an endpoint. In the order in which it
//! happens:
//!
//! 1. [`forwarder`] accepts the connection and runs its flow.
//! 2. [`routing`] chooses the upstream: by original destination, by server name ([`client_hello`]), or
//!    the listener's own.
//! 3. [`connect`] connects to the best endpoint, racing a second one if the first does not answer.
//! 4. [`pump`] moves the bytes both ways.
//! 5. [`flow_table`] checks all flows of a worker in one task and ends those that are dead or due, each
//!    for a reason ([`flow_entry`]).
//! 6. The flow is counted once, with that reason or with `done`.
//!
//! A failure of one side is passed on unchanged: a reset as a reset, an end of stream as an end of
//! that direction. A flow that jackstay itself ends is reset, since clients reconnect at once after
//! a reset and wait after silence.

pub mod client_hello;
mod connect;
pub mod flow_entry;
pub mod flow_table;
pub mod forwarder;
mod pump;
pub mod routing;
