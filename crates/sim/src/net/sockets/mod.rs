//! Byte sockets on the simulated network: what `jackstay_sys::sockets::virtual_network` asks of one.
//!
//! The TCP of [`super`] carries the bytes. Processes write to a bounded send queue and read what has arrived, as from
//! Linux; the kernel of a process goes on while the process is stopped. The present of an operation is the clock of
//! tokio (`jackstay_sys::clock`), so sockets are used within the runtime of the run. The events of the network are
//! handled by [`SocketNetwork::run_until`], which the executor of the run calls.

mod connector;
mod listener;
mod network;
mod options;
mod socket_io;
mod state;
mod stream;
#[cfg(test)]
mod tests;

pub use self::network::SocketNetwork;
pub use self::state::Connect;
