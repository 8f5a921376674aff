//! Tests that count the allocations and descriptors of their process, or compare durations of requests. Their binary has
//! a global allocator that counts, and one of them runs at a time, so that no other test changes the figures.

#![cfg(feature = "demo")]

#[path = "../support/mod.rs"]
mod support;

mod allocator;
mod reloads;
mod stalled;

use tokio::sync::{Mutex, MutexGuard};

/// Waits until no other test of this binary runs. The others wait until the result is dropped.
async fn alone() -> MutexGuard<'static, ()> {
    static RUNNING: Mutex<()> = Mutex::const_new(());
    RUNNING.lock().await
}
