//! Decides which endpoints an upstream has, and keeps that decision up to date.

use std::sync::Arc;

use super::members::{Members, seeds};
use crate::upstream::pool::Upstream;

/// Keeps the endpoints of an upstream as its sources say, for ever. A change of its configuration
/// ([`Upstream::reconfigure`]) is a change of a source like any other.
pub async fn keep(upstream: Arc<Upstream>) {
    let members = Members::new(Arc::clone(&upstream));
    loop {
        upstream.reconfigured.notified().await;
        members.apply(&seeds(&upstream.config()));
    }
}

/// An upstream that is no longer configured: all its endpoints leave, and their connections drain.
pub fn retire(upstream: &Upstream) {
    super::members::place(upstream, &[]);
}
