//! Names, TLS and HTTP/2 below the requests.
//!
//! * [`dns`]: lookups of host names.
//! * [`tls`]: certificates and keys from PEM files, the TLS configuration of listeners, verification.
//! * [`frame_limiter`]: limits of the number of frames of each type.
//! * [`loaded_files`]: the certificates, CA bundles and tokens of one configuration, each read once.

pub mod dns;
pub mod frame_limiter;
pub mod loaded_files;
pub mod tls;
