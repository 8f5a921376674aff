//! Resumes watches that lose their apiserver.
//!
//! The client receives one response with whole frames and each event once. After the initial events,
//! events arrive in the order of their resource versions. If jackstay cannot keep that up, it ends or
//! resets the response, so that the client lists or watches again ([`session`] has the table).
//!
//! | module | purpose | uses of this folder |
//! |---|---|---|
//! | [`codec`] | splits and parses the wire format | none |
//! | [`request`] | decides which requests are followed, and rewrites them | codec |
//! | [`session`] | the state machine: no I/O, the time is an argument | codec, request |
//! | [`relay`] | passes chunks through codec and session | codec, request, session |
//! | [`body`] | executes the effects: streams, attempts, holds in an outage, timers | all |
//! | [`limits`] | the limits that all watches of one worker to one upstream share | none |

pub(super) mod body;
pub mod codec;
pub(super) mod limits;
pub(super) mod relay;
pub mod request;
pub(super) mod session;

pub use self::session::ResumeRound;

#[cfg(test)]
mod tests;
