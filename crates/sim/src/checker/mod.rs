//! Compares what clients have seen with the history of the store.
//!
//! | rule | what it says |
//! |---|---|
//! | events | an informer gets each change after its list once and in order; a bookmark and the start of a watch skip none |
//! | reads | an object or a list is what the store had at the version that it shows |
//! | most recent | a read without `resourceVersion` is at least as new as each version that any client had seen, and each write that was acknowledged, before the read began (Kubernetes documentation, *API concepts*, *resource versions*) |
//! | no read goes back | a read is at least as new as each version of the resource that a client of its group had seen, and each own write that was acknowledged, before the read began |
//! | writes | no write is carried out twice; one that was acknowledged is in the store, one that was refused is not |
//!
//! A read that starts while another one runs may be older: the order of their ends says nothing. A watch from a version
//! on delivers old events as Kubernetes documents it, so events are no reads that could go back; but what they have shown
//! counts for the reads that begin later.

mod events;
mod floors;
mod history;
mod observation;
mod reads;
pub mod traffic;
mod writes;

#[cfg(test)]
mod tests;

pub use history::{Change, ChangeKind, History};
pub use observation::{
    ClientId, Collection, Moment, Observation, Recency, Seen, ShownObject, WriteOutcome,
};

use crate::invariants::Findings;

/// Checks all rules. Adds what informers have received, and what breaks a rule, to the findings.
pub fn check(history: &History, observations: &[Observation], findings: &mut Findings) {
    events::check(history, observations, findings);
    reads::check(history, observations, findings);
    floors::check(history, observations, findings);
    writes::check(history, observations, findings);
}
