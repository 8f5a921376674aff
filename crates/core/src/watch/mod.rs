//! Resumes watches that lose their apiserver.
//!
//! The client receives one response that consists of whole frames and contains each event once. After
//! the initial events, events arrive in the order of their resource versions. If jackstay can no longer
//! guarantee that, it ends or resets the response, and the client watches or lists again ([`session`]
//! documents each case).
//!
//! | module | purpose | depends on |
//! |---|---|---|
//! | [`codec`] | splits and parses the wire format | – |
//! | [`gzip`] | decodes compressed responses, piece by piece | – |
//! | [`pace`] | whether a watch is quiet or has fallen silent | – |
//! | [`parameters`] | which apiservers honour the parameters of a watch, and may continue it | – |
//! | [`request`] | decides which watches can be parsed and resumed, and rewrites their requests | codec |
//! | [`session`] | state machine of one watch, without I/O; the time is an argument | codec, request |
//! | [`shadow`] | decides on the frames of a watch with two streams | codec, session |
//! | [`relay`] | passes received chunks through codec and session | codec, request, session, shadow |

pub mod codec;
pub mod gzip;
pub mod pace;
pub mod parameters;
pub mod relay;
pub mod request;
pub mod session;
pub mod shadow;

pub use self::session::ResumeRound;

#[cfg(test)]
mod tests;
