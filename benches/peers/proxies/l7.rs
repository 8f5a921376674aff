//! The configurations at L7: TLS 1.3 and HTTP/2 on both sides, the origin's certificate verified, a client certificate
//! requested, `/readyz` checked every 10 s, no access log, and no timeout that ends an idle watch. Everything else has
//! the proxy's default.

use std::net::SocketAddr;

use super::Environment;
use crate::pki::{Pki, SERVER_NAME};

impl Environment<'_> {
    pub(super) fn haproxy_l7(&self, listen: SocketAddr) -> String {
        let (ca, both, origin) =
            (self.pki.ca.display(), self.pki.server_both.display(), self.origin);
        format!(
            "\
global
    nbthread 1
    maxconn 2000
defaults
    mode http
    timeout connect 3s
    timeout client 1h
    timeout server 1h
frontend apiserver
    bind {listen} ssl crt {both} alpn h2,http/1.1 ca-file {ca} verify optional
    default_backend control-plane
backend control-plane
    http-reuse always
    option httpchk GET /readyz
    server a {origin} ssl alpn h2 ca-file {ca} verify required verifyhost {SERVER_NAME} check check-alpn h2 inter 10s
"
        )
    }

    pub(super) fn envoy_l7(&self, listen: SocketAddr) -> String {
        let Pki { ca, server_cert, server_key, .. } = self.pki;
        let (ca, cert, key) = (ca.display(), server_cert.display(), server_key.display());
        let (port, origin_port) = (listen.port(), self.origin.port());
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
            tls_params: {{ tls_maximum_protocol_version: TLSv1_3 }}
            alpn_protocols: [h2, http/1.1]
            tls_certificates: [{{ certificate_chain: {{ filename: {cert} }}, private_key: {{ filename: {key} }} }}]
            validation_context: {{ trusted_ca: {{ filename: {ca} }} }}
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
    # The default of 1,024 concurrent requests is too low for 10,000 watches.
    circuit_breakers: {{ thresholds: [{{ max_connections: 20000, max_requests: 20000, max_pending_requests: 20000 }}] }}
    health_checks:
    - timeout: 1s
      interval: 10s
      unhealthy_threshold: 2
      healthy_threshold: 2
      http_health_check: {{ path: /readyz, codec_client_type: HTTP2 }}
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        # The origin's limit. Otherwise Envoy sends all streams of a burst on one connection and answers those that the
        # origin refuses with 503.
        explicit_http_config: {{ http2_protocol_options: {{ max_concurrent_streams: 100 }} }}
    transport_socket:
      name: tls
      typed_config:
        "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext
        sni: {SERVER_NAME}
        common_tls_context:
          # Envoy's client uses at most TLS 1.2 by default.
          tls_params: {{ tls_maximum_protocol_version: TLSv1_3 }}
          alpn_protocols: [h2]
          validation_context:
            trusted_ca: {{ filename: {ca} }}
            match_typed_subject_alt_names: [{{ san_type: DNS, matcher: {{ exact: {SERVER_NAME} }} }}]
    load_assignment:
      cluster_name: control-plane
      endpoints:
      - lb_endpoints:
        - endpoint: {{ address: {{ socket_address: {{ address: 127.0.0.1, port_value: {origin_port} }} }} }}
"#
        )
    }

    pub(super) fn jackstay_l7(&self, listen: SocketAddr, admin: SocketAddr) -> String {
        let Pki { ca, server_cert, server_key, client_cert, client_key, .. } = self.pki;
        let (ca, cert, key) = (ca.display(), server_cert.display(), server_key.display());
        let (client_cert, client_key) = (client_cert.display(), client_key.display());
        let origin = self.origin;
        format!(
            r#"
admin: {{ bind: "{admin}" }}
state_dir: ""
workers: 1
upstreams:
  - name: control-plane
    endpoints: ["{origin}"]
    tls: {{ ca_file: {ca} }}
    # The default of 64 is too low for 10,000 watches, of which the origin allows 100 on a connection.
    connections: {{ max: 128 }}
listeners:
  - name: apiserver
    bind: ["{listen}"]
    mode: terminate
    upstream: control-plane
    tls: {{ cert_file: {cert}, key_file: {key} }}
    client_ca_file: {ca}
    identities:
      - cert_file: {client_cert}
        key_file: {client_key}
"#
        )
    }
}
