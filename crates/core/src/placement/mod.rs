//! On which apiserver the watches of a node are. No watch is forced to move: a number of moves is offered, and a watch
//! that is eligible and can be resumed takes one.
//!
//! * [`evacuation`]: away from an apiserver whose `/readyz` fails.
//! * [`rebalance`]: to the apiservers that have too few of them.

pub mod evacuation;
pub mod rebalance;

/// Which watches may take an offered move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MoveEligibility {
    /// Watches that have not moved for a while, because the move is not urgent.
    Settled,
    /// Watches that delivered events and have fallen silent.
    Silent,
    /// All watches.
    All,
}
