//! The connections of a network by number. Those that a coarse network has forgotten take no memory.

use std::ops::{Index, IndexMut};

use super::ConnectionId;
use super::tcp::Connection;

/// The connections.
#[derive(Debug)]
pub(super) struct Connections<P>(Vec<Option<Box<Connection<P>>>>);

impl<P> Default for Connections<P> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<P> Connections<P> {
    /// Adds a connection. Returns its number.
    pub(super) fn push(&mut self, connection: Connection<P>) -> ConnectionId {
        self.0.push(Some(Box::new(connection)));
        (self.0.len() - 1) as ConnectionId
    }

    /// Whether a connection is not forgotten.
    pub(super) fn contains(&self, id: ConnectionId) -> bool {
        self.0.get(id as usize).is_some_and(Option::is_some)
    }

    /// Forgets a connection.
    pub(super) fn remove(&mut self, id: ConnectionId) {
        self.0[id as usize] = None;
    }

    /// The numbers of all connections, also of those that are forgotten.
    pub(super) fn ids(&self) -> std::ops::Range<ConnectionId> {
        0..self.0.len() as ConnectionId
    }

    /// All connections.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Connection<P>> {
        self.0.iter_mut().filter_map(|connection| connection.as_deref_mut())
    }
}

impl<P> Index<ConnectionId> for Connections<P> {
    type Output = Connection<P>;

    fn index(&self, id: ConnectionId) -> &Connection<P> {
        self.0[id as usize].as_deref().expect("the connection is not forgotten")
    }
}

impl<P> IndexMut<ConnectionId> for Connections<P> {
    fn index_mut(&mut self, id: ConnectionId) -> &mut Connection<P> {
        self.0[id as usize].as_deref_mut().expect("the connection is not forgotten")
    }
}
