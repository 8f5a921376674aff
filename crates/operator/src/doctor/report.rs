//! Prints observations and findings as text or as JSON.

use std::fmt::Write as _;

use jackstay_config::api_root::DEFAULT_AUTHORITY;
use serde::Serialize;
use serde_json::{Value, json};

use super::findings::{Finding, Level, has_problems};
use super::observations::{
    EndpointObservation, EndpointSource, Observations, Resolution, Step, percentile,
};

/// The report as JSON: findings, a summary of the steps and all observations.
pub fn json(observations: &Observations, findings: &[Finding], notes: &[String]) -> Value {
    let summary = |endpoint: &EndpointObservation| json!({ "address": endpoint.address, "steps": rows(endpoint) });
    let summary: Vec<Value> = observations.endpoints.iter().map(summary).collect();
    json!({
        "ok": !has_problems(findings),
        "findings": findings,
        "notes": notes,
        "summary": summary,
        "observations": observations,
    })
}

/// The report as text. The findings come last, so that they are above the prompt of the shell.
pub fn text(observations: &Observations, findings: &[Finding], notes: &[String]) -> String {
    let mut out = String::new();
    for endpoint in &observations.endpoints {
        table(endpoint, &mut out);
    }
    if let Some(dns) =
        observations.dns.as_ref().filter(|dns| dns.servers.iter().any(|s| s.asked > 0))
    {
        for server in &dns.servers {
            let (ip, answered, asked) = (server.address.ip(), server.answered, server.asked);
            let time = server.p50_ms.map(|ms| format!(", {:.1} ms", ms.0)).unwrap_or_default();
            let _ = writeln!(out, "name server {ip}  answered {answered} of {asked}{time}");
        }
        out.push('\n');
    }
    for note in notes {
        let _ = writeln!(out, "note: {note}");
    }
    let problems = findings.iter().filter(|f| f.level == Level::Problem).count();
    let _ = match problems {
        0 => writeln!(out, "No problem found."),
        1 => writeln!(out, "1 problem found."),
        n => writeln!(out, "{n} problems found, the most likely cause first."),
    };
    for (i, finding) in findings.iter().enumerate() {
        let mark = if finding.level == Level::Problem { "" } else { "(note) " };
        let _ = writeln!(out, "\n{}. {mark}{}", i + 1, finding.what);
        if !finding.because.is_empty() {
            let _ = writeln!(out, "   Seen: {}.", finding.because.trim_end_matches('.'));
        }
        let _ = writeln!(out, "   Do:   {}", finding.advice);
    }
    out
}

/// A step in all fresh connections.
#[derive(Serialize)]
struct Row {
    step: &'static str,
    ok: usize,
    tried: usize,
    p50_ms: Option<f64>,
    p99_ms: Option<f64>,
}

/// One row for each step that was tried.
fn rows(endpoint: &EndpointObservation) -> Vec<Row> {
    let mut rows = Vec::new();
    for step in Step::ALL {
        let times = endpoint.times(step);
        let (ok, failed) = (times.len(), endpoint.failures(step).count());
        if ok + failed > 0 {
            let (p50_ms, p99_ms) = (percentile(&times, 0.5), percentile(&times, 0.99));
            rows.push(Row { step: step.as_str(), ok, tried: ok + failed, p50_ms, p99_ms });
        }
    }
    rows
}

/// Where the API begins, if that is configured.
fn api_root(endpoint: &EndpointObservation, out: &mut String) {
    if !endpoint.path_prefix.is_empty() {
        let _ = writeln!(out, "  API below the path {}", endpoint.path_prefix);
    }
    if endpoint.authority != DEFAULT_AUTHORITY {
        let _ = writeln!(out, "  requests with :authority {}", endpoint.authority);
    }
}

fn table(endpoint: &EndpointObservation, out: &mut String) {
    let _ = write!(out, "{}", endpoint.address);
    if let Resolution::Addresses(ips) = &endpoint.resolved
        && !endpoint.address.contains(&ips[0].to_string())
    {
        let ips: Vec<_> = ips.iter().map(ToString::to_string).collect();
        let _ = write!(out, " ({})", ips.join(", "));
    }
    if endpoint.source == EndpointSource::Cluster {
        out.push_str(" (direct, named by the cluster)");
    }
    let name = &endpoint.server_name;
    let _ = if endpoint.is_verified() {
        writeln!(out, ", verified as {name}")
    } else if endpoint.verifies {
        writeln!(out, ", not verified (must be {name})")
    } else {
        writeln!(out, ", not verified (no CA)")
    };
    api_root(endpoint, out);
    let rows = rows(endpoint);
    if !rows.is_empty() {
        let _ = writeln!(out, "  {:<14} {:>9} {:>10} {:>10}", "", "ok", "p50 ms", "p99 ms");
    }
    let ms = |value: Option<f64>| value.map_or("-".to_owned(), |ms| format!("{ms:.1}"));
    for Row { step, ok, tried, p50_ms, p99_ms } in rows {
        let ok = format!("{ok}/{tried}");
        let _ = writeln!(out, "  {step:<14} {ok:>9} {:>10} {:>10}", ms(p50_ms), ms(p99_ms));
    }
    for connection in &endpoint.long_lived {
        let ok = connection.pongs;
        let (p50, p99) = (connection.p50_ms.map(|m| m.0), connection.p99_ms.map(|m| m.0));
        let _ = write!(out, "  {:<14} {ok:>9} {:>10} {:>10}", "long-lived", ms(p50), ms(p99));
        let (late, retransmitted) = (connection.late, connection.retransmitted);
        if late > 0 || retransmitted > 0 {
            let _ = write!(out, "  {late} late, {retransmitted} retransmitted");
        }
        if let Some(silent) = connection.silent_ms {
            let _ = write!(out, "  then silent for {:.1} s", silent.0 / 1000.0);
        }
        if let Some(ended) = &connection.ended {
            let _ = write!(out, "  ended: {ended}");
        }
        out.push('\n');
    }
    if let Some(idle) = &endpoint.idle {
        let state = if idle.alive { "answers" } else { "no answer" };
        let _ = writeln!(out, "  idle for {:.0} s: {state}", idle.for_ms.0 / 1000.0);
    }
    if let Some(version) = &endpoint.version {
        let _ = writeln!(out, "  Kubernetes {}", version.git_version);
    }
    if let Some(certificate) = &endpoint.certificate {
        let _ = writeln!(out, "  certificate valid until {}", certificate.not_after);
    }
    if let Some(skew) = endpoint.clock_skew_s {
        let _ = writeln!(out, "  clock {skew:+.1} s");
    }
    out.push('\n');
}
