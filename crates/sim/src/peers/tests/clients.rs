//! Each client, and what the checker says of servers that break a rule.

use std::time::Duration;

use super::super::bulk::{self, BulkMode};
use super::super::reader::{self, ReaderPlan};
use super::super::writer::{self, WriterPlan};
use super::super::{hostile, informer, lease};
use super::server::{Order, WatchEnd};
use super::{Clients, run, seconds};
use crate::checker::{Collection, Seen};
use crate::invariants::Findings;

const MAPS: Collection = Collection::CONFIG_MAPS;

impl Clients {
    fn spawn_reader(&mut self) {
        let plan = ReaderPlan {
            collection: MAPS,
            objects: 10,
            interval: Duration::from_millis(50),
            names_versions: false,
        };
        self.spawn(|peer| reader::run(peer, plan));
    }

    fn spawn_writer(&mut self) {
        let plan =
            WriterPlan { collection: MAPS, objects: 10, interval: Duration::from_millis(200) };
        self.spawn(|peer| writer::run(peer, plan));
    }

    fn spawn_informer(&mut self) {
        self.spawn(|peer| informer::run(peer, MAPS));
    }

    fn spawn_all(&mut self) {
        for _ in 0..2 {
            self.spawn_reader();
            self.spawn_writer();
            self.spawn_informer();
        }
    }
}

/// The findings of all clients with a fault from the third second on.
fn with_fault(fault: impl FnOnce(&Clients)) -> Findings {
    let mut findings = Findings::default();
    run(async {
        let mut clients = Clients::new();
        clients.spawn_all();
        clients.pass(seconds(3)).await;
        fault(&clients);
        clients.pass(seconds(3)).await;
        findings = clients.finish().await.0.findings;
    });
    findings
}

#[test]
fn clients_of_a_server_without_faults_see_no_violation() {
    run(async {
        let mut clients = Clients::new();
        clients.spawn_all();
        clients.spawn(|peer| lease::run_kubelet(peer, Collection::NODE_LEASES, "n0".to_owned()));
        clients.spawn(|peer| lease::run_leader(peer, Collection::LEADER_LEASES, "c".to_owned()));
        for mode in [BulkMode::Pages, BulkMode::Whole, BulkMode::Slow] {
            clients.spawn(|peer| bulk::run(peer, MAPS, mode));
        }
        clients.pass(seconds(15)).await;
        let (record, _) = clients.finish().await;
        let found = record.findings;
        assert_eq!(found.violations, [""; 0]);
        assert_eq!((found.failed_reads, found.failed_writes, found.failed_lists), (0, 0, 0));
        assert_eq!((found.relists, found.watches_broken, found.failed_leases), (0, 0, 0));
        assert!(found.reads > 550 && found.writes > 140 && found.lists > 80, "{found}");
        // Each informer has each change, at once.
        assert!(found.events > 250 && found.longest_silence < seconds(1), "{found}");
        let lease = found.longest_lease;
        assert!((seconds(10)..Duration::from_millis(10_500)).contains(&lease), "{lease:?}");
    });
}

#[test]
fn runs_of_one_seed_are_the_same() {
    let mut runs = Vec::new();
    for _ in 0..2 {
        run(async {
            let mut clients = Clients::new();
            let start = jackstay_sys::clock::now();
            clients.spawn_all();
            clients.pass(seconds(5)).await;
            let (record, _) = clients.finish().await;
            let seen = record.observations.into_iter();
            let seen = seen.map(|one| (one.client, one.request, one.ended.at - start, one.seen));
            runs.push(seen.collect::<Vec<_>>());
        });
    }
    assert!(runs[0].len() > 200);
    assert!(runs[0] == runs[1], "the runs differ");
}

#[test]
fn reads_of_an_older_state_go_back() {
    let findings = with_fault(|clients| clients.rig.fault(|faults| faults.stale_at = Some(12)));
    assert!(!findings.violations.is_empty());
    let goes_back = |text: &String| text.contains(": a read goes back: ");
    assert!(findings.violations.iter().all(goes_back), "{:#?}", findings.violations);
}

#[test]
fn reads_of_clients_without_a_group_may_go_back() {
    run(async {
        let mut clients = Clients::new();
        clients.group = None;
        clients.spawn_all();
        clients.pass(seconds(3)).await;
        clients.rig.fault(|faults| faults.stale_at = Some(12));
        clients.pass(seconds(3)).await;
        assert_eq!(clients.finish().await.0.findings.violations, [""; 0]);
    });
}

#[test]
fn write_that_is_made_twice_is_found() {
    let findings = with_fault(|clients| clients.rig.fault(|faults| faults.doubles = true));
    let twice = |text: &&String| text.contains("was carried out 2 times");
    let count = findings.violations.iter().filter(twice).count();
    assert!(count > 5, "{:#?}", findings.violations);
}

#[test]
fn event_that_is_missing_is_found() {
    let findings = with_fault(|clients| {
        let next = clients.rig.server.history.borrow().version() + 2;
        clients.rig.fault(|faults| faults.skips = Some(next));
    });
    let missing = |text: &String| text.contains("came after") || text.contains("came before");
    assert!(findings.violations.iter().all(missing), "{:#?}", findings.violations);
    assert_eq!(findings.violations.len(), 2, "one for each informer");
}

