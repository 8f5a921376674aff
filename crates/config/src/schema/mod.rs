//! The schema: every key with its type, its bounds and its default.
//!
//! The `read` functions walk the merged tree once. They report an invalid value, continue with a
//! placeholder, and collect the values that the rules between keys compare (`References`).

mod admin;
mod listener;
mod upstream;

use std::num::NonZero;
use std::time::Duration;

use super::listener::Listener;
use super::logging::{AccessLog, Level, Log, LogFormat};
use super::model::{Config, Shutdown, UsedBy};
use super::node::{Fields, Node};
use super::rules::References;
use super::sandbox::{Sandbox, Seccomp, Switch};
use super::units::{HOUR, SECOND};

/// Reads the whole tree. The configuration is valid only if the report of `root` has no errors.
pub(super) fn read(root: &Node<'_>) -> (Config, References) {
    let mut references = References::default();
    let mut top = root.fields();

    let admin = admin::read(top.section("admin"), &mut references);

    let state_dir = top.get("state_dir").file();
    let workers = workers(&top.get("workers"));
    let identity_lane = top.get("identity_lane").flag(true);
    let mark = mark(&top.get("mark"));
    let memory_limit = top.get("memory_limit").memory_limit(16 << 20..=1 << 40);
    let log = log(top.section("log"));

    let mut fields = top.section("shutdown");
    let drain_timeout = fields.get("drain_timeout").duration(20 * SECOND, Duration::ZERO..=HOUR);
    fields.finish();

    let sandbox = sandbox(top.section("sandbox"));

    let items = top.required_items("upstreams", "at least one upstream");
    references.has_upstreams = !items.is_empty();
    let mut upstreams: Vec<_> =
        items.iter().map(|node| upstream::read(node, &mut references)).collect();
    let items = top.required_items("listeners", "at least one listener");
    let listeners: Vec<_> =
        items.iter().map(|node| listener::read(node, &mut references)).collect();
    top.finish();
    for upstream in &mut upstreams {
        upstream.used_by = used_by(&upstream.name, &listeners);
    }

    let shutdown = Shutdown { drain_timeout };
    let config = Config {
        admin,
        state_dir,
        workers,
        identity_lane,
        mark,
        memory_limit,
        log,
        shutdown,
        sandbox,
        upstreams,
        listeners,
    };
    (config, references)
}

fn used_by(upstream: &str, listeners: &[Listener]) -> UsedBy {
    let mut used_by = UsedBy::default();
    for listener in listeners.iter().filter(|l| l.upstreams().any(|name| name == upstream)) {
        used_by.terminate |= listener.terminate().is_some();
        used_by.passthrough |= listener.has_flows();
    }
    used_by
}

/// A number in decimal, or in hexadecimal as nftables prints marks.
fn mark(node: &Node<'_>) -> u32 {
    let digits = node.text().and_then(|text| text.strip_prefix("0x"));
    match digits.map(|digits| u32::from_str_radix(digits, 16)) {
        Some(Ok(mark)) => mark,
        _ => node.number_as("a whole number such as 0x306a", 0, 0..=u32::MAX),
    }
}

fn workers(node: &Node<'_>) -> usize {
    if node.text() == Some("auto") {
        return std::thread::available_parallelism().map_or(1, NonZero::get);
    }
    node.number_as("a whole number or auto", 1, 1..=256) as usize
}

fn log(mut fields: Fields<'_>) -> Log {
    let level = fields.get("level").one_of(Level::Info);
    let format = fields.get("format").one_of(LogFormat::Text);
    let access = fields.get("access").one_of(AccessLog::Errors);
    fields.finish();
    Log { level, format, access }
}

fn sandbox(mut fields: Fields<'_>) -> Sandbox {
    let not_dumpable = fields.get("not_dumpable").one_of(Switch::On);
    let node = fields.get("no_new_privs");
    let no_new_privs = node.one_of(Switch::On);
    let seccomp = fields.get("seccomp").one_of(Seccomp::On);
    let landlock = fields.get("landlock").one_of(Switch::On);
    let is_needed = seccomp != Seccomp::Off || landlock == Switch::On;
    if no_new_privs == Switch::Off && is_needed {
        node.error("seccomp and landlock need it: switch them off too");
    }
    fields.finish();
    Sandbox { not_dumpable, no_new_privs, seccomp, landlock }
}
