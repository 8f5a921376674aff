//! A small Kubernetes control plane in one process, for the demo, the tests and the benches.
//!
//! * [`apiserver`] serves a shared store over TLS, HTTP/2 and HTTP/1.1. A test can kill, freeze, slow
//!   down or fail each server.
//! * [`faulty_relay`] relays TCP. It can drop the packets of established flows while new flows work.
//! * [`client`] is a plain client: one connection, requests, watches.
//! * [`pki`] issues certificates; [`seed`] fills the store.
//! * [`scenario`] is the program of `jackstay demo`: clients, faults, verdict, display.
//!
//! [`scenario`] observes the proxy from outside, through its listener and its admin endpoint. Of the
//! proxy's code this module uses only helpers for sockets, TLS and text in `net` and `observe`.

pub mod apiserver;
pub mod client;
pub mod faulty_relay;
pub mod pki;
pub mod scenario;
pub mod seed;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex, also after a panic of another thread, which that thread has printed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
