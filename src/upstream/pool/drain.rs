//! Which connections of a class are drained although nothing is wrong with them.

use std::rc::Rc;
use std::time::{Duration, Instant};

use crate::upstream::connection::{Connection, DrainReason};

/// A class other than a configured identity keeps its connections for this long after its last use.
pub(super) const IDLE_CLASS: Duration = Duration::from_secs(300);
/// Such a class replaces a connection that is idle for this long after it carried [`BURST`] streams at once. h2
/// keeps the memory for the largest number of streams until a connection closes.
const IDLE_AFTER_BURST: Duration = Duration::from_secs(10);
const BURST: usize = 64;
/// Time after which a connection that drains may be closed for a new one, if the limit requires it.
const DRAINING_TIME: Duration = Duration::from_secs(10);

/// Whether the connection has had no stream for [`IDLE_CLASS`].
pub(super) fn is_idle(connection: &Connection, now: Instant) -> bool {
    idle_for(connection, IDLE_CLASS, now)
}

/// Whether the connection carried many streams and has had none since. It is replaced, and stays in use until its
/// replacement is live.
pub(super) fn is_idle_after_burst(connection: &Connection, now: Instant) -> bool {
    connection.peak_streams() >= BURST && idle_for(connection, IDLE_AFTER_BURST, now)
}

fn idle_for(connection: &Connection, limit: Duration, now: Instant) -> bool {
    connection.idle_since().is_some_and(|since| now >= since + limit)
}

/// Moves the watches off the connections that drain, and closes the one that has been draining for longest if it
/// has had [`DRAINING_TIME`]. Otherwise clients with responses that do not end could use up the limit for all.
pub(super) fn make_room<'a>(connections: impl Iterator<Item = &'a Rc<Connection>>, now: Instant) {
    let draining: Vec<_> = connections
        .filter_map(|connection| Some((connection.draining_since()?, connection)))
        .inspect(|(_, connection)| connection.drain(DrainReason::ConnectionLimit))
        .collect();
    if let Some((since, oldest)) = draining.iter().min_by_key(|(since, _)| *since)
        && now >= *since + DRAINING_TIME
    {
        oldest.close(DrainReason::ConnectionLimit);
    }
}
