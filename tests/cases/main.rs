//! Files, servers and clients as people have them: inputs that kubectl, kubelet or kube-apiserver accept, and the built
//! binary. `config/compatibility.md` lists them with the decision for each.

#![cfg(feature = "demo")]
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod gateway;
mod hosts;
mod paths;
#[path = "../support/mod.rs"]
mod support;

mod heads;
mod peer;
mod names;
mod pem;
mod table;
mod websocket;
