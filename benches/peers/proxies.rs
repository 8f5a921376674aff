//! The proxies: their programs and how they start. The configurations are in [`l4`] and [`l7`]; each proxy has one
//! worker thread, jackstay's default.

mod l4;
mod l7;

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
    time::Duration,
};

use jackstay_testkit::child::free_address;
use jackstay_testkit::peers::{Peer, find_program};
use rustls::ClientConfig;
use tokio::time::Instant;

use crate::{
    Result, client::Client, instructions::callgrind_file, origin, pki::Pki, process::Process, raw,
};

/// Timeout for the first response of a new proxy.
const START: Duration = Duration::from_secs(15);

/// The same under callgrind.
const COUNTED_START: Duration = Duration::from_secs(60);
/// callgrind makes system calls in the process, and writes a file when it ends.
const NO_SANDBOX: &str =
    "sandbox: { not_dumpable: off, no_new_privs: off, seccomp: off, landlock: off }\n";

/// A proxy between client and origin, or the direct connection.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, clap::ValueEnum)]
pub enum Target {
    /// No proxy.
    Direct,
    /// The table shows ratios to it.
    Haproxy,
    /// Measured only at L4.
    Nginx,
    Envoy,
    /// Another jackstay binary, to measure the cost of a change.
    Before,
    /// This crate's binary.
    Jackstay,
    /// The same under callgrind ([`crate::instructions`]).
    Counted,
    /// The physical limit, [`crate::tls_relay`]. Measured only under load at L7.
    TlsRelay,
}

/// The proxy mode.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum Layer {
    /// The proxy terminates TLS and forwards requests.
    L7,
    /// The proxy forwards bytes.
    L4,
}

impl Target {
    /// The proxies, in the order of the table.
    pub const PROXIES: [Self; 4] = [Self::Haproxy, Self::Nginx, Self::Envoy, Self::Jackstay];

    /// Whether the proxy supports the layer: nginx does not speak HTTP/2 to upstreams.
    pub fn works_at(self, layer: Layer) -> bool {
        match self {
            Self::Nginx => layer == Layer::L4,
            Self::TlsRelay | Self::Counted => layer == Layer::L7,
            _ => true,
        }
    }

    /// Whether jackstay is compared with this proxy.
    fn is_peer(self) -> bool {
        self.peer().is_some() || self == Self::TlsRelay
    }

    /// Another project's proxy.
    fn peer(self) -> Option<Peer> {
        match self {
            Self::Haproxy => Some(Peer::HaProxy),
            Self::Nginx => Some(Peer::Nginx),
            Self::Envoy => Some(Peer::Envoy),
            _ => None,
        }
    }

    /// Turns a failure of another proxy into `None`: the proxy is skipped for the rest of the phase. A failure of
    /// jackstay or of the direct connection is an error.
    pub fn skip_failed_peer<T>(self, measured: Result<T>) -> Result<Option<T>> {
        match measured {
            Ok(measured) => Ok(Some(measured)),
            Err(error) if self.is_peer() => {
                println!("{} is skipped in this phase: {error}", self.name());
                Ok(None)
            }
            Err(error) => Err(format!("{}: {error}", self.name()).into()),
        }
    }

    /// The name in the table and the key in the JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Haproxy => "haproxy",
            Self::Nginx => "nginx",
            Self::Envoy => "envoy",
            Self::Before => "before",
            Self::Jackstay => "jackstay",
            Self::Counted => "jackstay under callgrind",
            Self::TlsRelay => "tls relay",
        }
    }

    /// The program, or the reason why the proxy is skipped.
    pub fn program(self) -> std::result::Result<PathBuf, &'static str> {
        let found = |variable: &str, default: &str| {
            let file = std::env::var_os(variable).unwrap_or_else(|| default.into());
            find_program(Path::new(&file))
        };
        if let Some(peer) = self.peer() {
            return peer.program().ok_or("not installed: run benches/setup");
        }
        match self {
            Self::Direct | Self::Haproxy | Self::Nginx | Self::Envoy => Err("not a program"),
            Self::Before => {
                found("JACKSTAY_BENCH_BEFORE", "").ok_or("JACKSTAY_BENCH_BEFORE is not a file")
            }
            Self::Jackstay | Self::Counted => found("JACKSTAY_BIN", env!("CARGO_BIN_EXE_jackstay"))
                .ok_or("JACKSTAY_BIN is not a file"),
            Self::TlsRelay => std::env::current_exe().map_err(|_| "this program has no path"),
        }
    }
}

