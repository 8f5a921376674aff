//! TLS material: certificates, keys and CA bundles, and how clients and servers are verified.
//!
//! * [`pem_files`] loads certificates, keys and CA bundles; [`certificate`] reads one certificate,
//!   [`file_error`] says what is wrong with a file.
//! * [`serving`] is the TLS side of a listener; [`client_chain`] verifies the chains of its clients.
//! * [`local_ca`] issues and renews the serving certificate of a local listener.
//! * [`no_server_verification`] is for probes that have no CA to verify with.

pub mod certificate;
pub mod client_chain;
pub mod file_error;
pub mod local_ca;
pub mod no_server_verification;
pub mod pem_files;
pub mod serving;
