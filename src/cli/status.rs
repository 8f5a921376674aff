//! `jackstay status`: what a running jackstay knows, as a table that a person reads in seconds.

use std::fmt::Write as _;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::ExitCode;
use std::time::Duration;

use serde_json::Value;

/// A local answer that takes longer is none.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Asks the admin endpoint and prints what it says.
pub fn run(admin: SocketAddr) -> ExitCode {
    match fetch(admin, "/status") {
        Ok(status) => {
            let _ = io::stdout().lock().write_all(table(&status).as_bytes());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("no status from http://{admin}/status: {error}; is jackstay running there?");
            ExitCode::FAILURE
        }
    }
}

/// Asks the admin endpoint for a JSON page.
pub fn fetch(admin: SocketAddr, path: &str) -> io::Result<Value> {
    let mut stream = TcpStream::connect_timeout(&admin, TIMEOUT)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    write!(stream, "GET {path} HTTP/1.0\r\nHost: {admin}\r\n\r\n")?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    let body = answer
        .windows(4)
        .position(|window| window == b"\r\n\r\n")
        .map(|end| &answer[end + 4..])
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "not an HTTP answer"))?;
    serde_json::from_slice(body).map_err(io::Error::from)
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or("-")
}

fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value[key].as_array().map_or(&[], Vec::as_slice)
}

/// The status as text; unknown parts are dashes, so that versions may differ.
fn table(status: &Value) -> String {
    let mut out = String::new();
    let _ = writeln!(
        out,
        "jackstay {}, since {}{}",
        text(status, "version"),
        text(status, "started_at"),
        if status["draining"] == true { ", draining" } else { "" }
    );
    for listener in list(status, "listeners") {
        let bind: Vec<_> = list(listener, "bind").iter().filter_map(Value::as_str).collect();
        let _ = writeln!(
            out,
            "\nlistener {} on {} -> {}",
            text(listener, "name"),
            bind.join(", "),
            text(listener, "upstream")
        );
        for identity in list(listener, "identities") {
            let error = identity["error"].as_str().map_or(String::new(), |e| format!(" ({e})"));
            let _ = writeln!(
                out,
                "  identity {} {}{error}",
                text(identity, "state"),
                identity["subject"].as_str().unwrap_or_else(|| text(identity, "cert_file")),
            );
        }
    }
    for upstream in list(status, "upstreams") {
        let _ = writeln!(out, "\nupstream {}", text(upstream, "name"));
        let _ = writeln!(
            out,
            "  {:<24} {:<10} {:>5} {:>7} {:>7} {:>9}  REASON",
            "ENDPOINT", "STATE", "CONNS", "STREAMS", "WATCHES", "RTT"
        );
        for endpoint in list(upstream, "endpoints") {
            let connections = list(endpoint, "connections");
            let sum = |key: &str| connections.iter().filter_map(|c| c[key].as_u64()).sum::<u64>();
            let rtt = connections.iter().filter_map(|c| c["rtt_ms"].as_f64()).reduce(f64::min);
            let _ = writeln!(
                out,
                "  {:<24} {:<10} {:>5} {:>7} {:>7} {:>9}  {} (since {})",
                text(endpoint, "address"),
                text(endpoint, "state"),
                connections.len(),
                sum("streams"),
                sum("watches"),
                rtt.map_or("-".to_owned(), |rtt| format!("{rtt:.2} ms")),
                text(endpoint, "reason"),
                text(endpoint, "since"),
            );
            if let Some(at) = endpoint["last_ejection"]["at"].as_str() {
                let why = text(&endpoint["last_ejection"], "reason");
                let _ = writeln!(out, "  {:<24} last ejected {at}: {why}", "");
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_table_of_what_is_there() {
        let status = json!({
            "version": "1", "started_at": "now", "draining": false,
            "listeners": [{"name": "apiserver", "bind": ["127.0.0.1:7443"], "upstream": "cp",
                "identities": [{"state": "awaited", "cert_file": "/k.pem", "error": "missing"}]}],
            "upstreams": [{"name": "cp", "endpoints": [{"address": "10.0.0.1:6443",
                "state": "ready", "reason": "/readyz is ok", "since": "now",
                "connections": [{"streams": 3, "watches": 2, "rtt_ms": 0.5}],
                "last_ejection": {"at": "then", "reason": "refused"}}]}],
        });
        let text = table(&status);
        for part in [
            "apiserver on 127.0.0.1:7443 -> cp",
            "awaited /k.pem (missing)",
            "10.0.0.1:6443",
            "0.50 ms",
            "/readyz is ok",
            "last ejected then: refused",
        ] {
            assert!(text.contains(part), "no `{part}` in\n{text}");
        }
    }

    #[test]
    fn another_shape_is_no_panic() {
        for odd in
            [json!(null), json!([]), json!({"listeners": 3, "upstreams": [{"endpoints": [1]}]})]
        {
            table(&odd);
        }
    }
}
