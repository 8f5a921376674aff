//! Heartbeats beside all other requests.

/// Which requests of a credential class share connections.
///
/// On a slow line, a heartbeat would wait behind the bulk of the other requests: behind what the apiserver's kernel keeps of
/// a large response, and behind a large body in our own queue. So heartbeats have a connection of their own, to one
/// endpoint, from the first one on. Until it is open, and after a failure there, they use those of the other requests.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Lane {
    #[default]
    /// All of them; heartbeats, too, while theirs has no connection.
    Requests,
    /// Heartbeats.
    Heartbeats,
}
