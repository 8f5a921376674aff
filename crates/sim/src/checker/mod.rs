//! Compares what clients have seen with the history of the store.
//!
//! | rule | what it says |
//! |---|---|
//! | events | an informer gets each change after its list once and in order; a bookmark and the start of a watch skip none |
//! | reads | an object or a list is what the store had at the version that it shows |
//! | most recent | a read without `resourceVersion` is at least as new as each version that any client had seen, and each write that was acknowledged, before the read began (Kubernetes documentation, *API concepts*, *resource versions*) |
//! | versions | a read that names a version is of exactly that, or at least as new |
//! | no read goes back | a read of any version is at least as new as each version of the resource that a client of its group had seen, and each own write that was acknowledged, before the read began |
//! | restores | an informer with a version that a restore of the store has lost lists again before it gets an event |
//! | writes | no write is carried out twice; one that was acknowledged is in the store, one that was refused is not |
//!
//! Each restore of the store begins an *epoch*. What was seen before it is no floor of later reads.
//!
//! A read that starts while another one runs may be older: the order of their ends says nothing. A watch from a version
//! on delivers old events as Kubernetes documents it, so events are no reads that could go back; but what they have
//! shown counts for the reads that begin later.

mod events;
mod floors;
pub mod groups;
mod history;
mod observation;
mod reads;
pub mod traffic;
mod writes;

#[cfg(test)]
mod tests;

pub use history::{Change, History, Restore};
pub use observation::{
    ChangeKind, ClientId, Collection, Moment, Observation, Recency, Seen, ShownObject, WriteOutcome,
};

use crate::invariants::Findings;

/// Checks all rules. Adds what informers have received, and what breaks a rule, to the findings.
pub fn check(history: &History, observations: &[Observation], findings: &mut Findings) {
    let epochs = history.epochs();
    events::check((history, &epochs), observations, findings);
    for (number, epoch) in epochs.iter().enumerate() {
        let is_of_epoch = |seen: &&Observation| history.epoch_of(seen.ended) == number;
        let seen: Vec<_> = observations.iter().filter(is_of_epoch).collect();
        reads::check(epoch, &seen, findings);
        floors::check((history, epoch), &seen, findings);
    }
    writes::check(history, observations, findings);
}
