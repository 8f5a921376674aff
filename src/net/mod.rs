//! The operating system as jackstay uses it: sockets, TLS material, files and the process.
//!
//! This is the only module that may use `unsafe`; each block states why it is sound.
//!
//! * [`sockets`]: listening and connecting, TCP options and `TCP_INFO`, stream adapters.
//! * [`tls`]: certificates and keys from PEM files, the serving side of a listener, verification.
//! * [`files`]: bounded reads, replacement in one step, bearer tokens.
//! * [`process`]: inherited descriptors, the service manager, resource limits, memory.

pub mod files;
pub mod process;
pub mod sockets;
pub mod tls;
