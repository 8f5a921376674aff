//! The aggregated group fails at one apiserver or at all of them, with the exact number of requests that arrive.

use std::rc::Rc;
use std::time::Duration;

use http::Method;
use jackstay_apiserver::audit::Record;
use jackstay_apiserver::selector::Selector;
use jackstay_apiserver::{aggregated, kinds};
use jackstay_sys::clock;
use tokio::time::sleep;

use super::objects::{CONFIG_MAPS, WIDGETS, widget};
use super::requests::{Reply, Watch, get, send};
use super::testbed::{Proxy, Testbed, all, until};
use crate::faults::FaultKind;
use crate::peers::transport::{Client, Outgoing};

/// The promise for a read of a built-in group: that without a fault.
const BUILT_IN: Duration = Duration::from_millis(20);
/// The promise for a read of the group if an apiserver answers that it cannot connect.
const REFUSED: Duration = Duration::from_secs(1);
/// The promise if nothing answers.
const DARK: Duration = Duration::from_millis(2_500);
/// The requests of clients that may arrive again while the group fails everywhere, one in so many.
const ONE_IN: usize = 10;

/// A jackstay and a client of the group.
struct Group<'a> {
    testbed: &'a Testbed,
    proxy: Proxy,
    client: Client,
}

impl<'a> Group<'a> {
    async fn start(testbed: &'a Testbed) -> Self {
        testbed.create_widget("o1");
        let proxy = testbed.start_connected(|_| {}).await;
        let client = testbed.client(&proxy);
        let group = Self { testbed, proxy, client };
        group.read_built_in(20).await;
        assert_eq!(group.get().await.status, 200);
        testbed.cluster().audit().clear();
        group
    }

    async fn get(&self) -> Reply {
        get(&self.client, WIDGETS).await
    }

    async fn create(&self, name: &str) -> Reply {
        let outgoing = Outgoing::json(Method::POST, WIDGETS, &widget(name));
        send(&self.client, outgoing).await
    }

    async fn read_built_in(&self, count: usize) {
        for _ in 0..count {
            let reply = get(&self.client, CONFIG_MAPS).await;
            assert_eq!(reply.status, 200);
            self.testbed.check("a read of a built-in group", reply.took, BUILT_IN);
        }
    }

    /// The requests of the group with this verb that have arrived, at this apiserver or at any.
    fn arrived(&self, verb: &str, server: Option<usize>) -> usize {
        let name = server.map(|server| format!("apiserver-{server}"));
        let is_it = |record: &Record| {
            let is_there = name.as_ref().is_none_or(|name| record.server == *name);
            record.path.starts_with(WIDGETS) && record.verb == verb && is_there
        };
        self.testbed.received(is_it).len()
    }

    fn retries(&self) -> usize {
        self.proxy.metric("jackstay_retries_total{reason=\"group_failed\"}") as usize
    }

    /// Reads until no apiserver is known to fail. Each read succeeds.
    async fn until_works(&self) {
        let began = clock::now();
        while !self.proxy.failing_groups().is_empty() {
            assert!(clock::elapsed(began) < Duration::from_secs(40), "the group is not asked for");
            assert_eq!(self.get().await.status, 200);
            sleep(Duration::from_millis(200)).await;
        }
    }
}

/// The words of the apiserver reach the client as they are.
#[track_caller]
fn expect_words(reply: &Reply, words: &str) {
    let body = String::from_utf8_lossy(&reply.body);
    assert_eq!((reply.status, &*body), (503, words));
    assert_eq!(reply.headers["content-type"], "text/plain; charset=utf-8");
    assert_eq!(reply.headers["x-content-type-options"], "nosniff");
}

