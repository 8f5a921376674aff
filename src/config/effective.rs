//! The configuration in effect, in the words of the file: for the admin endpoint. It holds paths,
//! never what is in the files, so there is nothing secret in it. What it prints can be loaded.

use std::path::PathBuf;

use serde_json::{Value, json};

use super::model::{
    CertPaths, Config, Health, Intended, Listener, Mode, Passthrough, Route, Terminate, Upstream,
};
use super::units::{format_duration, format_size};

/// The configuration as JSON with the keys of the file.
pub fn effective(config: &Config) -> Value {
    json!({
        "admin": {
            "bind": config.admin.bind.to_string(),
            "socket": optional(config.admin.socket.as_ref()),
        },
        "state_dir": optional(config.state_dir.as_ref()),
        "workers": config.workers,
        "mark": format!("{:#x}", config.mark),
        "log": {
            "level": config.log.level.as_str(),
            "format": config.log.format.as_str(),
            "access": config.log.access.as_str(),
        },
        "shutdown": { "drain_timeout": format_duration(config.shutdown.drain_timeout) },
        "upstreams": config.upstreams.iter().map(upstream).collect::<Vec<_>>(),
        "listeners": config.listeners.iter().map(listener).collect::<Vec<_>>(),
    })
}

fn upstream(upstream: &Upstream) -> Value {
    json!({
        "name": upstream.name,
        "endpoints": upstream.endpoints.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "endpoints_file": optional(upstream.endpoints_file.as_ref()),
        "discovery": { "kubeconfig": optional(upstream.discovery.kubeconfig.as_ref()) },
        "tls": {
            "ca_file": optional(upstream.tls.ca_file.as_ref()),
            "server_name": upstream.tls.server_name.as_deref().unwrap_or_default(),
        },
        "connections": {
            "min": upstream.connections.min,
            "max": upstream.connections.max,
            "max_streams": upstream.connections.max_streams,
        },
        "rebalance": upstream.rebalance,
        "health": health(&upstream.health),
    })
}

fn health(health: &Health) -> Value {
    let readyz = &health.readyz;
    json!({
        "ping_interval": format_duration(health.ping_interval),
        "suspect_after": health.suspect_after.map_or("adaptive".to_owned(), format_duration),
        "dead_after": format_duration(health.dead_after),
        "tunnel_dead_after": format_duration(health.tunnel_dead_after),
        "connect_timeout": format_duration(health.connect_timeout),
        "readyz": {
            "path": readyz.path,
            "interval": format_duration(readyz.interval),
            "timeout": format_duration(readyz.timeout),
            "rise": readyz.rise,
            "fall": readyz.fall,
            "cert_file": optional(readyz.cert.as_ref().map(|paths| &paths.cert_file)),
            "key_file": optional(readyz.cert.as_ref().map(|paths| &paths.key_file)),
            "token_file": optional(readyz.token_file.as_ref()),
        },
    })
}

fn listener(listener: &Listener) -> Value {
    let mut all = json!({
        "name": listener.name,
        "freebind": listener.freebind,
        "bind": listener.bind.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "mode": listener.mode.as_str(),
        "upstream": listener.upstream,
        "limits": {
            "max_connections": listener.limits.max_connections,
            "handshake_timeout": format_duration(listener.limits.handshake_timeout),
        },
    });
    let own = match &listener.mode {
        Mode::Terminate(mode) => terminate(mode),
        Mode::Passthrough(mode) => passthrough(mode),
    };
    merge(&mut all, own);
    all
}

fn terminate(mode: &Terminate) -> Value {
    json!({
        "transparent": false,
        "tls": {
            "cert_file": mode.tls.cert_file.to_string_lossy(),
            "key_file": mode.tls.key_file.to_string_lossy(),
            "issuer": {
                "cert_file": optional(mode.issuer.as_ref().map(|paths| &paths.cert_file)),
                "key_file": optional(mode.issuer.as_ref().map(|paths| &paths.key_file)),
            },
        },
        "client_ca_file": optional(mode.client_ca_file.as_ref()),
        "identities": mode.identities.iter().map(cert_paths).collect::<Vec<_>>(),
        "resume_groups": mode.resume_groups,
        "limits": {
            "max_streams": mode.limits.max_streams,
            "max_header_bytes": format_size(mode.limits.max_header_bytes.into()),
            "header_timeout": format_duration(mode.limits.header_timeout),
            "stall_timeout": format_duration(mode.limits.stall_timeout),
        },
    })
}

fn passthrough(mode: &Passthrough) -> Value {
    let route =
        |route: &Route| json!({ "server_names": route.server_names, "upstream": route.upstream });
    let intended = |meant: &Intended| {
        let to: Vec<_> = meant.to.iter().map(ToString::to_string).collect();
        json!({ "to": to, "upstream": meant.upstream })
    };
    json!({
        "transparent": mode.transparent,
        "destinations": mode.destinations.iter().map(intended).collect::<Vec<_>>(),
        "routes": mode.routes.iter().map(route).collect::<Vec<_>>(),
        "idle_timeout": format_duration(mode.idle_timeout.unwrap_or_default()),
        "leave_timeout": format_duration(mode.leave_timeout),
        "rebalance": mode.rebalance,
    })
}

/// Adds the keys of `more`, and of the maps in it.
fn merge(all: &mut Value, more: Value) {
    match (all, more) {
        (Value::Object(all), Value::Object(more)) => {
            for (key, value) in more {
                merge(all.entry(key).or_insert(Value::Null), value);
            }
        }
        (all, more) => {
            debug_assert!(all.is_null(), "{all} is printed under a key that has {more} too");
            *all = more;
        }
    }
}

fn cert_paths(paths: &CertPaths) -> Value {
    json!({
        "cert_file": paths.cert_file.to_string_lossy(),
        "key_file": paths.key_file.to_string_lossy(),
    })
}

fn optional(path: Option<&PathBuf>) -> String {
    path.map(|path| path.to_string_lossy().into_owned()).unwrap_or_default()
}
