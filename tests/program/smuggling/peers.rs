//! `HAProxy`, nginx, Envoy and Go as proxies: HTTP/2 and HTTP/1.1 over TLS to HTTP/1.1 without TLS. `benches/setup`
//! installs the first three, Debian's `golang-go` the last.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;

use crate::support::Certs;
use crate::support::child::{Process, free_address};
use crate::support::peers::{self, Pem, Terminate, Upstream};

/// The names of the proxies, in the order of the table.
pub const NAMES: [&str; 4] = ["HAProxy", "nginx", "Envoy", "Go"];

/// A running proxy.
pub struct Peer {
    pub address: SocketAddr,
    /// Killed on drop.
    _process: Process,
}

impl Peer {
    /// Starts the proxy in front of `upstream`.
    pub fn start(name: &str, certs: &Certs, upstream: SocketAddr) -> Self {
        let address = free_address();
        let command = match name {
            "HAProxy" => command(peers::Peer::HaProxy, certs, address, upstream),
            "nginx" => command(peers::Peer::Nginx, certs, address, upstream),
            "Envoy" => command(peers::Peer::Envoy, certs, address, upstream),
            "Go" => go(certs, address, upstream),
            _ => panic!("no such proxy: {name}"),
        };
        Self { address, _process: Process::spawn(command) }
    }
}

fn command(peer: peers::Peer, certs: &Certs, listen: SocketAddr, upstream: SocketAddr) -> Command {
    let file = certs.path().join("peer").with_extension(peer.extension());
    let configuration = peer.terminate(&Terminate {
        listen,
        serving: Pem { dir: certs.path(), name: "serving" },
        client_ca: None,
        servers: &[upstream],
        upstream: Upstream::Http1,
    });
    std::fs::write(&file, configuration).unwrap();
    let program = peer.program().unwrap_or_else(|| panic!("{peer:?}: run benches/setup"));
    peer.command(&program, &file)
}

fn go(certs: &Certs, listen: SocketAddr, upstream: SocketAddr) -> Command {
    let dir = certs.path();
    let program = dir.join("Go.program");
    build_go(&program, dir);
    let mut command = Command::new(program);
    command.args([listen.to_string(), upstream.to_string()]);
    command.arg(dir.join("serving.crt")).arg(dir.join("serving.key"));
    command
}

fn build_go(program: &Path, dir: &Path) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/program/smuggling/peer.go");
    let built = Command::new("go")
        .args(["build", "-o"])
        .args([program, &source])
        .env("GO111MODULE", "off")
        .env("CGO_ENABLED", "0")
        .env("GOCACHE", dir.join("gocache"))
        .status();
    assert!(built.expect("Debian's golang-go is installed").success(), "peer.go does not compile");
}
