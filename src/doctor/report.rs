//! Prints observations and findings as text or as JSON.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::findings::{Finding, Level, has_problems};
use super::observations::{
    EndpointObservation, EndpointSource, Observations, Resolution, Step, percentile,
};

/// Findings, a summary of the steps and all observations.
pub fn json(seen: &Observations, findings: &[Finding], notes: &[String]) -> Value {
    let steps: Vec<Value> = seen
        .endpoints
        .iter()
        .map(|endpoint| {
            let rows: Vec<Value> = rows(endpoint)
                .into_iter()
                .map(|row| {
                    json!({ "step": row.step, "ok": row.ok, "tried": row.tried,
                            "p50_ms": row.p50, "p99_ms": row.p99 })
                })
                .collect();
            json!({ "address": endpoint.address, "steps": rows })
        })
        .collect();
    json!({
        "ok": !has_problems(findings),
        "findings": findings,
        "notes": notes,
        "summary": steps,
        "observations": seen,
    })
}

/// Tables first and findings last, above the prompt.
pub fn text(seen: &Observations, findings: &[Finding], notes: &[String]) -> String {
    let mut out = String::new();
    for endpoint in &seen.endpoints {
        table(endpoint, &mut out);
    }
    if let Some(dns) = seen.dns.as_ref().filter(|dns| dns.servers.iter().any(|s| s.asked > 0)) {
        for server in &dns.servers {
            let _ = write!(out, "name server {}", server.address.ip());
            let _ = write!(out, "  answered {} of {}", server.answered, server.asked);
            if let Some(ms) = server.p50_ms {
                let _ = write!(out, ", {:.1} ms", ms.0);
            }
            out.push('\n');
        }
        out.push('\n');
    }
    for note in notes {
        let _ = writeln!(out, "note: {note}");
    }
    let problems = findings.iter().filter(|f| f.level == Level::Problem).count();
    match problems {
        0 => out.push_str("No problem found.\n"),
        1 => out.push_str("1 problem found.\n"),
        n => {
            let _ = writeln!(out, "{n} problems found, the most likely cause first.");
        }
    }
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

struct Row {
    step: &'static str,
    ok: usize,
    tried: usize,
    p50: Option<f64>,
    p99: Option<f64>,
}

/// One row for each step that was tried.
fn rows(endpoint: &EndpointObservation) -> Vec<Row> {
    let mut rows = Vec::new();
    for step in Step::ALL {
        let mut times: Vec<f64> =
            endpoint.fresh.iter().filter_map(|a| a.time(step)).map(|ms| ms.0).collect();
        times.sort_by(f64::total_cmp);
        let (ok, failed) = (times.len(), endpoint.failures(step).count());
        if ok + failed > 0 {
            let (p50, p99) = (percentile(&times, 0.5), percentile(&times, 0.99));
            rows.push(Row { step: step.as_str(), ok, tried: ok + failed, p50, p99 });
        }
    }
    rows
}

fn table(endpoint: &EndpointObservation, out: &mut String) {
    let _ = write!(out, "{}", endpoint.address);
    match &endpoint.resolved {
        Resolution::Addresses(ips) if !endpoint.address.contains(&ips[0].to_string()) => {
            let ips: Vec<_> = ips.iter().map(ToString::to_string).collect();
            let _ = write!(out, " ({})", ips.join(", "));
        }
        _ => {}
    }
    if endpoint.source == EndpointSource::Cluster {
        out.push_str(" (direct, named by the cluster)");
    }
    let _ = writeln!(out, ", verified as {}", endpoint.server_name);
    let rows = rows(endpoint);
    if !rows.is_empty() {
        let _ = writeln!(out, "  {:<14} {:>9} {:>10} {:>10}", "", "ok", "p50 ms", "p99 ms");
    }
    let ms = |value: Option<f64>| value.map_or("-".to_owned(), |ms| format!("{ms:.1}"));
    for row in rows {
        let ok = format!("{}/{}", row.ok, row.tried);
        let _ = writeln!(out, "  {:<14} {ok:>9} {:>10} {:>10}", row.step, ms(row.p50), ms(row.p99));
    }
    for long_lived in &endpoint.long_lived {
        let ok = long_lived.pongs.to_string();
        let (p50, p99) = (long_lived.p50_ms.map(|m| m.0), long_lived.p99_ms.map(|m| m.0));
        let _ = write!(out, "  {:<14} {ok:>9} {:>10} {:>10}", "long-lived", ms(p50), ms(p99));
        if long_lived.late + long_lived.retransmitted as usize > 0 {
            let _ = write!(
                out,
                "  {} late, {} retransmitted",
                long_lived.late, long_lived.retransmitted
            );
        }
        if let Some(silent) = long_lived.silent_ms {
            let _ = write!(out, "  then silent for {:.1} s", silent.0 / 1000.0);
        }
        if let Some(ended) = &long_lived.ended {
            let _ = write!(out, "  ended: {ended}");
        }
        out.push('\n');
    }
    if let Some(idle) = &endpoint.idle {
        let state = if idle.alive { "answers" } else { "no answer" };
        let _ = writeln!(out, "  idle for {:.0} s: {state}", idle.for_ms.0 / 1000.0);
    }
    if let Some(certificate) = &endpoint.certificate {
        let _ = writeln!(out, "  certificate valid until {}", certificate.not_after);
    }
    if let Some(skew) = endpoint.clock_skew_s {
        let _ = writeln!(out, "  clock {skew:+.1} s");
    }
    out.push('\n');
}
