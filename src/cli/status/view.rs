//! `/status` as text that a person reads in five seconds: what is wrong first, then the rest.
//!
//! Pure: JSON in, text out. It reads what it knows and shows dashes for the rest, so that client and
//! server may be of different versions.

use std::time::{Duration, SystemTime};

use serde_json::Value;

use super::grid::{Cell, Grid, Style, Tone};
use crate::observe::counted;
use crate::observe::utc::Utc;

/// Columns of a table with every column; on a narrower terminal reasons stand below their rows.
const WIDE: usize = 150;

/// For how long an error of jackstay's own counts as recent.
const RECENT: Duration = Duration::from_secs(60);

/// The whole status.
pub(super) fn text(status: &Value, style: Style) -> String {
    let view = View {
        now: time(&status["now"]).unwrap_or_else(SystemTime::now),
        wide: style.width.is_none_or(|width| width >= WIDE),
        style,
    };
    let mut out = String::new();
    view.head(status, &mut out);
    view.listeners(status, &mut out);
    for upstream in list(status, "upstreams") {
        view.endpoints(upstream, &mut out);
        view.sources(upstream, &mut out);
    }
    view.events(status, &mut out);
    out
}

struct View {
    now: SystemTime,
    wide: bool,
    style: Style,
}

impl View {
    /// One line: version, age, and what matters most.
    fn head(&self, status: &Value, out: &mut String) {
        let endpoints: Vec<&Value> =
            list(status, "upstreams").iter().flat_map(|u| list(u, "endpoints")).collect();
        let ready = endpoints.iter().filter(|e| e["state"] == "ready").count();
        let tone = match ready {
            0 => Tone::Bad,
            _ if ready < endpoints.len() => Tone::Warn,
            _ => Tone::Good,
        };
        let sum = |key: &str| endpoints.iter().filter_map(|e| e[key].as_u64()).sum::<u64>();
        let mut parts = vec![
            self.style.paint(
                &format!("jackstay {} ({})", word(status, "version"), word(status, "commit")),
                Tone::Strong,
            ),
            format!("up {}", self.ago(&status["started_at"])),
            self.style.paint(&format!("{ready} of {} endpoints ready", endpoints.len()), tone),
            format!("{} ({})", counted(sum("streams"), "stream"), counted(sum("watches"), "watch")),
            format!("{}, {} of them 5xx", counted(sum("answers"), "answer"), sum("errors")),
        ];
        let own: Vec<&Value> =
            list(status, "listeners").iter().flat_map(|l| list(l, "own_errors")).collect();
        let count: u64 = own.iter().filter_map(|error| error["count"].as_u64()).sum();
        if count > 0 {
            let recent = own.iter().any(|error| self.tone_of_error(error) == Tone::Bad);
            let tone = if recent { Tone::Bad } else { Tone::Dim };
            let text = format!("{} answered by jackstay itself", counted(count, "error"));
            parts.push(self.style.paint(&text, tone));
        }
        if status["draining"] == true {
            parts.push(self.style.paint("draining", Tone::Warn));
        }
        out.push_str(&parts.join("  ·  "));
        out.push('\n');
        let reload = &status["config"]["last_reload"];
        if reload["outcome"] == "failed" {
            let why = list(reload, "errors").iter().filter_map(Value::as_str).collect::<Vec<_>>();
            let text = format!(
                "last reload {} ago was refused, the old configuration stays: {}",
                self.ago(&reload["at"]),
                why.join("; ")
            );
            out.push_str(&self.style.paint(&text, Tone::Bad));
            out.push('\n');
        }
    }

