//! Watches that survive the loss of their apiserver.
//!
//! The client sees one stream: whole frames, each event once, in the order of their resource versions. If
//! that cannot be kept up, the stream ends in a way after which clients start again.
//!
//! | file | what it does | depends on |
//! |---|---|---|
//! | [`codec`] | splits and parses the wire format | nothing of the proxy |
//! | [`request`] | decides which requests are followed, and rewrites them | codec |
//! | [`session`] | the state machine: pure, no I/O, no clock | codec, request |
//! | [`relay`] | passes chunks through codec and session | codec, session |
//! | [`body`] | executes the effects: streams, attempts, holds in an outage, timers | all of them |
//! | [`limits`] | the limits that the watches of a worker to an upstream share | |

pub(super) mod body;
pub mod codec;
pub(super) mod limits;
pub(super) mod relay;
pub mod request;
pub(super) mod session;

pub use self::session::Round;

#[cfg(test)]
mod tests;
