//! `/status` as text: a summary line, then listeners, endpoints, sources and recent changes.
//!
//! The functions read JSON and show a missing key as a dash, because the version of the running
//! jackstay may differ from that of this command.

mod balancers;
mod canary;
mod certificates;
mod groups;
mod watches;

use std::time::{Duration, SystemTime};

use jackstay_core::quantity::quantity;
use jackstay_sys::utc::Utc;
use serde_json::Value;

use super::table::{Cell, Style, Table, Tone, cut};

/// Terminal width from which reasons are columns. A narrower terminal shows them as notes below rows.
const WIDE: usize = 150;
/// Maximum width of the column with reasons.
const REASON_WIDTH: usize = 60;
/// Age below which an error answered by jackstay itself has the tone [`Tone::Bad`].
const RECENT: Duration = Duration::from_secs(60);

/// Formats the status as text.
pub(super) fn text(status: &Value, style: Style) -> String {
    let view = View {
        now: parse_time(&status["now"]).unwrap_or_else(SystemTime::now),
        wide: style.width.is_none_or(|width| width >= WIDE),
        style,
    };
    let mut out = String::new();
    view.summary(status, &mut out);
    view.memory(&status["memory"], &mut out);
    view.threads(&status["threads"], &mut out);
    view.listeners(status, &mut out);
    for upstream in list_at(status, "upstreams") {
        view.endpoints(upstream, &mut out);
        view.balancers(upstream, &mut out);
        view.failing_groups(upstream, &mut out);
        view.failing_webhooks(upstream, &mut out);
        view.restore(upstream, &mut out);
        view.unordered_groups(upstream, &mut out);
        view.unknown_parameters(upstream, &mut out);
        view.gzip_failure(upstream, &mut out);
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
    /// The summary line, and the last reload if it failed.
    fn summary(&self, status: &Value, out: &mut String) {
        let endpoints: Vec<&Value> =
            list_at(status, "upstreams").iter().flat_map(|u| list_at(u, "endpoints")).collect();
        let ready = endpoints.iter().filter(|e| e["state"] == "ready").count();
        let tone = match ready {
            0 => Tone::Bad,
            _ if ready < endpoints.len() => Tone::Warn,
            _ => Tone::Good,
        };
        let sum = |key: &str| endpoints.iter().filter_map(|e| e[key].as_u64()).sum::<u64>();
        let mut parts = vec![
            self.style.paint(
                &format!("jackstay {} ({})", text_at(status, "version"), text_at(status, "commit")),
                Tone::Strong,
            ),
            format!("up {}", self.ago(&status["started_at"])),
            self.style.paint(&format!("{ready} of {} endpoints ready", endpoints.len()), tone),
            format!(
                "{} ({})",
                quantity(sum("streams"), "stream"),
                quantity(sum("watches"), "watch")
            ),
            format!("{}, {} of them 5xx", quantity(sum("answers"), "answer"), sum("errors")),
        ];
        let own: Vec<&Value> =
            list_at(status, "listeners").iter().flat_map(|l| list_at(l, "own_errors")).collect();
        let count: u64 = own.iter().filter_map(|error| error["count"].as_u64()).sum();
        if count > 0 {
            let recent = own.iter().any(|error| self.own_error_tone(error) == Tone::Bad);
            let tone = if recent { Tone::Bad } else { Tone::Dim };
            let text = format!("{} answered by jackstay itself", quantity(count, "error"));
            parts.push(self.style.paint(&text, tone));
        }
        if status["draining"] == true {
            parts.push(self.style.paint("draining", Tone::Warn));
        }
        out.push_str(&parts.join("  ·  "));
        out.push('\n');
        let reload = &status["config"]["last_reload"];
        if reload["outcome"] == "failed" {
            let why =
                list_at(reload, "errors").iter().filter_map(Value::as_str).collect::<Vec<_>>();
            let text = format!(
                "last reload {} ago failed, the old configuration stays: {}",
                self.ago(&reload["at"]),
                why.join("; ")
            );
            out.push_str(&self.style.paint(&text, Tone::Bad));
            out.push('\n');
        }
        self.sandbox(&status["sandbox"], out);
    }

    /// The restrictions of the process. A restriction that is not in use has a colour.
    fn sandbox(&self, sandbox: &Value, out: &mut String) {
        if sandbox.is_null() {
            return;
        }
        let keys = ["not_dumpable", "no_new_privs", "seccomp", "landlock"];
        let text = keys.map(|key| format!("{key} {}", text_at(sandbox, key))).join(", ");
        let complete = keys.iter().all(|key| sandbox[*key] == "on");
        let tone = if complete { Tone::Dim } else { Tone::Warn };
        out.push_str(&self.style.paint(&format!("sandbox: {text}"), tone));
        out.push('\n');
    }

    /// What clients make jackstay hold, and what was shed for lack of memory.
    fn memory(&self, memory: &Value, out: &mut String) {
        let (Some(used), Some(limit)) =
            (memory["used_bytes"].as_u64(), memory["limit_bytes"].as_u64())
        else {
            return;
        };
        let mib = |bytes: u64| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
        let mut text = format!("memory for clients: {} of {}", mib(used), mib(limit));
        let shed = memory["shed"].as_object().into_iter().flatten();
        let shed: Vec<_> = shed.map(|(reason, count)| format!("{count} {reason}")).collect();
        if !shed.is_empty() {
            text.push_str("; shed: ");
            text.push_str(&shed.join(", "));
        }
        let tone = if shed.is_empty() { Tone::Dim } else { Tone::Warn };
        out.push_str(&self.style.paint(&text, tone));
        out.push('\n');
    }

    /// The client connections of the workers and of the identity lane.
    fn threads(&self, threads: &Value, out: &mut String) {
        let number = |key: &str| threads[key].as_u64();
        let (Some(workers), Some(connections)) = (number("workers"), number("worker_connections"))
        else {
            return;
        };
        let lane = match (threads["identity_lane"].as_bool(), number("identity_lane_connections")) {
            (Some(true), Some(on_lane)) => quantity(on_lane, "connection"),
            _ => "off".to_owned(),
        };
        let text = format!(
            "{}: {}; identity lane: {lane}",
            quantity(workers, "worker"),
            quantity(connections, "connection")
        );
        out.push_str(&self.style.paint(&text, Tone::Dim));
        out.push('\n');
    }

    fn listeners(&self, status: &Value, out: &mut String) {
        let mut table = Table::new(&[
            "LISTENER",
            "MODE",
            "ADDRESS",
            "UPSTREAM",
            ">CLIENTS",
            ">REQUESTS",
            ">WATCHES",
            ">TUNNELS",
            ">FLOWS",
        ]);
        for listener in list_at(status, "listeners") {
            let bind: Vec<_> = list_at(listener, "bind").iter().filter_map(Value::as_str).collect();
            let address = if bind.is_empty() {
                Cell::text("not bound").tone(Tone::Bad)
            } else {
                Cell::text(bind.join(", "))
            };
            let mut notes = Vec::new();
            notes.extend(listener.get("certificate").map(|c| self.certificate("certificate", c)));
            let ca = Self::expired_ca("client CA bundle", &listener["client_ca"]);
            notes.extend(ca.map(|(text, tone)| Cell::text(text).tone(tone)));
            let identities = list_at(listener, "identities").iter();
            notes.extend(identities.map(|identity| self.certificate("identity", identity)));
            for error in list_at(listener, "own_errors") {
                let answer = match error["code"].as_u64() {
                    Some(code) => format!("{code} {}", text_at(error, "reason")),
                    None => format!("reset, {}", text_at(error, "reason")),
                };
                let times = error["count"].as_u64().unwrap_or_default();
                let ago = self.ago(&error["last"]);
                let text =
                    format!("own error {answer}: {}, last {ago} ago", quantity(times, "time"));
                notes.push(Cell::text(text).tone(self.own_error_tone(error)));
            }
            let mut row = vec![
                Cell::text(text_at(listener, "name")),
                Cell::text(text_at(listener, "mode")),
                address,
                Cell::text(text_at(listener, "upstream")),
            ];
            let counts = ["connections", "requests_in_flight", "watches", "tunnels", "flows"];
            row.extend(counts.map(|key| count(listener, key)));
            table.row(row, notes);
        }
        self.draw(&table, out);
    }

    fn endpoints(&self, upstream: &Value, out: &mut String) {
        let name = text_at(upstream, "name").to_uppercase();
        let mut headings = vec![
            &name, "STATE", "SINCE", ">RTT p50", ">p99", ">CONNS", ">STREAMS", ">WATCHES",
            ">FLOWS", ">5xx",
        ];
        // A jackstay of an earlier version does not report it, and an apiserver may refuse to.
        let has_version = |endpoint: &Value| endpoint["version"].is_string();
        let has_versions = list_at(upstream, "endpoints").iter().any(has_version);
        if has_versions {
            headings.push("VERSION");
        }
        if self.wide {
            headings.extend(["REASON", "LAST EJECTION"]);
        }
        let mut table = Table::new(&headings);
        for endpoint in list_at(upstream, "endpoints") {
            let state = text_at(endpoint, "state");
            let tone = state_tone(state);
            let mut row = vec![
                Cell::text(text_at(endpoint, "address")),
                Cell::text(state).tone(tone),
                Cell::text(self.ago(&endpoint["since"])),
                Cell::text(format_ms(&endpoint["rtt"]["p50_ms"])),
                Cell::text(format_ms(&endpoint["rtt"]["p99_ms"])),
                connections(endpoint),
            ];
            row.extend(["streams", "watches", "flows", "errors"].map(|key| count(endpoint, key)));
            if has_versions {
                row.push(Cell::text(text_at(endpoint, "version")));
            }
            let reason = text_at(endpoint, "reason");
            let ejection = &endpoint["last_ejection"];
            let ejected = ejection["at"].is_string().then(|| {
                format!("{} ago: {}", self.ago(&ejection["at"]), text_at(ejection, "reason"))
            });
            let mut notes = Vec::new();
            notes.extend(tunnelled_watches(endpoint));
            if self.wide {
                let shown = cut(reason, REASON_WIDTH);
                if tone != Tone::Good && shown != reason {
                    notes.push(Cell::text(reason).tone(tone));
                }
                row.push(Cell::text(shown));
                row.push(Cell::text(ejected.as_deref().unwrap_or("never")));
            } else {
                if tone != Tone::Good {
                    notes.push(Cell::text(reason).tone(tone));
                }
                if let Some(text) = ejected.filter(|_| state != "ejected") {
                    notes.push(Cell::text(format!("last ejected {text}")).tone(Tone::Dim));
                }
            }
            notes.extend(ping_limit(endpoint));
            table.row(row, notes);
        }
        self.draw(&table, out);
        self.canary(&upstream["canary"], out);
        if let Some((text, tone)) = Self::expired_ca("apiserver CA bundle", &upstream["ca"]) {
            out.push_str(&self.style.paint(&super::table::clean(&text), tone));
            out.push('\n');
        }
    }

    /// The sources of endpoints; no table if all endpoints are in the configuration.
    fn sources(&self, upstream: &Value, out: &mut String) {
        let sources = list_at(upstream, "sources");
        if sources.is_empty() {
            return;
        }
        let mut table = Table::new(&["SOURCE", "LAST SUCCESS", ">ENDPOINTS", "DETAIL"]);
        for source in sources {
            let age = match &source["last_success"] {
                Value::String(_) => format!("{} ago", self.ago(&source["last_success"])),
                _ => "never".to_owned(),
            };
            let detail = match (source["error"].as_str(), source["note"].as_str()) {
                (Some(error), _) => Cell::text(error).tone(Tone::Warn),
                (None, note) => Cell::text(note.unwrap_or("")).tone(Tone::Dim),
            };
            let row = vec![
                Cell::text(text_at(source, "source")),
                Cell::text(age),
                count(source, "endpoints"),
                detail,
            ];
            table.row(row, Vec::new());
        }
        self.draw(&table, out);
    }

    fn events(&self, status: &Value, out: &mut String) {
        let events = list_at(status, "events");
        if events.is_empty() {
            return;
        }
        let mut table = Table::new(&["LAST CHANGES", "OBJECT", "CHANGE"]);
        for event in events.iter().rev() {
            let times = event["times"].as_u64().filter(|times| *times > 1);
            let text = format!(
                "{} -> {}: {}{}",
                text_at(event, "from"),
                text_at(event, "to"),
                text_at(event, "reason"),
                times.map_or(String::new(), |times| format!(" ({times} times)"))
            );
            let tone =
                if event["bad"] == true { state_tone(text_at(event, "to")) } else { Tone::Plain };
            let row = vec![
                Cell::text(format!("{} ago", self.ago(&event["at"]))),
                Cell::text(format!("{} {}", text_at(event, "kind"), text_at(event, "name"))),
                Cell::text(text).tone(tone),
            ];
            table.row(row, Vec::new());
        }
        self.draw(&table, out);
    }

    /// Appends a table after a blank line.
    fn draw(&self, table: &Table, out: &mut String) {
        out.push('\n');
        table.draw(self.style, out);
    }

    /// The tone of an error answered by jackstay itself: bad while it is recent.
    fn own_error_tone(&self, error: &Value) -> Tone {
        let age = parse_time(&error["last"]).and_then(|last| self.now.duration_since(last).ok());
        if age.is_none_or(|age| age < RECENT) { Tone::Bad } else { Tone::Dim }
    }

    /// The time since a moment, in at most two units.
    fn ago(&self, at: &Value) -> String {
        parse_time(at).map_or("-".to_owned(), |at| {
            format_age(self.now.duration_since(at).unwrap_or_default())
        })
    }
}

fn parse_time(value: &Value) -> Option<SystemTime> {
    value.as_str().and_then(Utc::parse).map(|utc| utc.0)
}

/// `12s`, `3m05s`, `3h12m`, `4d02h`.
fn format_age(duration: Duration) -> String {
    let s = duration.as_secs();
    match s {
        0..60 => format!("{s}s"),
        60..3600 => format!("{}m{:02}s", s / 60, s % 60),
        3600..86_400 => format!("{}h{:02}m", s / 3600, s / 60 % 60),
        _ => format!("{}d{:02}h", s / 86_400, s / 3600 % 24),
    }
}

fn state_tone(state: &str) -> Tone {
    match state {
        "ready" | "live" | "ok" | "loaded" => Tone::Good,
        "ejected" | "no_h2" | "failed" | "unresponsive" | "dead" => Tone::Bad,
        "-" => Tone::Plain,
        _ => Tone::Warn,
    }
}

/// The watches of an endpoint that are not resumed, and why.
fn tunnelled_watches(endpoint: &Value) -> Option<Cell> {
    let watches = endpoint["tunnelled_watches"].as_u64().filter(|watches| *watches > 0)?;
    let watches = quantity(watches, "watch");
    let text = format!(
        "{watches} over WebSocket: not resumed, because frames of an upgrade are not followed"
    );
    Some(Cell::text(text).tone(Tone::Dim))
}

/// The number of connections, and how many of them are not live.
fn connections(endpoint: &Value) -> Cell {
    let Some(all) = endpoint["connections"].as_array() else { return Cell::text("-") };
    let not_live = all.iter().filter(|c| c["state"] != "live").count();
    if not_live == 0 {
        return Cell::text(all.len().to_string());
    }
    Cell::text(format!("{} ({not_live} not live)", all.len())).tone(Tone::Warn)
}

fn count(value: &Value, key: &str) -> Cell {
    match value[key].as_u64() {
        Some(number) => Cell::text(number.to_string()),
        None => Cell::text("-").tone(Tone::Dim),
    }
}

fn format_ms(value: &Value) -> String {
    match value.as_f64() {
        None => "-".to_owned(),
        Some(ms) if ms < 10.0 => format!("{ms:.2} ms"),
        Some(ms) if ms < 1000.0 => format!("{ms:.0} ms"),
        Some(ms) => format!("{:.1} s", ms / 1000.0),
    }
}

/// The text under a key; a dash if there is none.
pub(super) fn text_at<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or("-")
}

/// The list under a key; empty if there is none.
pub(super) fn list_at<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value[key].as_array().map_or(&[], Vec::as_slice)
}

/// The interval of PINGs to an endpoint that limits them.
fn ping_limit(endpoint: &Value) -> Option<Cell> {
    let seconds = endpoint["ping_limit_s"].as_f64()?;
    let text =
        format!("one PING in {seconds} s: it closes connections with more (health.ping_interval)");
    Some(Cell::text(text).tone(Tone::Warn))
}

#[cfg(test)]
mod tests;
