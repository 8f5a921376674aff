//! L4: forwards connections byte for byte. TLS stays between the client and the apiserver, so no
//! certificate is needed and every client works.
//!
//! A flow is a client connection with its connection to an endpoint. In the order in which it
//! happens:
//!
//! 1. [`forwarder`] accepts the connection and runs its flow.
//! 2. [`routing`] chooses the upstream: by original destination ([`transparent`]), by server name
//!    ([`client_hello`]), or the listener's own.
//! 3. [`connect`] connects to the best endpoint, racing a second one if the first does not answer.
//! 4. [`pump`] moves the bytes both ways.
//! 5. [`flow_table`] checks all flows of a worker in one task ([`flow_entry`]) and ends those that
//!    are dead or due; [`rebalance`] ends some slowly after an endpoint has recovered.
//! 6. The flow is counted once, with an [`end_reason`] or with `done`.
//!
//! A failure of one side is passed on unchanged: a reset as a reset, an end of stream as an end of
//! that direction. A flow that jackstay itself ends is reset, since clients reconnect at once after
//! a reset and wait after silence.

pub mod client_hello;
pub mod connect;
pub mod end_reason;
pub mod flow_entry;
pub mod flow_table;
pub mod forwarder;
pub mod pump;
pub mod rebalance;
pub mod routing;
pub mod transparent;