/// A running proxy.
pub struct Proxy {
    pub target: Target,
    pub address: SocketAddr,
    pub process: Process,
    /// Time from the start of the process to the first response.
    pub started: Duration,
}

/// The parameters with which proxies start.
pub struct Environment<'a> {
    /// Directory of the run: certificates, configurations, logs.
    pub dir: &'a Path,
    pub pki: &'a Pki,
    /// Where the origin listens.
    pub origin: SocketAddr,
    /// Number of flows that the proxy must support at L4.
    pub flows: usize,
    /// TLS configuration of the client that waits for the first response.
    pub tls: &'a Arc<ClientConfig>,
}

impl Environment<'_> {
    /// Starts `target` and waits for its first response.
    pub async fn start(&self, target: Target, layer: Layer) -> Result<Proxy> {
        self.start_polled(target, layer, Duration::from_millis(50)).await
    }

    /// The same with this pause between two attempts to get the first response.
    pub async fn start_polled(
        &self,
        target: Target,
        layer: Layer,
        pause: Duration,
    ) -> Result<Proxy> {
        let address = free_address();
        let file = |name: &str| self.dir.join(format!("{}.{layer:?}.{name}", target.name()));
        // A new copy of the program is entirely in the page cache. If the kernel has evicted a part of a file, it maps
        // fewer pages around each page fault, which changes the resident memory of the same binary by up to 1.4 MiB.
        let program = file("program");
        fs::copy(target.program()?, &program)?;
        let (config, text) = match (target, layer) {
            (Target::Direct, _)
            | (Target::Nginx, Layer::L7)
            | (Target::TlsRelay | Target::Counted, Layer::L4) => {
                return Err("no such proxy".into());
            }
            (Target::TlsRelay, Layer::L7) => (file("conf"), String::new()), // it has arguments only
            (Target::Haproxy, Layer::L7) => (file("cfg"), self.peer_l7(Peer::HaProxy, address)),
            (Target::Envoy, Layer::L7) => (file("yaml"), self.peer_l7(Peer::Envoy, address)),
            (Target::Before | Target::Jackstay, Layer::L7) => {
                (file("yaml"), self.jackstay_l7(address, free_address()))
            }
            (Target::Counted, Layer::L7) => {
                let config = self.jackstay_l7(address, free_address()) + NO_SANDBOX;
                (file("yaml"), config)
            }
            (Target::Haproxy, Layer::L4) => (file("cfg"), self.haproxy_l4(address)),
            (Target::Nginx, Layer::L4) => (file("conf"), self.nginx_l4(address)),
            (Target::Envoy, Layer::L4) => (file("yaml"), self.envoy_l4(address)),
            (Target::Before | Target::Jackstay, Layer::L4) => {
                (file("yaml"), self.jackstay_l4(address, free_address()))
            }
        };
        fs::write(&config, text)?;

        let command = match target {
            Target::Counted => {
                let out = callgrind_file(self.dir, "%p");
                let mut command = Command::new("valgrind");
                command.arg("--tool=callgrind");
                command.arg(format!("--callgrind-out-file={}", out.display())).arg(program);
                command.args(["run", "--config"]).arg(&config);
                command
            }
            Target::TlsRelay => {
                let mut command = Command::new(program);
                let addresses = [address.to_string(), self.origin.to_string()];
                command.arg("tls-relay").arg(self.dir).args(addresses);
                command
            }
            _ => {
                let jackstay = || {
                    let mut command = Command::new(&program);
                    command.args(["run", "--config"]).arg(&config);
                    command
                };
                // A single process in the foreground, whose pid is measured and killed.
                target.peer().map_or_else(jackstay, |peer| peer.command(&program, &config))
            }
        };
        let start = Instant::now();
        let mut process = Process::start(command, &file("log"))?;
        loop {
            let response = match layer {
                Layer::L7 => self.request(address).await,
                Layer::L4 => raw::once(address).await,
            };
            let error = match response {
                Ok(()) => {
                    let started = start.elapsed();
                    return Ok(Proxy { target, address, process, started });
                }
                Err(error) => error,
            };
            if let Some(status) = process.try_wait()? {
                let log = process.output();
                return Err(format!("exited before its first response ({status}) {log}").into());
            }
            let limit = if target == Target::Counted { COUNTED_START } else { START };
            if start.elapsed() > limit {
                let log = process.output();
                return Err(format!("no response within {limit:?}: {error}\n{log}").into());
            }
            tokio::time::sleep(pause).await;
        }
    }

    async fn request(&self, address: SocketAddr) -> Result<()> {
        Client::connect(address, self.tls).await?.get(origin::OBJECT).await?;
        Ok(())
    }
}
