//! The proxies under test: where each is found, and how it starts. The configuration that it gets is
//! that of its layer ([`l4`], [`l7`]); one worker thread each, since one is jackstay's default.

mod l4;
mod l7;

use std::{
    fs,
    net::{SocketAddr, TcpListener},
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
    time::Duration,
};

use rustls::ClientConfig;
use tokio::time::Instant;

use crate::{
    Result,
    client::Client,
    origin,
    pki::Pki,
    process::{Process, find_program},
    raw,
};

/// How long a proxy may take until it answers its first request.
const START: Duration = Duration::from_secs(15);

/// What stands, or does not stand, between client and origin.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, clap::ValueEnum)]
pub enum Target {
    /// No proxy.
    Direct,
    /// The yardstick of every ratio.
    Haproxy,
    /// At L4 alone.
    Nginx,
    /// Envoy.
    Envoy,
    /// Another binary of jackstay, to see what a change costs.
    Before,
    /// This crate's binary.
    Jackstay,
}

/// What is done with the bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum Layer {
    /// TLS ends in the proxy, and each request is one.
    L7,
    /// Bytes pass.
    L4,
}

impl Target {
    /// The proxies, in the order of the table.
    pub const PROXIES: [Self; 4] = [Self::Haproxy, Self::Nginx, Self::Envoy, Self::Jackstay];

    /// Whether it is a peer at that layer: nginx speaks no HTTP/2 to its upstreams.
    pub fn works_at(self, layer: Layer) -> bool {
        layer == Layer::L4 || self != Self::Nginx
    }

    /// Whether it is what jackstay is compared with.
    fn is_peer(self) -> bool {
        matches!(self, Self::Haproxy | Self::Nginx | Self::Envoy)
    }

    /// What was measured of it. A peer that fails is left out from there on, and the run goes on; a
    /// failure of ours ends it.
    pub fn unless_left_out<T>(self, measured: Result<T>) -> Result<Option<T>> {
        match measured {
            Ok(measured) => Ok(Some(measured)),
            Err(error) if self.is_peer() => {
                println!("{} is left out from here on: {error}", self.name());
                Ok(None)
            }
            Err(error) => Err(format!("{}: {error}", self.name()).into()),
        }
    }

    /// As printed, and as the key in the JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Haproxy => "haproxy",
            Self::Nginx => "nginx",
            Self::Envoy => "envoy",
            Self::Before => "before",
            Self::Jackstay => "jackstay",
        }
    }

    /// Its program, or the reason why it is left out.
    pub fn program(self) -> std::result::Result<PathBuf, &'static str> {
        let found = |variable: &str, default: PathBuf| {
            let file = std::env::var_os(variable).map_or(default, PathBuf::from);
            find_program([file.as_path()])
        };
        match self {
            Self::Direct => Err("not a program"),
            Self::Haproxy => found("HAPROXY_BIN", "haproxy".into())
                .ok_or("no haproxy: run benches/setup or set HAPROXY_BIN"),
            Self::Nginx => found("NGINX_BIN", "nginx".into())
                .ok_or("no nginx: run benches/setup or set NGINX_BIN"),
            Self::Envoy => found("ENVOY_BIN", cache_dir().join("envoy"))
                .ok_or("no envoy: run benches/setup or set ENVOY_BIN"),
            Self::Before => found("JACKSTAY_BENCH_BEFORE", PathBuf::new())
                .ok_or("JACKSTAY_BENCH_BEFORE names no file"),
            Self::Jackstay => found("JACKSTAY_BIN", env!("CARGO_BIN_EXE_jackstay").into())
                .ok_or("no jackstay binary: JACKSTAY_BIN names no file"),
        }
    }
}

/// Where `benches/setup` puts Envoy.
fn cache_dir() -> PathBuf {
    let home = || PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cache");
    std::env::var_os("XDG_CACHE_HOME").map_or_else(home, PathBuf::from).join("jackstay/bench")
}

/// A running proxy.
pub struct Proxy {
    /// Which one.
    pub target: Target,
    /// Where it listens.
    pub address: SocketAddr,
    /// To ask for CPU and memory.
    pub process: Process,
}

/// Everything a proxy is started from.
pub struct Setting<'a> {
    /// Directory of the run: certificates, configurations, logs.
    pub dir: &'a Path,
    /// The certificates in it.
    pub pki: &'a Pki,
    /// Where the origin listens.
    pub origin: SocketAddr,
    /// Flows that it must be able to hold at L4.
    pub flows: usize,
    /// The client that asks whether it is up.
    pub tls: &'a Arc<ClientConfig>,
}

impl Setting<'_> {
    /// Starts `target` and waits for its first answer.
    pub async fn start(&self, target: Target, layer: Layer) -> Result<Proxy> {
        let program = target.program()?;
        let address = free_address()?;
        let file = |name: &str| self.dir.join(format!("{}.{name}", target.name()));
        let (config, text) = match (target, layer) {
            (Target::Direct, _) | (Target::Nginx, Layer::L7) => return Err("no such proxy".into()),
            (Target::Haproxy, Layer::L7) => (file("cfg"), self.haproxy_l7(address)),
            (Target::Envoy, Layer::L7) => (file("yaml"), self.envoy_l7(address)),
            (Target::Before | Target::Jackstay, Layer::L7) => {
                (file("yaml"), self.jackstay_l7(address, free_address()?))
            }
            (Target::Haproxy, Layer::L4) => (file("cfg"), self.haproxy_l4(address)),
            (Target::Nginx, Layer::L4) => (file("conf"), self.nginx_l4(address)),
            (Target::Envoy, Layer::L4) => (file("yaml"), self.envoy_l4(address)),
            (Target::Before | Target::Jackstay, Layer::L4) => {
                (file("yaml"), self.jackstay_l4(address, free_address()?))
            }
        };
        fs::write(&config, text)?;

        let mut command = Command::new(program);
        match target {
            // One process in the foreground, so that its pid is the one we measure and kill.
            Target::Haproxy => command.arg("-db").arg("-f").arg(&config),
            Target::Nginx => command.arg("-c").arg(&config),
            Target::Envoy => command
                .args(["--concurrency", "1", "--disable-hot-restart", "-l", "warn", "-c"])
                .arg(&config),
            _ => command.args(["run", "--config"]).arg(&config),
        };
        let mut process = Process::start(command, &file("log"))?;

        let end = Instant::now() + START;
        loop {
            let answer = match layer {
                Layer::L7 => self.ask(address).await,
                Layer::L4 => raw::once(address).await,
            };
            let error = match answer {
                Ok(()) => return Ok(Proxy { target, address, process }),
                Err(error) => error,
            };
            if let Some(status) = process.ended()? {
                let log = process.output();
                return Err(format!("ended before it answered ({status}) {log}").into());
            }
            if Instant::now() > end {
                let log = process.output();
                return Err(format!("no answer in {START:?}: {error}\n{log}").into());
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn ask(&self, address: SocketAddr) -> Result<()> {
        Client::connect(address, self.tls).await?.get(origin::OBJECT).await?;
        Ok(())
    }
}

/// A port that was free a moment ago; a proxy that loses the race for it fails to start, loudly.
fn free_address() -> Result<SocketAddr> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?)
}
