//! Objects that expire together: their DELETED have one version, and each reaches the client once, wherever its apiserver is
//! lost within them.

use jackstay_apiserver::kinds::CONFIG_MAPS;

use crate::support::watch_recorder::WatchRecorder;
use crate::support::{CONFIGMAPS, TestCluster, until, without_suspicion};

const OBJECTS: usize = 6;
const FORMS: [(&str, &str); 3] = [
    ("JSON", "application/json"),
    ("protobuf", "application/vnd.kubernetes.protobuf"),
    ("CBOR", "application/cbor"),
];

/// Each watch of a server delivers this number of changes, and then the server is killed.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn each_event_of_a_version_is_delivered_once_wherever_the_apiserver_is_lost() {
    let cluster = TestCluster::new(2);
    let mut config = cluster.config();
    without_suspicion(&mut config);
    config.upstreams[0].rebalance = false;
    let proxy = cluster.certs.start(config);
    proxy.wait_connected(2).await;
    let client = proxy.client().await;
    for delivered in 0..=OBJECTS {
        let names: Vec<_> = (0..OBJECTS).map(|at| format!("m{delivered}-{at}")).collect();
        for name in &names {
            cluster.create_config_map(name);
        }
        let from = cluster.state.version();
        let path = format!("{CONFIGMAPS}?watch=1&resourceVersion={from}");
        let mut watches = Vec::new();
        for (form, accept) in FORMS {
            watches.push((form, WatchRecorder::accepting(&client, &path, accept).await));
        }
        for server in &cluster.servers {
            server.set_faults(|faults| faults.watched_changes = Some(delivered));
        }
        let names: Vec<_> = names.iter().map(String::as_str).collect();
        let version = cluster.state.expire(&CONFIG_MAPS, "default", &names).unwrap();
        let next = cluster.create_config_map(&format!("after-{delivered}"));
        for (form, watch) in &watches {
            until(form, async || watch.versions().len() >= delivered).await;
            assert_eq!(watch.versions(), vec![version; delivered], "{form}");
        }
        let lost = usize::from(cluster.watches(1) > cluster.watches(0));
        cluster.servers[1 - lost].set_faults(|faults| faults.watched_changes = None);
        cluster.servers[lost].kill();
        let mut expected = vec![version; OBJECTS];
        expected.push(next);
        for (form, watch) in &watches {
            let is_complete = || watch.versions().len() >= expected.len();
            until(form, async || is_complete() || watch.end().is_some()).await;
            assert_eq!(watch.end(), None, "{form} after {delivered}");
            assert_eq!(watch.versions(), expected, "{form} after {delivered}");
            let deleted = watch.events().into_iter().filter(|event| event.kind == "DELETED");
            let deleted: Vec<_> = deleted.map(|event| event.name).collect();
            assert_eq!(deleted, names, "{form} after {delivered}");
        }
        drop(watches);
        cluster.servers[lost].restart().unwrap();
        cluster.servers[lost].set_faults(|faults| faults.watched_changes = None);
        proxy.wait_connected(2).await;
    }
}
