//! Sockets, TLS, files and the process: what jackstay needs of the operating system.
//!
//! Only this module may use `unsafe`; a comment at each block says why it is sound.
//!
//! * [`sockets`]: listening and connecting, TCP options and `TCP_INFO`, stream adapters.
//! * [`tls`]: certificates and keys from PEM files, the TLS configuration of listeners, verification.
//! * [`http2_frames`]: frame headers in a byte stream; [`frame_limiter`]: limits of their number.
//! * [`clock`]: the time, which tests can pause.
//! * [`files`]: bounded reads, atomic replacement, bearer tokens.
//! * [`process`]: inherited descriptors, the service manager, resource limits, memory.

pub mod clock;
pub mod files;
pub mod frame_limiter;
pub mod http2_frames;
pub mod process;
pub mod sockets;
pub mod tls;
