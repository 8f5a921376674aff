//! What jackstay needs of the operating system. The only crate with `unsafe`; a comment at each block says why it is
//! sound.
//!
//! * [`sockets`]: listening and connecting, TCP options and `TCP_INFO`, stream adapters.
//! * [`process`]: inherited descriptors, the service manager, resource limits, memory, the sandbox.
//! * [`files`]: bounded reads, atomic replacement, bearer tokens.
//! * [`clock`]: the time, which tests can pause; [`utc`]: dates.
//! * [`simulation`]: what replaces the operating system in a simulated run.

#![cfg_attr(not(test), warn(clippy::disallowed_methods, clippy::too_many_lines))]

pub mod clock;
pub mod files;
pub mod process;
pub mod simulation;
pub mod sockets;
pub mod utc;
