//! Tests of the built program: each starts it as a process, as an operator or a service manager does.

#![cfg(feature = "demo")]

#[path = "../support/mod.rs"]
mod support;

mod cases;
mod cli;
mod demo;
#[cfg(feature = "doctor")]
mod doctor;
mod fault_log;
mod hostile;
mod identity_lane;
mod kubeconfig;
mod memory_account;
mod sandbox;
mod secrets;
mod smuggling;
mod takeover;
