//! The fuzz targets: each parses arbitrary bytes of one kind and asserts what must hold for every input.
//!
//! `fuzz/fuzz_targets` runs them with libFuzzer, `tests/checks/fuzz.rs` on a stable toolchain.

mod cli;
mod connection;
mod files;
mod http;
mod server;
mod takeover;
mod tls;
mod watch;

/// Parses an input. It panics if an assertion fails.
pub type Target = fn(&[u8]);

/// The targets. Each name is that of a folder in `tests/corpus`.
pub const TARGETS: [(&str, Target); 21] = [
    ("arguments", cli::arguments),
    ("certificate", tls::certificate),
    ("config", files::config),
    ("endpoint_objects", watch::endpoint_objects),
    ("endpoints_file", files::endpoints_file),
    ("environment", cli::environment),
    ("features", watch::features),
    ("frames", http::frames),
    ("gzip", watch::gzip),
    ("hello", tls::hello),
    ("http1_connection", connection::http1_connection),
    ("http2_connection", connection::http2_connection),
    ("kubeconfig", files::kubeconfig),
    ("node_name", cli::node_name),
    ("pem", cli::pem),
    ("request", http::request),
    ("server_url", cli::server_url),
    ("state_file", files::state_file),
    ("takeover", takeover::takeover),
    ("watch", watch::watch),
    ("watch_events", watch::watch_events),
];

/// Runs a target.
///
/// # Panics
/// There is no target of this name, or an assertion of the target fails.
pub fn run(name: &str, bytes: &[u8]) {
    let (_, target) = TARGETS.iter().find(|(known, _)| *known == name).expect("a known target");
    target(bytes);
}
