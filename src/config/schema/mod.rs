//! The schema: every key with its type, its bounds and its default.
//!
//! The `read` functions walk the merged tree once. They report a wrong value, continue with a
//! placeholder, and collect the values that the rules between keys compare (`References`).

mod listener;
mod upstream;

use std::num::NonZero;
use std::time::Duration;

use super::address::parse_bind;
use super::listener::Listener;
use super::logging::{AccessLog, Level, Log, LogFormat};
use super::model::{Admin, Config, Shutdown, Upstream, UsedBy};
use super::node::{Fields, Node};
use super::report::Report;
use super::rules::References;
use super::units::{HOUR, SECOND};

/// Reads the whole tree. The configuration is valid only if `report` has no errors.
pub(super) fn read(root: &Node<'_>, report: &mut Report) -> (Config, References) {
    let mut references = References::default();
    let mut top = root.fields(report);

    let mut fields = top.section(report, "admin");
    let node = fields.get(report, "bind");
    let bind = node.parse(report, "text: an address such as 127.0.0.1:9643", parse_bind);
    if let Some(bind) = bind {
        if !bind.ip().is_loopback() {
            let message = "not a loopback address: everyone who reaches it can read status and \
                           metrics";
            report.warn(&node.path, message);
        }
        references.binds.push((node.path, bind));
    }
    let socket = fields.get(report, "socket").file(report);
    let admin = Admin { bind: bind.unwrap_or(([127, 0, 0, 1], 0).into()), socket };
    fields.finish(report);

    let state_dir = top.get(report, "state_dir").file(report);
    let workers = workers(&top.get(report, "workers"), report);
    let mark = mark(&top.get(report, "mark"), report);
    let log = log(top.section(report, "log"), report);

    let mut fields = top.section(report, "shutdown");
    let drain_timeout =
        fields.get(report, "drain_timeout").duration(report, 20 * SECOND, Duration::ZERO..=HOUR);
    fields.finish(report);

    let items = top.required_items(report, "upstreams", "at least one upstream");
    references.has_upstreams = !items.is_empty();
    let mut upstreams: Vec<Upstream> =
        items.iter().map(|node| upstream::read(node, &mut references, report)).collect();

    let items = top.required_items(report, "listeners", "at least one listener");
    let listeners: Vec<Listener> =
        items.iter().map(|node| listener::read(node, &mut references, report)).collect();
    top.finish(report);
    for upstream in &mut upstreams {
        upstream.used_by = used_by(&upstream.name, &listeners);
    }

    let shutdown = Shutdown { drain_timeout };
    (Config { admin, state_dir, workers, mark, log, shutdown, upstreams, listeners }, references)
}

fn used_by(upstream: &str, listeners: &[Listener]) -> UsedBy {
    let mut used_by = UsedBy::default();
    for listener in listeners.iter().filter(|l| l.upstreams().any(|name| name == upstream)) {
        used_by.terminate |= listener.terminate().is_some();
        used_by.passthrough |= listener.passthrough().is_some();
    }
    used_by
}

/// A number in decimal, or in hexadecimal as nftables prints marks.
fn mark(node: &Node<'_>, report: &mut Report) -> u32 {
    let hexadecimal = |text: &str| {
        let digits = text.strip_prefix("0x").unwrap_or_default();
        u32::from_str_radix(digits, 16).map_err(|error| error.to_string())
    };
    let mut ignored = Report::default();
    if let Some(mark) = node.parse(&mut ignored, "", hexadecimal) {
        return mark;
    }
    node.number_as(report, "a whole number such as 0x306a", 0, 0..=u32::MAX)
}

fn workers(node: &Node<'_>, report: &mut Report) -> usize {
    let mut ignored = Report::default();
    if node.parse(&mut ignored, "", |text| Ok(text == "auto")) == Some(true) {
        return std::thread::available_parallelism().map_or(1, NonZero::get);
    }
    node.number_as(report, "a whole number or auto", 1, 1..=256) as usize
}

fn log(mut fields: Fields<'_>, report: &mut Report) -> Log {
    let level = fields.get(report, "level").word(report, &Level::NAMES, Level::Info);
    let format = fields.get(report, "format").word(report, &LogFormat::NAMES, LogFormat::Text);
    let access = fields.get(report, "access").word(report, &AccessLog::NAMES, AccessLog::Errors);
    fields.finish(report);
    Log { level, format, access }
}
