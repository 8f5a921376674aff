//! The connections of a network by number. Those that are forgotten take no memory.

use std::ops::{Index, IndexMut};

use super::ids::ConnectionId;
use super::tcp::Connection;

/// The connections.
#[derive(Debug, Default)]
pub(super) struct Connections(Vec<Option<Box<Connection>>>);

impl Connections {
    /// Adds a connection. Returns its number.
    pub(super) fn push(&mut self, connection: Connection) -> ConnectionId {
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
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Connection> {
        self.0.iter_mut().filter_map(|connection| connection.as_deref_mut())
    }
}

impl Index<ConnectionId> for Connections {
    type Output = Connection;

    fn index(&self, id: ConnectionId) -> &Connection {
        self.0[id as usize].as_deref().expect("the connection is not forgotten")
    }
}

impl IndexMut<ConnectionId> for Connections {
    fn index_mut(&mut self, id: ConnectionId) -> &mut Connection {
        self.0[id as usize].as_deref_mut().expect("the connection is not forgotten")
    }
}
