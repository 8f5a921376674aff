//! The data plane: accepts connections and forwards their requests (L7, [`https_server`]) or their bytes
//! (L4, [`passthrough`]).

mod accept;
mod bearer_token;
mod body_prefix;
mod body_progress;
pub mod client_certificate;
mod client_connection;
mod client_memory;
mod client_stream;
mod connection_slots;
pub mod credential_selector;
pub mod drain;
mod fair_queue;
pub mod forward;
mod handshake_queue;
mod http_connection;
pub mod https_server;
pub mod hygiene;
pub mod identity_lane;
pub mod listener_service;
pub mod passthrough;
pub mod proven_tokens;
pub mod request_body;
pub mod request_info;
mod response_body;
mod retry;
mod retry_budget;
mod shutdown_rejection;
mod status_error;
mod status_response;
pub mod tunnels;
mod unproven_requests;
mod upgrade;
pub mod upstream_client;
pub mod watch;
