//! The configurations at L4: one listener and one endpoint, which `HAProxy` and Envoy check every second by a TCP
//! connect. nginx has no active checks; jackstay probes with its defaults.

use std::net::SocketAddr;

use super::Environment;
use crate::pki::SERVER_NAME;

impl Environment<'_> {
    pub(super) fn haproxy_l4(&self, listen: SocketAddr) -> String {
        let (origin, max_connections) = (self.origin, self.flows + 100);
        format!(
            "\
global
    nbthread 1
    maxconn {max_connections}
defaults
    mode tcp
    timeout connect 3s
    timeout client 1h
    timeout server 1h
frontend apiserver
    bind {listen}
    default_backend control-plane
backend control-plane
    server a {origin} check inter 1s
"
        )
    }

    pub(super) fn nginx_l4(&self, listen: SocketAddr) -> String {
        let (dir, origin) = (self.dir.display(), self.origin);
        // nginx counts both connections of a flow.
        let max_connections = 2 * self.flows + 300;
        // Distributions build the stream module as a shared library.
        let module = std::path::Path::new("/usr/lib/nginx/modules/ngx_stream_module.so");
        let load = if module.is_file() {
            format!("load_module {};\n", module.display())
        } else {
            String::new()
        };
        format!(
            "\
{load}daemon off;
master_process off;
pid {dir}/nginx.pid;
error_log stderr;
events {{ worker_connections {max_connections}; }}
stream {{
    access_log off;
    server {{
        listen {listen};
        proxy_pass {origin};
        proxy_connect_timeout 3s;
        proxy_timeout 1h;
        proxy_half_close on;
    }}
}}
"
        )
    }

    pub(super) fn envoy_l4(&self, listen: SocketAddr) -> String {
        let (port, origin_port) = (listen.port(), self.origin.port());
        // One source gets half of the slots.
        let max_connections = 2 * self.flows + 2_000;
        format!(
            r#"
static_resources:
  listeners:
  - name: apiserver
    address: {{ socket_address: {{ address: 127.0.0.1, port_value: {port} }} }}
    filter_chains:
    - filters:
      - name: tcp
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy
          stat_prefix: apiserver
          cluster: control-plane
          idle_timeout: 0s
  clusters:
  - name: control-plane
    connect_timeout: 3s
    circuit_breakers: {{ thresholds: [{{ max_connections: {max_connections}, max_pending_requests: {max_connections} }}] }}
    health_checks:
    - {{ timeout: 1s, interval: 1s, unhealthy_threshold: 2, healthy_threshold: 2, tcp_health_check: {{}} }}
    load_assignment:
      cluster_name: control-plane
      endpoints:
      - lb_endpoints:
        - endpoint: {{ address: {{ socket_address: {{ address: 127.0.0.1, port_value: {origin_port} }} }} }}
"#
        )
    }

    pub(super) fn jackstay_l4(&self, listen: SocketAddr, admin: SocketAddr) -> String {
        let (ca, origin) = (self.pki.ca.display(), self.origin);
        // One source gets half of the slots.
        let max_connections = 2 * self.flows + 2_000;
        format!(
            r#"
admin: {{ bind: "{admin}" }}
state_dir: ""
workers: 1
upstreams:
  - name: control-plane
    endpoints: ["{origin}"]
    tls: {{ ca_file: {ca}, server_name: {SERVER_NAME} }}
listeners:
  - name: apiserver
    bind: ["{listen}"]
    mode: passthrough
    upstream: control-plane
    limits: {{ max_connections: {max_connections} }}
"#
        )
    }
}