    fn listeners(&self, status: &Value, out: &mut String) {
        let mut grid = Grid::new(&[
            Cell::text("LISTENER"),
            Cell::text("MODE"),
            Cell::text("ADDRESS"),
            Cell::text("UPSTREAM"),
            Cell::number("CLIENTS"),
            Cell::number("REQUESTS"),
            Cell::number("WATCHES"),
            Cell::number("TUNNELS"),
            Cell::number("FLOWS"),
        ]);
        for listener in list(status, "listeners") {
            let bind: Vec<_> = list(listener, "bind").iter().filter_map(Value::as_str).collect();
            let address = if bind.is_empty() {
                Cell::text("not bound").tone(Tone::Bad)
            } else {
                Cell::text(bind.join(", "))
            };
            let mut notes = Vec::new();
            for identity in list(listener, "identities") {
                let name =
                    identity["subject"].as_str().unwrap_or_else(|| word(identity, "cert_file"));
                let error = identity["error"].as_str().map(|e| format!(": {e}"));
                let tone = if error.is_some() { Tone::Warn } else { Tone::Dim };
                let state = word(identity, "state");
                let error = error.unwrap_or_default();
                notes.push(Cell::text(format!("identity {state} {name}{error}")).tone(tone));
            }
            for error in list(listener, "own_errors") {
                let answer = match error["code"].as_u64() {
                    Some(code) => format!("{code} {}", word(error, "reason")),
                    None => format!("reset, {}", word(error, "reason")),
                };
                let times = error["count"].as_u64().unwrap_or_default();
                let ago = self.ago(&error["last"]);
                let text =
                    format!("own error {answer}: {}, last {ago} ago", counted(times, "time"));
                notes.push(Cell::text(text).tone(self.tone_of_error(error)));
            }
            let row = vec![
                Cell::text(word(listener, "name")),
                Cell::text(word(listener, "mode")),
                address,
                Cell::text(word(listener, "upstream")),
                count(listener, "connections"),
                count(listener, "requests_in_flight"),
                count(listener, "watches"),
                count(listener, "tunnels"),
                count(listener, "flows"),
            ];
            grid.row(row, notes);
        }
        out.push('\n');
        grid.draw(self.style, out);
    }

    fn endpoints(&self, upstream: &Value, out: &mut String) {
        let mut heads = vec![
            Cell::text(word(upstream, "name").to_uppercase()),
            Cell::text("STATE"),
            Cell::text("SINCE"),
            Cell::number("RTT p50"),
            Cell::number("p99"),
            Cell::number("CONNS"),
            Cell::number("STREAMS"),
            Cell::number("WATCHES"),
            Cell::number("FLOWS"),
            Cell::number("5xx"),
        ];
        if self.wide {
            heads.extend([Cell::text("REASON"), Cell::text("LAST EJECTION")]);
        }
        let mut grid = Grid::new(&heads);
        for endpoint in list(upstream, "endpoints") {
            let state = word(endpoint, "state");
            let tone = tone(state);
            let mut row = vec![
                Cell::text(word(endpoint, "address")),
                Cell::text(state).tone(tone),
                Cell::text(self.ago(&endpoint["since"])),
                Cell::number(milliseconds(&endpoint["rtt"]["p50_ms"])),
                Cell::number(milliseconds(&endpoint["rtt"]["p99_ms"])),
                connections(endpoint),
                count(endpoint, "streams"),
                count(endpoint, "watches"),
                count(endpoint, "flows"),
                count(endpoint, "errors"),
            ];
            let reason = word(endpoint, "reason");
            let ejection = &endpoint["last_ejection"];
            let ejected = ejection["at"].is_string().then(|| {
                format!("{} ago: {}", self.ago(&ejection["at"]), word(ejection, "reason"))
            });
            let mut notes = Vec::new();
            if self.wide {
                let reason =
                    if self.style.width.is_some() { shorten(reason, 60) } else { reason.into() };
                row.push(Cell::text(reason));
                row.push(Cell::text(ejected.as_deref().unwrap_or("never")));
            } else {
                if tone != Tone::Good {
                    notes.push(Cell::text(reason).tone(tone));
                }
                if let Some(text) = ejected.filter(|_| state != "ejected") {
                    notes.push(Cell::text(format!("last ejected {text}")).tone(Tone::Dim));
                }
            }
            grid.row(row, notes);
        }
        out.push('\n');
        grid.draw(self.style, out);
    }

    /// Where the endpoints come from; nothing when all are in the configuration.
    fn sources(&self, upstream: &Value, out: &mut String) {
        let sources = list(upstream, "sources");
        if sources.is_empty() {
            return;
        }
        let mut grid = Grid::new(&[
            Cell::text("SOURCE"),
            Cell::text("LAST SUCCESS"),
            Cell::number("ENDPOINTS"),
            Cell::text("SAYS"),
        ]);
        for source in sources {
            let age = match &source["last_success"] {
                Value::String(_) => format!("{} ago", self.ago(&source["last_success"])),
                _ => "never".to_owned(),
            };
            let said = match (source["error"].as_str(), source["note"].as_str()) {
                (Some(error), _) => Cell::text(error).tone(Tone::Warn),
                (None, note) => Cell::text(note.unwrap_or("")).tone(Tone::Dim),
            };
            let row = vec![
                Cell::text(word(source, "source")),
                Cell::text(age),
                count(source, "endpoints"),
                said,
            ];
            grid.row(row, Vec::new());
        }
        out.push('\n');
        grid.draw(self.style, out);
    }

