//! TLS: certificates, keys and CA bundles, and the verification of clients and servers.
//!
//! * [`pem_files`] loads certificates, keys and CA bundles; [`certificate`] parses one certificate;
//!   [`file_error`] is the error of such a file; [`ca_bundle`] finds the expired certificates of a CA bundle.
//! * [`serving`] holds the TLS configuration of a listener; [`client_chain`] verifies the certificate chains
//!   of its clients.
//! * [`local_ca`] issues and renews the serving certificate of a local listener.
//! * [`session_cache`] stores the sessions that clients of a listener can resume.
//! * [`version_1`] verifies the handshake of a client with an X.509 version 1 certificate; [`tls_error`]
//!   describes TLS errors in sentences.
//! * [`key_log`] writes the secrets of sessions, in builds for packet captures.
//! * [`verification`] verifies the certificates of servers and clients as Go does; [`refusal`] says why one is refused.
//! * [`no_server_verification`] is for probes without a CA to verify the server with.

pub mod ca_bundle;
pub mod certificate;
pub mod client_chain;
pub mod file_error;
pub mod key_log;
pub mod local_ca;
pub mod no_server_verification;
pub mod pem_files;
pub mod refusal;
pub mod serving;
mod session_cache;
pub mod tls_error;
pub mod verification;
mod version_1;
