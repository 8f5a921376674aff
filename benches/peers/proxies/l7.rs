//! The configurations at L7: TLS 1.3 and HTTP/2 on both sides, the origin's certificate verified, a client certificate
//! requested, `/readyz` checked every 10 s, no access log, and no timeout that ends an idle watch. Everything else has
//! the proxy's default.

use std::net::SocketAddr;

use jackstay_testkit::peers::{Peer, Pem, Terminate, Upstream};

use super::Environment;
use crate::pki::{Pki, SERVER_NAME};

impl Environment<'_> {
    pub(super) fn peer_l7(&self, peer: Peer, listen: SocketAddr) -> String {
        peer.terminate(&Terminate {
            listen,
            serving: Pem { dir: self.dir, name: "server" },
            client_ca: Some(&self.pki.ca),
            servers: &[self.origin],
            upstream: Upstream::Http2Tls {
                ca: &self.pki.ca,
                server_name: Some(SERVER_NAME),
                certificate: None,
            },
        })
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
