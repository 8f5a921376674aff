//! The program as it ships on virtual time: its L7 data plane and its probers, the small apiservers and real HTTP/2
//! clients run unchanged on the sockets of a simulated network, in one thread, as a function of a seed.
//!
//! * [`kernel`]: random numbers and clocks of the process.
//! * [`runtime`]: tokio's clock, which goes on with the network.
//! * [`panics`]: panics of tasks, which tokio catches.
//! * [`process`]: what SIGSTOP and SIGKILL act on.
//! * [`program`], [`servers`], [`crate::peers`]: jackstay, the apiservers, and the clients.
//! * [`certificates`], [`store`]: what they prove to each other, and what they read and write.
//!
//! [`run()`] and [`run_fleet`] run a scenario ([`crate::scenario::Sim`]) with them, and
//! [`crate::scripts::script::run`] a script.

pub mod certificates;
mod group_traffic;
pub mod kernel;
pub mod panics;
pub mod process;
pub mod program;
pub mod runtime;
pub mod servers;
pub mod store;
mod traffic;

pub(crate) mod run;

pub use self::run::outcome::ShellRun;
pub use self::run::{FleetRun, run, run_fleet};
