//! Sockets and files as the operating system gives them: TCP options and evidence, TLS material.
//!
//! The only module that may use `unsafe`, each block with the reason it is sound.

pub mod allocator;
pub mod anyone;
pub mod bounded_file;
pub mod cork;
pub mod descriptors;
pub mod footprint;
pub mod inherited;
pub mod intercepted;
pub mod interfaces;
pub mod linger;
pub mod local_ca;
pub mod notify;
pub mod outgoing;
pub mod read_ahead;
pub mod rewound;
pub mod serving;
pub mod shortage;
pub mod socket;
pub mod splice;
pub mod tcp_info;
pub mod tls_files;
pub mod tracked;
pub mod whole_file;