/// How watches end, and whether the informer lists again.
#[test]
fn informer_follows_the_end_of_a_watch_as_client_go() {
    for (end, relists, broken) in [
        (WatchEnd::Clean, false, false),
        (WatchEnd::Torn, false, false),
        (WatchEnd::Reset, true, true),
    ] {
        let found = with_fault(|clients| {
            clients.rig.fault(|faults| faults.watch_end = Some(end));
        });
        assert_eq!(found.relists > 0, relists, "{end:?} {found}");
        assert_eq!(found.watches_broken > 0, broken, "{end:?} {found}");
        let torn = found.violations.iter().filter(|text| text.contains("middle of an event"));
        assert_eq!(torn.count() > 0, end == WatchEnd::Torn, "{:#?}", found.violations);
    }
}

#[test]
fn informer_watches_again_after_a_lost_connection_and_lists_after_410() {
    let closed = with_fault(|clients| clients.rig.order(Order::Close));
    assert_eq!((closed.relists, closed.watches_broken), (0, 2), "{closed}");
    assert_eq!(closed.violations, [""; 0]);
    let too_old = with_fault(|clients| {
        clients.rig.fault(|faults| faults.oldest = u64::MAX);
        clients.rig.order(Order::Close);
    });
    assert!(too_old.relists >= 2, "{too_old}");
    assert_eq!(too_old.violations, [""; 0]);
    // A connection that answers no PING: after 45 s the informer lists again.
    run(async {
        let mut clients = Clients::new();
        clients.spawn_informer();
        clients.pass(seconds(3)).await;
        clients.rig.order(Order::Freeze);
        clients.pass(seconds(60)).await;
        let (record, rig) = clients.finish().await;
        let lists = rig.server.requests.borrow().iter().filter(|r| !r.contains("watch")).count();
        assert_eq!((record.findings.relists, lists), (1, 2));
    });
}

#[test]
fn first_list_is_from_the_cache_and_the_next_one_names_its_version() {
    run(async {
        let mut clients = Clients::new();
        clients.spawn_informer();
        clients.pass(seconds(2)).await;
        clients.rig.fault(|faults| faults.watch_end = Some(WatchEnd::Reset));
        clients.spawn_writer();
        clients.pass(seconds(4)).await;
        let (_, rig) = clients.finish().await;
        let requests = rig.server.requests.borrow();
        let lists: Vec<_> =
            requests.iter().filter(|r| r.contains("configmaps?") && !r.contains("watch")).collect();
        assert!(lists[0].ends_with("configmaps?limit=500&resourceVersion=0"), "{lists:#?}");
        assert!(lists[1].contains("configmaps?resourceVersion="), "{lists:#?}");
        let watch = requests.iter().find(|r| r.contains("watch=true")).unwrap();
        assert!(watch.contains("allowWatchBookmarks=true&resourceVersion=10&timeoutSeconds="));
    });
}

#[test]
fn open_requests_count_at_the_end() {
    let found = with_fault(|clients| clients.rig.fault(|faults| faults.hangs = true));
    assert!(found.slowest_read > Duration::from_millis(2_800), "{found}");
    assert!(found.slowest_write > Duration::from_millis(2_500), "{found}");
    assert_eq!(found.failed_reads, 0);
}

#[test]
fn kubelet_repeats_renewals_and_a_leader_loses_its_lease() {
    run(async {
        let mut clients = Clients::new();
        clients.spawn(|peer| lease::run_kubelet(peer, Collection::NODE_LEASES, "n0".to_owned()));
        clients.spawn(|peer| lease::run_leader(peer, Collection::LEADER_LEASES, "c".to_owned()));
        clients.pass(seconds(15)).await;
        clients.rig.fault(|faults| faults.hangs = true);
        clients.pass(seconds(40)).await;
        assert_eq!(clients.observer.record().findings.leaders_lost, 1);
        clients.rig.fault(|faults| faults.hangs = false);
        clients.pass(seconds(30)).await;
        let (record, rig) = clients.finish().await;
        let found = record.findings;
        assert_eq!(found.violations, [""; 0]);
        assert!(found.failed_leases >= 5 && found.longest_lease > seconds(40), "{found}");
        let dials = rig.server.requests.borrow().iter().filter(|r| r.contains("n0")).count();
        assert!(dials >= 6, "{dials}");
    });
}

#[test]
fn second_candidate_takes_the_lease_of_a_leader_that_is_gone() {
    run(async {
        let mut clients = Clients::new();
        let leader = clients.peer();
        let task = tokio::task::spawn_local(lease::run_leader(
            leader,
            Collection::LEADER_LEASES,
            "c".to_owned(),
        ));
        clients.pass(seconds(4)).await;
        clients.spawn(|peer| lease::run_leader(peer, Collection::LEADER_LEASES, "c".to_owned()));
        clients.pass(seconds(20)).await;
        let holds = |clients: &Clients, number: u16| {
            let record = clients.observer.record();
            let written = |seen: &Seen| matches!(seen, Seen::Write { .. });
            record.observations.iter().any(|o| o.client.number == number && written(&o.seen))
        };
        assert!(holds(&clients, 0) && !holds(&clients, 1));
        task.abort();
        clients.pass(seconds(25)).await;
        assert!(holds(&clients, 1));
        assert_eq!(clients.finish().await.0.findings.violations, [""; 0]);
    });
}

#[test]
fn hostile_client_cancels_requests() {
    run(async {
        let mut clients = Clients::new();
        clients.spawn(|peer| hostile::run(peer, MAPS, 10));
        clients.pass(seconds(3)).await;
        let (_, rig) = clients.finish().await;
        assert!(rig.server.requests.borrow().len() > 500);
        assert!(*rig.server.cancelled.borrow() > 100);
    });
}
