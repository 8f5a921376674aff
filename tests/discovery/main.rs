//! Endpoints that come, go and lie: what the set becomes, and that traffic never notices.

#![cfg(feature = "demo")]

#[path = "../reload/scene.rs"]
mod scene;
#[path = "../support/mod.rs"]
mod support;

mod bootstrap;
mod file;
mod members;
mod namespace;
mod probing;
mod slices;
mod stress;
mod traffic;