    fn events(&self, status: &Value, out: &mut String) {
        let events = list(status, "events");
        if events.is_empty() {
            return;
        }
        let mut grid = Grid::new(&[Cell::text("LAST CHANGES"), Cell::text("WHAT"), Cell::text("")]);
        for event in events.iter().rev() {
            let times = event["times"].as_u64().filter(|times| *times > 1);
            let text = format!(
                "{} -> {}: {}{}",
                word(event, "from"),
                word(event, "to"),
                word(event, "reason"),
                times.map_or(String::new(), |times| format!(" ({times} times)"))
            );
            let tone = if event["bad"] == true { tone(word(event, "to")) } else { Tone::Plain };
            let row = vec![
                Cell::text(format!("{} ago", self.ago(&event["at"]))),
                Cell::text(format!("{} {}", word(event, "kind"), word(event, "name"))),
                Cell::text(text).tone(tone),
            ];
            grid.row(row, Vec::new());
        }
        out.push('\n');
        grid.draw(self.style, out);
    }

    /// An error of jackstay's own hurts while it is recent.
    fn tone_of_error(&self, error: &Value) -> Tone {
        let age = time(&error["last"]).and_then(|last| self.now.duration_since(last).ok());
        if age.is_none_or(|age| age < RECENT) { Tone::Bad } else { Tone::Dim }
    }

    /// How long ago a moment was, in two units at most.
    fn ago(&self, at: &Value) -> String {
        time(at).map_or("-".to_owned(), |at| span(self.now.duration_since(at).unwrap_or_default()))
    }
}

fn time(value: &Value) -> Option<SystemTime> {
    value.as_str().and_then(Utc::parse).map(|utc| utc.0)
}

/// `12s`, `3m05s`, `3h12m`, `4d02h`.
fn span(duration: Duration) -> String {
    let s = duration.as_secs();
    match s {
        0..60 => format!("{s}s"),
        60..3600 => format!("{}m{:02}s", s / 60, s % 60),
        3600..86_400 => format!("{}h{:02}m", s / 3600, s / 60 % 60),
        _ => format!("{}d{:02}h", s / 86_400, s / 3600 % 24),
    }
}

fn tone(state: &str) -> Tone {
    match state {
        "ready" | "live" | "ok" | "loaded" => Tone::Good,
        "ejected" | "no-h2" | "failed" | "unresponsive" | "dead" => Tone::Bad,
        "-" => Tone::Plain,
        _ => Tone::Warn,
    }
}

/// How many connections, and how many of them are not well.
fn connections(endpoint: &Value) -> Cell {
    let Some(all) = endpoint["connections"].as_array() else { return Cell::number("-") };
    let unwell = all.iter().filter(|c| c["state"] != "live").count();
    if unwell == 0 {
        return Cell::number(all.len().to_string());
    }
    Cell::number(format!("{} ({unwell} not live)", all.len())).tone(Tone::Warn)
}

fn count(value: &Value, key: &str) -> Cell {
    match value[key].as_u64() {
        Some(number) => Cell::number(number.to_string()),
        None => Cell::number("-").tone(Tone::Dim),
    }
}

fn milliseconds(value: &Value) -> String {
    match value.as_f64() {
        None => "-".to_owned(),
        Some(ms) if ms < 10.0 => format!("{ms:.2} ms"),
        Some(ms) if ms < 1000.0 => format!("{ms:.0} ms"),
        Some(ms) => format!("{:.1} s", ms / 1000.0),
    }
}

fn shorten(text: &str, most: usize) -> String {
    super::grid::cut(text, most)
}

/// The text under a key, or a dash.
pub(super) fn word<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or("-")
}

