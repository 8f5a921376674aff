//! What the tests of this module share.

use std::time::Duration;

use crate::config::{
    Connections, Discovery, EndpointAddress, Health, Readyz, Upstream, UpstreamTls, UsedBy,
};

/// An upstream that verifies nobody, so that it needs no files.
pub(super) fn config() -> Upstream {
    Upstream {
        name: "u".into(),
        endpoints: vec![EndpointAddress { host: "10.0.0.1".into(), port: 6443 }],
        endpoints_file: None,
        discovery: Discovery::default(),
        tls: UpstreamTls { ca_file: None, server_name: None },
        used_by: UsedBy::default(),
        connections: Connections { min: 1, max: 64, max_streams: 100 },
        rebalance: true,
        health: Health {
            ping_interval: Duration::from_secs(1),
            suspect_after: None,
            dead_after: Duration::from_secs(2),
            connect_timeout: Duration::from_secs(3),
            readyz: Readyz {
                path: "/readyz".into(),
                interval: Duration::from_secs(10),
                timeout: Duration::from_secs(1),
                rise: 2,
                fall: 2,
                cert: None,
                token_file: None,
            },
        },
    }
}
