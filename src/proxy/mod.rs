//! The data plane: from an accepted connection to an answered request (L7), or to another
//! connection that its bytes are passed to (L4, [`passthrough`]).

pub mod accept;
pub mod beginning;
pub mod body;
pub mod closing;
pub mod forward;
pub mod hygiene;
pub mod identify;
pub mod line;
pub mod listener;
pub mod passthrough;
pub mod peer;
pub mod plain_http;
pub mod request_info;
pub mod respond;
pub mod retry;
pub mod room;
pub mod serve;
pub mod stall;
pub mod taking;
pub mod upgrade;
pub mod upload;
pub mod watch;
pub mod watch_body;
