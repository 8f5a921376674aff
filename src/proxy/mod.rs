//! The data plane: serves the requests of accepted connections (L7), or passes their bytes to an
//! upstream connection (L4, [`passthrough`]).

pub mod accept;
pub mod body_error;
pub mod body_prefix;
pub mod body_progress;
pub mod client_certificate;
pub mod client_connection;
pub mod client_stream;
pub mod credential_selector;
pub mod drain;
pub mod forward;
pub mod https_server;
pub mod hygiene;
pub mod listener_service;
pub mod passthrough;
pub mod plain_http;
pub mod request_body;
pub mod request_info;
pub mod response_body;
pub mod retry;
pub mod retry_budget;
pub mod shutdown_rejection;
pub mod stall_timeout;
pub mod status_error;
pub mod status_response;
pub mod tunnels;
pub mod upgrade;
pub mod upstream_client;
pub mod watch;
