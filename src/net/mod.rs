//! Sockets and files as the operating system gives them: TCP options and evidence, TLS material.
//!
//! The only module that may use `unsafe`, each block with the reason it is sound.
//!
//! * A connection's options are in [`socket`], its evidence of life in [`tcp_info`] and [`tracked`],
//!   its mark in [`outgoing`]; where it was meant to go, in [`intercepted`].
//! * Bytes are read in large pieces ([`read_ahead`]), written in large pieces ([`cork`]), moved inside
//!   the kernel ([`splice`]), read again ([`rewound`]); the last of them arrive ([`linger`]).
//! * Unix sockets on the file system are private and replaced whole ([`unix_socket`]).
//! * TLS: [`tls_files`], [`serving`], [`client_chain`], [`local_ca`], and [`anyone`] where no certificate
//!   can be verified.
//! * Files are read within bounds ([`bounded_file`]) and written whole ([`whole_file`]).
//! * The process: [`inherited`] sockets, [`descriptors`] that change hands, [`notify`] for the service
//!   manager, the addresses of the host ([`interfaces`]), [`shortage`] of descriptors, memory
//!   ([`allocator`], [`footprint`]).

pub mod allocator;
pub mod anyone;
pub mod bounded_file;
pub mod client_chain;
pub mod cork;
pub mod descriptors;
pub mod footprint;
pub mod heard_out;
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
pub mod token_file;
pub mod tracked;
pub mod unix_socket;
pub mod whole_file;
