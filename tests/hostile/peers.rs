//! `HAProxy` and Envoy as targets of the same attacks, with their defaults and one thread each. They authenticate to the
//! apiservers with the identity's certificate.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Another proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peer {
    HaProxy,
    Envoy,
}

impl Peer {
    /// The peer that `JACKSTAY_HOSTILE_PEER` names.
    pub fn from_env() -> Option<Self> {
        match std::env::var("JACKSTAY_HOSTILE_PEER").ok()?.as_str() {
            "haproxy" => Some(Self::HaProxy),
            "envoy" => Some(Self::Envoy),
            other => panic!("JACKSTAY_HOSTILE_PEER={other}: neither haproxy nor envoy"),
        }
    }

    /// The command that runs it in the foreground in front of two apiservers. `dir` has the certificates.
    pub fn command(self, dir: &Path, listen: SocketAddr, servers: &[SocketAddr]) -> Command {
        match self {
            Self::HaProxy => {
                concatenate(dir, "serving");
                concatenate(dir, "admin");
                let file = dir.join("haproxy.cfg");
                std::fs::write(&file, haproxy(dir, listen, servers)).unwrap();
                let mut command = Command::new(program("haproxy"));
                command.arg("-db").arg("-f").arg(file);
                command
            }
            Self::Envoy => {
                let file = dir.join("envoy.yaml");
                std::fs::write(&file, envoy(dir, listen, servers)).unwrap();
                let mut command = Command::new(program("envoy"));
                command.args(["--concurrency", "1", "--disable-hot-restart", "-l", "error", "-c"]);
                command.arg(file);
                command
            }
        }
    }
}

/// A program in the `PATH`, in `/usr/sbin`, or where `benches/setup` installs it.
fn program(name: &str) -> PathBuf {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = || PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cache");
    let cache = cache.unwrap_or_else(home).join("jackstay/bench");
    let path = std::env::var_os("PATH").unwrap_or_default();
    let directories = std::env::split_paths(&path).chain(["/usr/sbin".into(), cache]);
    let mut programs = directories.map(|directory| directory.join(name));
    programs
        .find(|program| program.is_file())
        .unwrap_or_else(|| panic!("{name}: run benches/setup"))
}

/// Writes a certificate and its key into one file.
fn concatenate(dir: &Path, name: &str) {
    let read = |extension: &str| std::fs::read(dir.join(format!("{name}.{extension}"))).unwrap();
    let both = [read("crt"), read("key")].concat();
    std::fs::write(dir.join(format!("{name}.pem")), both).unwrap();
}

fn haproxy(dir: &Path, listen: SocketAddr, servers: &[SocketAddr]) -> String {
    let dir = dir.display();
    let server = |(index, address): (usize, &SocketAddr)| {
        format!(
            "    server s{index} {address} ssl alpn h2 ca-file {dir}/ca.crt crt {dir}/admin.pem verify required check check-alpn h2 inter 10s\n"
        )
    };
    let servers: String = servers.iter().enumerate().map(server).collect();
    format!(
        "\
global
    nbthread 1
defaults
    mode http
    timeout connect 3s
    timeout client 1h
    timeout server 1h
frontend apiserver
    bind {listen} ssl crt {dir}/serving.pem alpn h2,http/1.1 ca-file {dir}/ca.crt verify optional
    default_backend control-plane
backend control-plane
    http-reuse always
    option httpchk GET /readyz
{servers}"
    )
}

fn envoy(dir: &Path, listen: SocketAddr, servers: &[SocketAddr]) -> String {
    let (dir, port) = (dir.display(), listen.port());
    let endpoint = |address: &SocketAddr| {
        let port = address.port();
        format!(
            "        - endpoint: {{ address: {{ socket_address: {{ address: 127.0.0.1, port_value: {port} }} }} }}\n"
        )
    };
    let endpoints: String = servers.iter().map(endpoint).collect();
    format!(
        r#"
static_resources:
  listeners:
  - name: apiserver
    address: {{ socket_address: {{ address: 127.0.0.1, port_value: {port} }} }}
    filter_chains:
    - transport_socket:
        name: tls
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext
          common_tls_context:
            alpn_protocols: [h2, http/1.1]
            tls_certificates: [{{ certificate_chain: {{ filename: {dir}/serving.crt }}, private_key: {{ filename: {dir}/serving.key }} }}]
            validation_context: {{ trusted_ca: {{ filename: {dir}/ca.crt }} }}
      filters:
      - name: http
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: apiserver
          stream_idle_timeout: 0s
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes: [{{ match: {{ prefix: / }}, route: {{ cluster: control-plane, timeout: 0s }} }}]
          http_filters:
          - name: router
            typed_config: {{ "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router }}
  clusters:
  - name: control-plane
    connect_timeout: 3s
    circuit_breakers: {{ thresholds: [{{ max_connections: 10000, max_requests: 10000, max_pending_requests: 10000 }}] }}
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {{ http2_protocol_options: {{}} }}
    transport_socket:
      name: tls
      typed_config:
        "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext
        common_tls_context:
          tls_params: {{ tls_maximum_protocol_version: TLSv1_3 }}
          alpn_protocols: [h2]
          tls_certificates: [{{ certificate_chain: {{ filename: {dir}/admin.crt }}, private_key: {{ filename: {dir}/admin.key }} }}]
          validation_context: {{ trusted_ca: {{ filename: {dir}/ca.crt }} }}
    load_assignment:
      cluster_name: control-plane
      endpoints:
      - lb_endpoints:
{endpoints}"#
    )
}
