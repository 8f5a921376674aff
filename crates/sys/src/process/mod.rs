//! The process: descriptors that it inherits or passes on, its service manager, limits, memory.
//!
//! * [`inherited_sockets`] are open when the process starts; [`descriptor_passing`] sends open
//!   descriptors to another process.
//! * [`service_manager`] reports readiness and liveness to systemd.
//! * [`resource_limits`] raises the descriptor limit and keeps a reserve.
//! * [`sandbox`] restricts what the process may do.
//! * [`allocator`] is mimalloc; [`code_pages`] releases code that is not in use; [`memory_limit`] is that of the
//!   cgroup.

pub mod allocator;
pub mod code_pages;
pub mod descriptor_passing;
pub mod inherited_sockets;
pub mod memory_limit;
pub mod resource_limits;
pub mod sandbox;
pub mod service_manager;