/// One apiserver refuses the group: each read succeeds in time, each write arrives once, and the apiserver receives one
/// request and then probes.
pub async fn one_refuses(testbed: Rc<Testbed>) {
    let group = Group::start(&testbed).await;
    let refused = testbed.choose(testbed.servers());
    testbed.begin(refused, FaultKind::GroupRefused);
    let began = clock::now();
    let (mut reads, mut writes, mut failed) = (0, 0, 0);
    while clock::elapsed(began) < Duration::from_secs(20) {
        for _ in 0..4 {
            let reply = group.get().await;
            assert_eq!(reply.status, 200);
            testbed.check("a read of the group", reply.took, REFUSED);
            reads += 1;
        }
        let reply = group.create(&format!("w{writes}")).await;
        writes += 1;
        if reply.status != 201 {
            expect_words(&reply, aggregated::REFUSED);
            failed += 1;
        }
        group.read_built_in(2).await;
        sleep(Duration::from_millis(50)).await;
    }
    let there = group.arrived("list", Some(refused));
    // The first one, and the probes after 1, 3, 7 and 15 s.
    assert!((3..=5).contains(&there), "{there} reads arrived at the apiserver that fails");
    assert_eq!(group.retries(), there, "each read there was sent again, once");
    assert_eq!(group.arrived("list", None), reads + there);
    assert_eq!(group.arrived("create", None), writes, "a write was sent again");
    assert!(failed <= 1, "{failed} writes failed");
    let stored = testbed.cluster().list(&kinds::WIDGETS, "default", &Selector::default());
    assert_eq!(stored.0.len(), 1 + writes - failed);
    testbed.end(refused, FaultKind::GroupRefused);
    group.until_works().await;
}

/// The path of one apiserver is dark: reads on their way there are hedged, a write waits and is not sent again, and a watch
/// continues elsewhere.
pub async fn one_dark(testbed: Rc<Testbed>) {
    let group = Group::start(&testbed).await;
    let path = format!("{WIDGETS}?watch=1&resourceVersion={}", testbed.cluster().version());
    let watches = all((0..6).map(|_| Watch::start(&group.client, &path))).await;
    let dark = testbed.with_most_watches();
    testbed.begin(dark, FaultKind::GroupDark);
    let version = testbed.create_widget("w");
    let began = clock::now();
    let create = async |name: String| (group.create(&name).await, name);
    let writes = async {
        let creates = (0..6).map(|number| create(format!("c{number}")));
        all(creates).await
    };
    let rest = async {
        for reply in all((0..12).map(|_| group.get())).await {
            assert_eq!(reply.status, 200);
            testbed.check("a read of the group", reply.took, DARK);
        }
        until("each watch has the first event", || watches.iter().all(|one| one.count() > 0)).await;
        testbed.check("an event of the group", clock::elapsed(began), DARK);
        for _ in 0..20 {
            let reply = group.get().await;
            assert_eq!(reply.status, 200);
            testbed.check("a read of the group later", reply.took, DARK);
            group.read_built_in(4).await;
            sleep(Duration::from_millis(250)).await;
        }
        testbed.end(dark, FaultKind::GroupDark);
    };
    let (written, ()) = tokio::join!(writes, rest);
    for (reply, name) in &written {
        assert_eq!(reply.status, 201, "{name}");
    }
    assert_eq!(group.arrived("create", None), written.len(), "a write was sent again");
    let versions: Vec<_> = (version..=testbed.cluster().version()).collect();
    assert_eq!(versions.len(), 1 + written.len());
    for watch in &watches {
        watch.expect_versions(&versions).await;
    }
}

/// The group fails at all apiservers, by turns in each of two ways: its clients get the words of the apiservers, hardly more
/// requests arrive than clients send, and the first read afterwards succeeds.
pub async fn all_fail(testbed: Rc<Testbed>) {
    let group = Group::start(&testbed).await;
    let faults = [
        (FaultKind::GroupRefused, aggregated::REFUSED),
        (FaultKind::GroupUnavailable, aggregated::UNAVAILABLE),
    ];
    let (fault, words) = faults[testbed.choose(faults.len())];
    testbed.begin_all(fault);
    let (reads, writes) = (240, 60);
    for number in 0..writes {
        let replies = all((0..reads / writes).map(|_| group.get())).await;
        for reply in &replies {
            expect_words(reply, words);
        }
        expect_words(&group.create(&format!("w{number}")).await, words);
        group.read_built_in(1).await;
        sleep(Duration::from_millis(50)).await;
    }
    let arrived = group.arrived("list", None);
    assert_eq!(group.arrived("create", None), writes, "a write was sent again");
    let most = reads + (reads + writes) / ONE_IN;
    assert!(arrived <= most, "{arrived} reads arrived for {reads}, at most {most} allowed");
    testbed.end_all(fault);
    let reply = group.get().await;
    assert_eq!(reply.status, 200);
    testbed.check("the first read afterwards", reply.took, BUILT_IN);
    assert_eq!(group.create("after").await.status, 201);
    group.until_works().await;
}
