//! Executes what `jackstay_core::watch` decides about a watch that loses its apiserver.
//!
//! * [`body`] is the response body of one watch, which the client polls.
//! * [`hold`] says what ends the hold of a watch in an outage.
//! * [`limits`] are the limits that all watches of one worker to one upstream share.

pub(super) mod body;
pub(super) mod hold;
pub(super) mod limits;
