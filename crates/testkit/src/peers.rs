//! Other proxies, for comparisons: their programs, and their configurations at L7. `benches/setup` installs them. Each
//! runs in the foreground with one worker thread; what a configuration does not name has the proxy's default.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

/// A proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peer {
    HaProxy,
    Nginx,
    Envoy,
}

/// A certificate and its key as PEM files: `NAME.crt`, `NAME.key`, and both in `NAME.pem`.
#[derive(Debug, Clone, Copy)]
pub struct Pem<'a> {
    pub dir: &'a Path,
    pub name: &'a str,
}

/// A proxy that terminates TLS and forwards requests.
#[derive(Debug)]
pub struct Terminate<'a> {
    pub listen: SocketAddr,
    pub serving: Pem<'a>,
    /// The CA of client certificates, which the proxy requests then.
    pub client_ca: Option<&'a Path>,
    pub servers: &'a [SocketAddr],
    pub upstream: Upstream<'a>,
}

/// How a proxy speaks to its servers.
#[derive(Debug)]
pub enum Upstream<'a> {
    /// HTTP/1.1 without TLS. `X-Forwarded-For` has the client.
    Http1,
    /// HTTP/2 over TLS. Idle watches stay open, and `/readyz` is checked every 10 s.
    Http2Tls {
        ca: &'a Path,
        /// The name that is verified; without one, any name of the CA is accepted.
        server_name: Option<&'a str>,
        /// The certificate that the proxy presents.
        certificate: Option<Pem<'a>>,
    },
}

impl Pem<'_> {
    fn file(&self, extension: &str) -> PathBuf {
        self.dir.join(format!("{}.{extension}", self.name))
    }

    fn cert(&self) -> PathBuf {
        self.file("crt")
    }

    fn key(&self) -> PathBuf {
        self.file("key")
    }

    /// Writes certificate and key into one file, and returns it.
    fn both(&self) -> PathBuf {
        let file = self.file("pem");
        let both = [self.cert(), self.key()].map(|part| fs::read(part).unwrap());
        fs::write(&file, both.concat()).unwrap();
        file
    }
}

impl Peer {
    /// The program: the file that `HAPROXY_BIN`, `NGINX_BIN` or `ENVOY_BIN` names, or where `benches/setup` installs it.
    pub fn program(self) -> Option<PathBuf> {
        let (variable, name) = match self {
            Self::HaProxy => ("HAPROXY_BIN", PathBuf::from("haproxy")),
            Self::Nginx => ("NGINX_BIN", PathBuf::from("nginx")),
            Self::Envoy => ("ENVOY_BIN", cache_dir().join("envoy")),
        };
        find_program(&std::env::var_os(variable).map_or(name, PathBuf::from))
    }

    /// The command that runs `program` with this configuration file.
    pub fn command(self, program: &Path, config: &Path) -> Command {
        let mut command = Command::new(program);
        match self {
            Self::HaProxy => command.arg("-db").arg("-f"),
            Self::Nginx => command.arg("-c"),
            Self::Envoy => {
                command.args(["--concurrency", "1", "--disable-hot-restart", "-l", "error", "-c"])
            }
        };
        command.arg(config);
        command
    }

    /// The extension of its configuration files.
    pub fn extension(self) -> &'static str {
        match self {
            Self::HaProxy => "cfg",
            Self::Nginx => "conf",
            Self::Envoy => "yaml",
        }
    }

    /// The text of a configuration. nginx does not speak HTTP/2 to its servers.
    pub fn terminate(self, setup: &Terminate<'_>) -> String {
        match self {
            Self::HaProxy => haproxy(setup),
            Self::Nginx => nginx(setup),
            Self::Envoy => envoy(setup).to_string(),
        }
    }
}

/// The path of a program, if it exists. A bare name is searched in `PATH` and in `/usr/sbin`, where Debian installs
/// daemons and which the `PATH` of users often lacks.
pub fn find_program(name: &Path) -> Option<PathBuf> {
    if name.components().count() > 1 {
        return name.is_file().then(|| name.to_owned());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let directories = std::env::split_paths(&path).chain(["/usr/sbin".into()]);
    directories.map(|directory| directory.join(name)).find(|file| file.is_file())
}

/// Directory in which `benches/setup` installs Envoy.
fn cache_dir() -> PathBuf {
    let home = || PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cache");
    std::env::var_os("XDG_CACHE_HOME").map_or_else(home, PathBuf::from).join("jackstay/bench")
}

fn haproxy(setup: &Terminate<'_>) -> String {
    let Terminate { listen, serving, client_ca, servers, upstream } = setup;
    let verify = client_ca
        .map_or_else(String::new, |ca| format!(" ca-file {} verify optional", ca.display()));
    let (options, server) = match upstream {
        Upstream::Http1 => ("    option forwardfor\n", String::new()),
        Upstream::Http2Tls { ca, server_name, certificate } => {
            let name = server_name.map_or_else(String::new, |name| format!(" verifyhost {name}"));
            let certificate = certificate
                .map_or_else(String::new, |pem| format!(" crt {}", pem.both().display()));
            let server = format!(
                " ssl alpn h2 ca-file {}{certificate} verify required{name} check check-alpn h2 inter 10s",
                ca.display()
            );
            ("    http-reuse always\n    option httpchk GET /readyz\n", server)
        }
    };
    let line = |(index, address)| format!("    server s{index} {address}{server}\n");
    let servers = servers.iter().enumerate().map(line).collect::<Vec<_>>().concat();
    format!(
        "\
global
    nbthread 1
    maxconn 4000
defaults
    mode http
    timeout connect 3s
    timeout client 1h
    timeout server 1h
frontend clients
    bind {listen} ssl crt {both} alpn h2,http/1.1{verify}
    default_backend servers
backend servers
{options}{servers}",
        both = serving.both().display()
    )
}

fn nginx(setup: &Terminate<'_>) -> String {
    let Terminate { listen, serving, client_ca, servers, upstream } = setup;
    assert!(matches!(upstream, Upstream::Http1) && client_ca.is_none(), "not supported");
    let (dir, upstream) = (serving.dir.display(), servers[0]);
    let (cert, key) = (serving.cert(), serving.key());
    let (cert, key) = (cert.display(), key.display());
    let temporary = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|name| format!("    {name}_temp_path {dir}/nginx-{name};\n"))
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
        listen {listen} ssl http2;
        ssl_certificate {cert};
        ssl_certificate_key {key};
        location / {{
            proxy_pass http://{upstream};
            proxy_http_version 1.1;
            proxy_set_header Host $host;
            proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
        }}
    }}
}}
"
    )
}

