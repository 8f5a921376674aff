//! The data plane: accepts connections and forwards their requests (L7, [`https_server`]) or their bytes
//! (L4, [`passthrough`]).

mod accept;
mod accounted_stream;
pub mod admission;
mod attempt;
mod bearer_token;
mod body_prefix;
mod body_progress;
pub mod client_certificate;
mod client_connection;
pub mod client_socket;
mod client_stream;
mod compact;
mod consistent_reads;
pub mod credential_selector;
pub mod drain;
pub mod forward;
mod group_request;
mod head_errors;
mod head_timeout;
mod heartbeat;
mod http_connection;
pub mod https_server;
pub mod identity_lane;
pub mod lingering;
pub mod listener_service;
pub mod passthrough;
pub mod request_body;
mod response_body;
mod status_response;
pub mod task_queues;
mod tls_handshake;
pub mod tunnels;
mod upgrade;
pub mod upstream_client;
pub mod watch;
mod worker_scope;
