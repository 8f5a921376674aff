//! The table of refusals, and the limits of the configuration.

use std::collections::BTreeSet;

use jackstay_core::admission::{Counted, Refusal};

use crate::observe::names;

/// The row of a refusal in the documentation of this module.
fn row(refusal: Refusal) -> String {
    let metric = match refusal.counted() {
        Counted::Connection(_) => Some(&names::DOWNSTREAM_REFUSED),
        Counted::Shed(_) => Some(&names::SHED),
        Counted::Frames => Some(&names::CLOSED_FOR_FRAMES),
        Counted::Verification(_) => Some(&names::CLIENT_VERIFICATIONS),
        Counted::OwnError(_) => Some(&names::OWN_ERRORS),
        Counted::ResponseCut => Some(&names::RESPONSES_CUT),
        Counted::Uncounted => None,
    };
    let label = refusal.counted().label();
    let metric = metric.map_or("none".to_owned(), |metric| format!("`{}`, `{label}`", metric.name));
    let keys: Vec<_> = refusal.limits().iter().map(|key| format!("`{key}`")).collect();
    let keys = if keys.is_empty() { "fixed".to_owned() } else { keys.join(", ") };
    let (reason, answer) = (refusal.reason(), refusal.answer());
    format!("//! | `{refusal:?}` | {keys} | `{reason}` | {metric} | `{answer:?}` |")
}

#[test]
fn documentation_has_the_row_of_each_refusal() {
    let rows: Vec<_> = Refusal::ALL.into_iter().map(row).collect();
    let documented =
        include_str!("mod.rs").lines().skip_while(|line| !line.contains("| refusal |"));
    let documented: Vec<_> = documented.skip(2).take(rows.len() + 1).collect();
    assert_eq!(documented, [&rows[..], &["//!".to_owned()]].concat(), "{}", rows.join("\n"));
}

/// The keys below `limits` in the example of the configuration, and `memory_limit`.
fn configured_limits() -> BTreeSet<String> {
    let (mut keys, mut limits) = (BTreeSet::new(), None);
    for line in include_str!("../../../config/jackstay.yaml").lines() {
        let indent = line.len() - line.trim_start().len();
        let Some((key, _)) = line.trim().split_once(':') else { continue };
        match limits {
            Some(outer) if indent > outer => drop(keys.insert(format!("limits.{key}"))),
            _ => limits = (key == "limits").then_some(indent),
        }
        if key == "memory_limit" {
            keys.insert(key.to_owned());
        }
    }
    keys
}

#[test]
fn each_limit_of_the_configuration_has_a_refusal() {
    let refusals = Refusal::ALL.into_iter().flat_map(Refusal::limits);
    let named: BTreeSet<_> = refusals.map(|key| (*key).to_owned()).collect();
    let of_upstreams = ["connections.max", "connections.max_streams"].map(str::to_owned);
    let configured: BTreeSet<_> = configured_limits().into_iter().chain(of_upstreams).collect();
    assert_eq!(named, configured);
}