/// The prefixes of types of Envoy.
const TLS: &str = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3";
const HTTP: &str = "type.googleapis.com/envoy.extensions.filters";

/// Envoy's configuration as JSON, which is YAML.
fn envoy(setup: &Terminate<'_>) -> Value {
    let Terminate { servers, upstream, .. } = setup;
    let listener = envoy_listener(setup);
    let endpoints: Vec<_> = servers
        .iter()
        .map(|server| json!({ "endpoint": { "address": envoy_address(*server) } }))
        .collect();
    let mut cluster = json!({
        "name": "servers",
        "connect_timeout": "3s",
        // The default of 1,024 concurrent requests is too low for 10,000 watches.
        "circuit_breakers": { "thresholds": [{
            "max_connections": 20_000, "max_requests": 20_000, "max_pending_requests": 20_000,
        }] },
        "load_assignment": {
            "cluster_name": "servers",
            "endpoints": [{ "lb_endpoints": endpoints }],
        },
    });
    envoy_upstream(&mut cluster, upstream);
    json!({ "static_resources": { "listeners": [listener], "clusters": [cluster] } })
}

fn envoy_listener(setup: &Terminate<'_>) -> Value {
    let Terminate { listen, serving, client_ca, upstream, .. } = setup;
    let mut tls = json!({
        "tls_params": { "tls_maximum_protocol_version": "TLSv1_3" },
        "alpn_protocols": ["h2", "http/1.1"],
        "tls_certificates": [envoy_certificate(serving)],
    });
    if let Some(ca) = client_ca {
        tls["validation_context"] = json!({ "trusted_ca": { "filename": ca } });
    }
    let manager = json!({
        "@type": format!("{HTTP}.network.http_connection_manager.v3.HttpConnectionManager"),
        "stat_prefix": "clients",
        "use_remote_address": matches!(upstream, Upstream::Http1),
        "stream_idle_timeout": "0s",
        "route_config": { "virtual_hosts": [{
            "name": "all",
            "domains": ["*"],
            "routes": [{
                "match": { "prefix": "/" },
                "route": { "cluster": "servers", "timeout": "0s" },
            }],
        }] },
        "http_filters": [{
            "name": "router",
            "typed_config": { "@type": format!("{HTTP}.http.router.v3.Router") },
        }],
    });
    json!({
        "name": "clients",
        "address": envoy_address(*listen),
        "filter_chains": [{
            "transport_socket": {
                "name": "tls",
                "typed_config": {
                    "@type": format!("{TLS}.DownstreamTlsContext"),
                    "common_tls_context": tls,
                },
            },
            "filters": [{ "name": "http", "typed_config": manager }],
        }],
    })
}

fn envoy_certificate(pem: &Pem<'_>) -> Value {
    json!({
        "certificate_chain": { "filename": pem.cert() },
        "private_key": { "filename": pem.key() },
    })
}

fn envoy_address(address: SocketAddr) -> Value {
    json!({ "socket_address": { "address": address.ip(), "port_value": address.port() } })
}

/// Adds HTTP/2 over TLS and health checks to a cluster.
fn envoy_upstream(cluster: &mut Value, upstream: &Upstream<'_>) {
    if let Upstream::Http2Tls { ca, server_name, certificate } = upstream {
        let mut validation = json!({ "trusted_ca": { "filename": ca } });
        let mut tls = json!({
            // Envoy's client uses at most TLS 1.2 by default.
            "tls_params": { "tls_maximum_protocol_version": "TLSv1_3" },
            "alpn_protocols": ["h2"],
            "tls_certificates": certificate.iter().map(envoy_certificate).collect::<Vec<_>>(),
        });
        let mut context = json!({ "@type": format!("{TLS}.UpstreamTlsContext") });
        if let Some(name) = server_name {
            validation["match_typed_subject_alt_names"] =
                json!([{ "san_type": "DNS", "matcher": { "exact": name } }]);
            context["sni"] = json!(name);
        }
        tls["validation_context"] = validation;
        context["common_tls_context"] = tls;
        cluster["transport_socket"] = json!({ "name": "tls", "typed_config": context });
        cluster["health_checks"] = json!([{
            "timeout": "1s",
            "interval": "10s",
            "unhealthy_threshold": 2,
            "healthy_threshold": 2,
            "http_health_check": { "path": "/readyz", "codec_client_type": "HTTP2" },
        }]);
        let options = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions";
        cluster["typed_extension_protocol_options"] = json!({ options: {
            "@type": format!("type.googleapis.com/{options}"),
            // The servers' limit. Otherwise Envoy sends all streams of a burst on one connection and answers those that
            // the server refuses with 503.
            "explicit_http_config": { "http2_protocol_options": { "max_concurrent_streams": 100 } },
        } });
    }
}