/// The list under a key, or an empty one.
pub(super) fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value[key].as_array().map_or(&[], Vec::as_slice)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn status() -> Value {
        json!({
            "version": "1.2", "commit": "abc", "now": "2026-07-26T12:00:00Z", "started_at": "2026-07-26T08:48:00Z",
            "draining": false,
            "listeners": [
                {"name": "apiserver", "mode": "terminate", "upstream": "cp",
                 "bind": ["127.0.0.1:7443", "[::1]:7443"], "connections": 3,
                 "requests_in_flight": 90, "watches": 87, "tunnels": 0,
                 "own_errors": [
                    {"code": 429, "reason": "limit", "count": 1, "last": "2026-07-26T11:00:00Z"},
                    {"code": 503, "reason": "no_upstream", "count": 33, "last": "2026-07-26T11:59:57Z"}],
                 "identities": [{"state": "awaited", "cert_file": "/k.pem", "error": "missing"}]},
                {"name": "lb", "mode": "passthrough", "upstream": "cp", "bind": [], "flows": 7}],
            "upstreams": [{"name": "cp",
                "endpoints": [
                    {"address": "10.0.0.1:6443", "state": "ready", "reason": "/readyz is ok",
                     "since": "2026-07-26T08:48:01Z", "rtt": {"p50_ms": 0.42, "p99_ms": 12.6},
                     "connections": [{"state": "live"}, {"state": "suspect"}], "streams": 40,
                     "watches": 29, "flows": 0, "answers": 1234, "errors": 2,
                     "last_ejection": null},
                    {"address": "10.0.0.2:6443", "state": "ejected", "reason": "refused\u{1b}[2J",
                     "since": "2026-07-26T11:59:48.500Z", "rtt": null, "connections": [],
                     "streams": 0, "watches": 0, "answers": 0, "errors": 0,
                     "last_ejection": {"at": "2026-07-26T11:59:48Z", "reason": "refused"}}],
                "sources": [{"source": "dns", "last_success": "2026-07-26T11:58:45Z",
                    "age_seconds": 75, "endpoints": 2, "error": "no answer", "note": null}]}],
            "config": {"last_reload": {"at": "2026-07-26T11:00:00Z", "outcome": "failed",
                "errors": ["f: workers: is no number", "f: x: unknown"]}},
            "events": [
                {"at": "2026-07-26T11:59:48.500Z", "kind": "endpoint", "name": "10.0.0.2:6443",
                 "from": "ready", "to": "ejected", "reason": "refused", "times": 3, "bad": true}],
        })
    }

    #[test]
    fn everything_that_is_promised_is_on_it() {
        let text = text(&status(), Style::default());
        for part in [
            "jackstay 1.2 (abc)  ·  up 3h12m  ·  1 of 2 endpoints ready  ·  40 streams (29 watches)",
            "apiserver  terminate    127.0.0.1:7443, [::1]:7443  cp              3        90       87        0      -",
            "  ·  34 errors answered by jackstay itself\n",
            "      own error 429 limit: 1 time, last 1h00m ago\n",
            "      own error 503 no_upstream: 33 times, last 3s ago\n",
            "identity awaited /k.pem: missing",
            "lb         passthrough  not bound",
            "10.0.0.1:6443  ready    3h11m  0.42 ms  13 ms  2 (1 not live)       40       29      0    2  /readyz is ok  never",
            "10.0.0.2:6443  ejected  11s          -      -               0        0        0      -    0  refused [2J    12s ago: refused",
            "dns     1m15s ago             2  no answer",
            "last reload 1h00m ago was refused, the old configuration stays: f: workers: is no number; f: x",
            "11s ago       endpoint 10.0.0.2:6443  ready -> ejected: refused (3 times)",
        ] {
            assert!(text.contains(part), "no `{part}` in\n{text}");
        }
        assert!(!text.contains('\x1b'), "{text}");
    }

    #[test]
    fn a_narrow_terminal_has_reasons_below_and_no_line_too_long() {
        let style = Style { colour: true, width: Some(100) };
        let text = text(&status(), style);
        assert!(text.contains("\x1b[1;31mejected\x1b[0m"), "{text}");
        assert!(text.contains("\n      \x1b[1;31mrefused [2J\x1b[0m\n"), "{text}");
        assert!(!text.contains("LAST EJECTION"), "{text}");
    }

    #[test]
    fn another_shape_is_no_panic() {
        for odd in [
            json!(null),
            json!([]),
            json!({"listeners": 3, "upstreams": [{"endpoints": [1], "sources": [{}]}], "events": [2]}),
        ] {
            text(&odd, Style::default());
        }
    }

    #[test]
    fn spans_have_two_units_at_most() {
        for (seconds, expected) in
            [(0, "0s"), (59, "59s"), (65, "1m05s"), (3600, "1h00m"), (90_000, "1d01h")]
        {
            assert_eq!(span(Duration::from_secs(seconds)), expected);
        }
    }
}
