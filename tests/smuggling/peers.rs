//! `HAProxy`, nginx, Envoy and Go as proxies: HTTP/2 and HTTP/1.1 over TLS to HTTP/1.1 without TLS. `benches/setup`
//! installs the first three, Debian's `golang-go` the last. Everything but the addresses has the proxy's default.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::Certs;
use crate::support::child::{Process, free_address};

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
        let (dir, address) = (certs.path(), free_address());
        let file = |extension: &str| dir.join(format!("{name}.{extension}"));
        let mut command = match name {
            "HAProxy" => {
                let both = ["serving.crt", "serving.key"]
                    .map(|part| std::fs::read_to_string(dir.join(part)).unwrap());
                std::fs::write(file("pem"), both.concat()).unwrap();
                std::fs::write(file("cfg"), haproxy(address, upstream, &file("pem"))).unwrap();
                let mut command = Command::new("haproxy");
                command.arg("-db").arg("-f").arg(file("cfg"));
                command
            }
            "nginx" => {
                std::fs::write(file("conf"), nginx(address, upstream, dir)).unwrap();
                let mut command = Command::new("nginx");
                command.arg("-c").arg(file("conf"));
                command
            }
            "Envoy" => {
                std::fs::write(file("yaml"), envoy(address, upstream, dir)).unwrap();
                let mut command = Command::new(envoy_program());
                command.args(["--concurrency", "1", "--disable-hot-restart", "-l", "off", "-c"]);
                command.arg(file("yaml"));
                command
            }
            "Go" => {
                let program = file("program");
                build_go(&program, dir);
                let mut command = Command::new(program);
                command.args([address.to_string(), upstream.to_string()]);
                command.arg(dir.join("serving.crt")).arg(dir.join("serving.key"));
                command
            }
            _ => panic!("no such proxy: {name}"),
        };
        // Debian installs servers in a directory that is not in the PATH of every user.
        let path = std::env::var("PATH").unwrap_or_default();
        command.env("PATH", format!("{path}:/usr/sbin"));
        Self { address, _process: Process::spawn(command) }
    }
}

/// Envoy as `benches/setup` installs it.
fn envoy_program() -> PathBuf {
    if let Some(program) = std::env::var_os("ENVOY_BIN") {
        return program.into();
    }
    let home = || PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cache");
    let cache = std::env::var_os("XDG_CACHE_HOME").map_or_else(home, PathBuf::from);
    cache.join("jackstay/bench/envoy")
}

fn build_go(program: &Path, dir: &Path) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/smuggling/peer.go");
    let built = Command::new("go")
        .args(["build", "-o"])
        .args([program, &source])
        .env("GO111MODULE", "off")
        .env("CGO_ENABLED", "0")
        .env("GOCACHE", dir.join("gocache"))
        .status();
    assert!(built.expect("Debian's golang-go is installed").success(), "peer.go does not compile");
}

fn haproxy(address: SocketAddr, upstream: SocketAddr, pem: &Path) -> String {
    format!(
        "\
global
    nbthread 1
    maxconn 4000
defaults
    mode http
    option forwardfor
    timeout connect 3s
    timeout client 1m
    timeout server 1m
frontend clients
    bind {address} ssl crt {pem} alpn h2,http/1.1
    default_backend recorder
backend recorder
    server a {upstream}
",
        pem = pem.display()
    )
}

fn nginx(address: SocketAddr, upstream: SocketAddr, dir: &Path) -> String {
    let temporary = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|name| format!("    {name}_temp_path {}/nginx-{name};\n", dir.display()))
        .concat();
    format!(
        "\
daemon off;
master_process off;
pid {dir}/nginx.pid;
error_log stderr crit;
events {{ worker_connections 4000; }}
http {{
    access_log off;
{temporary}    server {{
        listen {address} ssl http2;
        ssl_certificate {dir}/serving.crt;
        ssl_certificate_key {dir}/serving.key;
        location / {{
            proxy_pass http://{upstream};
            proxy_http_version 1.1;
            proxy_set_header Host $host;
            proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
        }}
    }}
}}
",
        dir = dir.display()
    )
}

fn envoy(address: SocketAddr, upstream: SocketAddr, dir: &Path) -> String {
    let (port, upstream_port, dir) = (address.port(), upstream.port(), dir.display());
    format!(
        r#"
static_resources:
  listeners:
  - name: clients
    address: {{ socket_address: {{ address: 127.0.0.1, port_value: {port} }} }}
    filter_chains:
    - transport_socket:
        name: tls
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext
          common_tls_context:
            tls_params: {{ tls_maximum_protocol_version: TLSv1_3 }}
            alpn_protocols: [h2, http/1.1]
            tls_certificates: [{{ certificate_chain: {{ filename: {dir}/serving.crt }}, private_key: {{ filename: {dir}/serving.key }} }}]
      filters:
      - name: http
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: clients
          use_remote_address: true
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes: [{{ match: {{ prefix: / }}, route: {{ cluster: recorder }} }}]
          http_filters:
          - name: router
            typed_config: {{ "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router }}
  clusters:
  - name: recorder
    connect_timeout: 3s
    load_assignment:
      cluster_name: recorder
      endpoints:
      - lb_endpoints:
        - endpoint: {{ address: {{ socket_address: {{ address: 127.0.0.1, port_value: {upstream_port} }} }} }}
"#
    )
}
