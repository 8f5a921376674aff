//! The whole data plane, L7 and L4, on real sockets, in front of demo apiservers and of scripted peers, which may
//! violate HTTP/2.

#![cfg(feature = "demo")]

#[path = "../support/mod.rs"]
mod support;

mod admin_endpoint;
mod balancer;
mod client_certificates;
mod clients;
mod compressed_watches;
mod connection_slots;
mod consistent_reads;
mod demo_apiserver;
mod discovery;
mod expired_versions;
mod failing_groups;
mod goaway_chance;
mod h2spec;
mod header_limits;
mod heartbeats;
mod hostile_upstream;
mod identity;
mod kubectl;
mod late_reads;
mod limited_pings;
mod limits;
mod line_windows;
mod memory_budget;
mod metrics_bind;
mod new_tokens;
mod overload;
mod own_errors;
mod own_writes;
mod passthrough;
mod reload;
mod request_bodies;
mod restored_etcd;
mod resume_limits;
mod retry;
mod scripted_peer;
mod shadow_watches;
mod shared_address;
mod shared_versions;
mod starting_servers;
mod stream_capacity;
mod token_users;
mod unauthenticated;
mod unsent_writes;
mod upgrade;
mod upstream_floods;
mod upstream_load;
mod upstream_violations;
mod version_skew;
mod watch_continuity;
mod watch_encodings;
mod watch_parameters;
mod watch_rebalance;
mod writes;
