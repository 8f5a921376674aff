//! One request: what it asks for, whether its head is acceptable, and whether it may be sent again.

pub mod attempts;
pub mod head_hold;
pub mod hygiene;
pub mod info;
pub mod late_reads;
pub mod overload_rejection;
pub mod path_prefix;
mod query;
pub mod retry;
pub mod retry_budget;
pub mod settlement;
pub mod shutdown_rejection;
pub mod start_up;
pub mod status_error;
