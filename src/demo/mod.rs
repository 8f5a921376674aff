//! The program of `jackstay demo`: clients, faults, verdict, display.
//!
//! It starts the apiservers of `jackstay_apiserver` with jackstay in front of them, and observes jackstay from
//! outside, through its listener and its admin endpoint.

pub mod scenario;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex, also after a panic of another thread, which that thread has printed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
