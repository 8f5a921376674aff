//! Watches that outlive their apiserver: the pure half, without I/O and without a clock.
//!
//! The path of a watch, in the order in which it happens:
//!
//! 1. [`request`] says whether a request is a watch we can keep alive, and what to ask upstream.
//! 2. [`codec::frame`] cuts the answer into whole frames, without copying them; what it must hold back of
//!    those that are not whole has a bound ([`limits`]).
//! 3. [`codec::event`] reads of each frame its type and its resourceVersion.
//! 4. [`state`] decides what becomes of the frame, and of the watch when its stream is lost, in the
//!    words of [`verdict`]; [`resume`] judges the answers to the attempts at going on elsewhere,
//!    [`allowance`] bounds them, and [`bookmarks`] sees that those come which used to.
//! 5. [`relay`] ties 2 to 4 together for the body that streams to the client.
//!
//! What a client sees is one stream: whole frames, each event once, in the order of their
//! resourceVersions, or an end that makes it start over where starting over is the only honest way.

pub mod allowance;
pub mod attempt;
pub mod bookmarks;
pub mod codec;
pub mod limits;
pub mod outage;
pub mod relay;
pub mod request;
pub mod resume;
pub mod state;
pub mod verdict;

#[cfg(test)]
mod tests;
