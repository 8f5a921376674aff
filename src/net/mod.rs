//! TLS and HTTP/2 below the requests.
//!
//! * [`tls`]: certificates and keys from PEM files, the TLS configuration of listeners, verification.
//! * [`frame_limiter`]: limits of the number of frames of each type.

pub mod frame_limiter;
pub mod tls;
