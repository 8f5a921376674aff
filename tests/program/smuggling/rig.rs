//! jackstay as a process in front of an upstream, and what it says about each request: its access log.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use crate::support::Certs;
use crate::support::child::{Process, free_address};
use crate::support::{pages, wait};

/// Long enough for a proxy to start on a slow machine.
pub const START: Duration = Duration::from_secs(30);

/// A running jackstay.
pub struct Jackstay {
    pub address: SocketAddr,
    process: Process,
}

/// A request that jackstay says it has sent upstream.
#[derive(Debug, Clone, PartialEq)]
pub struct LoggedRequest {
    pub client: Ipv4Addr,
    pub method: String,
    pub path: String,
    pub code: u64,
    /// How often the request was sent.
    pub attempts: u64,
}

impl Jackstay {
    /// Starts jackstay and waits until the upstream is ready.
    pub fn start(certs: &Certs, upstream: SocketAddr, name: &str) -> Self {
        let (address, admin) = (free_address(), free_address());
        let file = certs.path().join(format!("{name}.yaml"));
        fs::write(&file, configuration(certs, upstream, address, admin)).unwrap();
        let binary = std::env::var_os("JACKSTAY_BIN")
            .map_or_else(|| PathBuf::from(env!("CARGO_BIN_EXE_jackstay")), PathBuf::from);
        let mut command = Command::new(binary);
        command.args(["run", "--config"]).arg(&file);
        let mut process = Process::spawn(command);
        wait::until_ok_blocking(START, "jackstay is ready", || {
            assert!(process.is_running(), "{}", process.output());
            let page = pages::get_blocking(admin, "/readyz").unwrap_or_default();
            let ready = page.starts_with("HTTP/1.1 200");
            ready.then_some(()).ok_or_else(|| format!("{page}\n{}", process.output()))
        });
        Self { address, process }
    }

    pub fn is_running(&mut self) -> bool {
        self.process.is_running()
    }

    /// The requests in the access log that name an endpoint.
    pub fn forwarded(&self) -> Vec<LoggedRequest> {
        let output = self.process.output();
        let lines = output.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        lines.filter_map(|line| logged_request(&line)).collect()
    }

    /// All lines of the log.
    pub fn log(&self) -> String {
        self.process.output()
    }
}

fn logged_request(line: &Value) -> Option<LoggedRequest> {
    line.get("endpoint")?.as_str()?;
    let text = |key: &str| Some(line.get(key)?.as_str()?.to_owned());
    Some(LoggedRequest {
        client: text("client")?.parse().ok()?,
        method: text("method")?,
        path: text("path")?,
        code: line.get("code")?.as_u64()?,
        attempts: line.get("attempts")?.as_u64()?,
    })
}

fn configuration(
    certs: &Certs,
    upstream: SocketAddr,
    address: SocketAddr,
    admin: SocketAddr,
) -> String {
    let dir = certs.path().display();
    // A slow machine must not cause hedges, which are requests that no client has sent.
    format!(
        r#"
admin: {{ bind: "{admin}" }}
state_dir: ""
log: {{ format: json, access: all }}
upstreams:
  - name: control-plane
    endpoints: ["{upstream}"]
    tls: {{ ca_file: {dir}/ca.crt }}
    health: {{ suspect_after: 20s, dead_after: 40s, readyz: {{ timeout: 10s }} }}
listeners:
  - name: apiserver
    bind: ["{address}"]
    mode: terminate
    upstream: control-plane
    tls: {{ cert_file: {dir}/serving.crt, key_file: {dir}/serving.key }}
    client_ca_file: {dir}/ca.crt
    identities:
      - cert_file: {dir}/admin.crt
        key_file: {dir}/admin.key
"#
    )
}
