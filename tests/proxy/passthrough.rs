//! L4: passthrough listeners on real sockets, between clients and servers of the test.

mod client_limits;
mod drain;
mod endpoint_health;
mod faults;
mod flows;
mod long_paths;
mod peer;
mod prober;
mod rebalance;
mod server_names;
mod unread_data;
