//! Compares the errors of the newest version with those of the older ones, and withdraws the share of requests that
//! the newest version gets ([`jackstay_core::canary`]).

use std::sync::Arc;

use jackstay_config::Percent;
use jackstay_core::canary::{Answers, CanaryChange, CanaryEndpoint, INTERVAL};
use jackstay_sys::clock;
use tokio::time::sleep;

use crate::observe::events::{Change, EventKind};
use crate::upstream::Upstream;

/// Watches the answers of all endpoints while the upstream has a canary share. Never returns.
pub async fn run(upstream: Arc<Upstream>) {
    let report = |withdrawn| upstream.metrics.canary_withdrawn(&upstream.name, withdrawn);
    report(false);
    let mut has_share = false;
    loop {
        let share = upstream.config().canary;
        if share != Percent::ZERO {
            has_share = true;
            if let Some(change) = upstream.canary.step(&endpoints(&upstream), clock::now()) {
                report(upstream.canary.is_withdrawn());
                log(&upstream, share, &change);
            }
        } else if has_share {
            has_share = false;
            upstream.canary.reset();
            report(false);
        }
        sleep(INTERVAL).await;
    }
}

fn endpoints(upstream: &Upstream) -> Vec<CanaryEndpoint> {
    let endpoints = upstream.endpoints();
    let known = endpoints.iter().filter_map(|endpoint| Some((endpoint, endpoint.version()?)));
    known
        .map(|(endpoint, version)| {
            let (all, errors) = endpoint.metrics.history().totals();
            CanaryEndpoint {
                label: Arc::clone(&endpoint.label),
                version: version.minor,
                git_version: version.git_version,
                answers: Answers { all, errors },
            }
        })
        .collect()
}

fn log(upstream: &Upstream, share: Percent, change: &CanaryChange) {
    let share = format!("{share} of new requests");
    let (from, to, reason, effect) = match change {
        CanaryChange::Withdrawn(reason) => (
            &*share,
            "withdrawn",
            &**reason,
            "new requests go to the older versions for 10 minutes",
        ),
        CanaryChange::Restored(reason) => {
            ("withdrawn", &*share, *reason, "the newest version takes its share of new requests")
        }
    };
    upstream.metrics.events().changed(&Change {
        kind: EventKind::Upstream,
        upstream: Some(&upstream.name),
        name: "canary",
        detail: "",
        from,
        to,
        reason,
        effect,
        bad: matches!(change, CanaryChange::Withdrawn(_)),
    });
}
