//! The commands of operators: each is a module that returns the exit code.

pub mod check;
#[cfg(feature = "doctor")]
pub mod doctor;
#[cfg(feature = "doctor")]
pub mod install;
pub mod kubeconfig;
pub mod probe;
#[cfg(feature = "doctor")]
pub mod removal;
pub mod status;
