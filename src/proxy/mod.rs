//! The data plane, L7: from an accepted connection to an answered request.

pub mod body;
pub mod forward;
pub mod hygiene;
pub mod identify;
pub mod line;
pub mod listener;
pub mod request_info;
pub mod respond;
pub mod retry;
pub mod serve;
pub mod stall;
pub mod upgrade;
pub mod upload;
pub mod watch;
pub mod watch_body;
