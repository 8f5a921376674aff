//! Endpoints that come, go and lie: what the set becomes, and that traffic never notices.

#[path = "../support/mod.rs"]
mod support;

mod members;
