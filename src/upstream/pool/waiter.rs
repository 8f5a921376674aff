//! What the pool keeps for a request that waits for a stream.

use tokio::sync::oneshot;

use super::requirements::{OwnedPreferences, Unavailable};
use crate::upstream::connection::Permit;

/// The outcome of a wait.
pub type Granted = Result<Permit, Unavailable>;

/// A request that waits for a stream.
pub(super) struct Waiter {
    pub(super) watch: bool,
    pub(super) preferences: OwnedPreferences,
    pub(super) result: oneshot::Sender<Granted>,
}
