//! The connections of one worker to the endpoints of one upstream: which stream a request gets, and which
//! connections are opened, drained and closed.
//!
//! A pool has a [`Class`] of connections for each [`CredentialClass`](crate::credential_class::CredentialClass), whose
//! requests share connections, and another one for the heartbeats of a class whose clients have proven who they are
//! ([`Lane`]). The caller owns the connections. It describes them in tables of plain rows, asks what
//! to do, and does it:
//!
//! | question | answered by | result |
//! |---|---|---|
//! | a request asks for a stream | [`Class::request`] | refuse it, [`select()`] a connection, or wait |
//! | none of the connections can take it | [`Class::begin_wait`] | refuse it, or its place in the queue |
//! | something changed, or it is time | [`Class::hand_over`] | the connections that join the class of proven tokens |
//! | then | [`Class::plan`] | [`ClassEffect`]s on connections and endpoints |
//! | then, for each request that waits | [`Class::next_answer`] | a connection, a [`StreamRefusal`], or a time to ask again |
//! | nothing will happen any more | [`PoolState::stop`], [`Class::refuse_next`] | every request that waits is refused |
//!
//! # Requests that wait
//!
//! Heartbeats are considered first, then all others, in the order in which they came. The first row that applies decides:
//!
//! | condition | decision |
//! |---|---|
//! | a watch that its caller holds, in a total outage | refused |
//! | [`select()`] finds a live connection to an endpoint that is not ready, within [`READY_AFTER`], and one to a ready endpoint [may follow](Class::awaits_ready) | it waits |
//! | [`select()`] finds any other live connection | granted |
//! | a connect to every endpoint has failed since the request has no connection, or its deadline is over; a suspect connection is found, and the request does not exclude those | granted |
//! | the same, but none is found | refused: exhausted with a live connection, otherwise unreachable |
//! | a live connection exists, but none has a free stream | it waits until its deadline, and so do all behind it, unless it is a heartbeat |
//! | otherwise | it waits until its deadline |
//!
//! The deadline is [`EXHAUSTED_AFTER`] after the start of the wait while a connection is live, otherwise
//! [`UNAVAILABLE_AFTER`] after the request had none.
//!
//! # Connections
//!
//! The first row that applies decides. A class is *warm* if its connections are kept while no request uses them.
//!
//! | condition | effect |
//! |---|---|
//! | the credential of the class is not loaded | drain |
//! | an older credential, while a [replacement](Class::plan) is live | drain |
//! | the same, with no stream in a class that is not in use | drain |
//! | its endpoint was removed from the set, while a replacement is live or has been missing for 5 s | drain |
//! | its endpoint is degraded, or its probe fails | its requests are notified, which may start second attempts |
//! | no stream for [`IDLE_CLASS`], not warm | drain |
//! | no stream for 10 s after 64 at once, not warm, another one is live | drain |
//!
//! Connections are opened to the [`targets`] of a class that is warm or [in use](Class::plan): as many as are missing
//! from the minimum, before the last streams are taken, for the requests that wait, and one besides those that such a
//! request [excludes](StreamRequirements::excluded_connections); up to the limits of the class,
//! at the pace of a class of clients that have proven nothing, with pauses after [a refused
//! credential](Class::credential_refused), and as far as `claim` permits.

mod class;
mod dials;
mod endpoints;
mod lane;
pub mod limits;
#[cfg(test)]
mod properties;
mod select;
mod state;
#[cfg(test)]
mod tests;
mod waiters;
mod waiting;

pub use self::class::{
    Arrival, Class, ClassEffect, ConnectionRow, IDLE_CLASS, Round, SLOW_HEAD_INTERVAL, Surroundings,
};
pub use self::endpoints::{EndpointRow, FANOUT, VersionSide, targets};
pub use self::lane::Lane;
pub use self::select::{
    Candidate, ConnectionKey, EndpointKey, Preference, PreviousFailure, RECENT_RECEIVE_WINDOW,
    Scope, StreamRequirements, WATCH_SHARE, has_live, is_nearly_full, only_suspect_to, select,
};
pub use self::state::{PoolState, Purpose, WarmClasses};
pub use self::waiting::{
    EXHAUSTED_AFTER, READY_AFTER, Situation, StreamRefusal, UNAVAILABLE_AFTER,
};
