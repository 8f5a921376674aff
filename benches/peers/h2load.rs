//! The request load: `h2load`, an independent program that uses little CPU, with 16 streams on each connection.

use std::{net::SocketAddr, path::Path, process::Command, time::Duration};

use crate::{Result, origin, process::Process};

/// Connections of the usual load.
pub const CONNECTIONS: u32 = 8;
const STREAMS: u32 = 16;

/// The result of one run.
pub struct Load {
    /// The number of responses with a status of 2xx.
    pub requests: f64,
    /// The number of other responses and of requests without a response.
    pub failed: f64,
    /// The rate that h2load reports.
    pub per_second: f64,
}

/// How much h2load sends.
#[derive(Clone, Copy)]
pub enum Amount {
    /// As many requests as possible in this time (whole seconds).
    Time(Duration),
    /// This number of requests.
    Requests(u32),
}

/// Time in which a number of requests must be complete.
const MOST: Duration = Duration::from_secs(60);

/// Loads `address`. h2load has no option for a client certificate, so it sends a bearer token, as pods do.
pub async fn run(
    program: &Path,
    address: SocketAddr,
    connections: u32,
    amount: Amount,
    log: &Path,
) -> Result<Load> {
    let (option, time) = match amount {
        Amount::Time(time) => (["-D".into(), time.as_secs().to_string()], time),
        Amount::Requests(requests) => (["-n".into(), requests.to_string()], MOST),
    };
    let mut command = Command::new(program);
    command
        .args([format!("-c{connections}"), format!("-m{STREAMS}"), "-t1".into()])
        .args(option)
        .args(["--tls13-ciphers=TLS_AES_128_GCM_SHA256", "-H", "authorization: Bearer bench"])
        .arg(format!("https://{address}{}", origin::OBJECT));
    let mut process = Process::start(command, log)?;
    let status = process.wait(time + Duration::from_secs(20)).await;
    let out = process.output();
    if !status.map_err(|error| format!("h2load {error}"))?.success() {
        return Err(format!("h2load failed:\n{out}").into());
    }
    parse(&out).ok_or_else(|| format!("h2load received no response:\n{out}").into())
}

/// Parses the summary of h2load. Returns `None` if no response had a status of 2xx.
fn parse(out: &str) -> Option<Load> {
    let line = |start: &str| out.lines().find(|line| line.starts_with(start));
    let number = |line: &str, label: &str| -> Option<f64> {
        let before = line.split(',').find_map(|part| part.trim().strip_suffix(label))?;
        before.split_whitespace().last()?.parse().ok()
    };
    let requests = line("requests:")?;
    let load = Load {
        requests: number(line("status codes:")?, "2xx")?,
        // Includes broken requests and timeouts.
        failed: number(requests, "failed")?,
        per_second: number(line("finished in")?, "req/s")?,
    };
    (load.requests > 0.0).then_some(load)
}
