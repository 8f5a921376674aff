//! Clients that speak HTTP/2 over TLS on the sockets of a simulated network, and behave as client-go.
//!
//! Each client is a future for a `LocalSet`: it runs until its [`Stop`], records what it sees with its [`Observer`],
//! and then counts what is still open. [`crate::checker`] compares the record with the history of the store.
//!
//! * `connection`, [`transport`]: Go's HTTP/2 client, and requests above it.
//! * [`objects`]: what the clients read and write.
//! * [`informer`], [`reader`], [`writer`], [`lease`], [`bulk`]: what they want.
//! * [`hostile`]: clients that load a server on purpose.

pub mod bulk;
mod connection;
mod gzip;
pub mod hostile;
pub mod informer;
pub mod lease;
pub mod objects;
mod observer;
mod peer;
pub mod reader;
pub mod transport;
pub mod upload;
pub mod writer;

#[cfg(test)]
mod tests;

pub use observer::{Observer, Record, Stop, Stopper, stop_signal};
pub use peer::Peer;
