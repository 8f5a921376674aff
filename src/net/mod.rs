//! TLS and HTTP/2 below the requests.
//!
//! * [`tls`]: certificates and keys from PEM files, the TLS configuration of listeners, verification.
//! * [`http2_frames`]: frame headers in a byte stream; [`frame_limiter`]: limits of their number.

pub mod frame_limiter;
pub mod http2_frames;
pub mod tls;
