//! Names, TLS and HTTP/2 below the requests.
//!
//! * [`dns`]: lookups of host names.
//! * [`tls`]: certificates and keys from PEM files, the TLS configuration of listeners, verification.
//! * [`frame_limiter`]: limits of the number of frames of each type.
//! * [`loaded_files`]: the certificates, CA bundles and tokens of one configuration, each read once.
//! * [`http2_error`] and [`readyz`]: the texts of h2 errors and of failed health checks.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::too_many_lines))]
#![warn(clippy::disallowed_methods)]

pub mod dns;
pub mod frame_limiter;
pub mod http2_error;
pub mod loaded_files;
pub mod readyz;
pub mod tls;
