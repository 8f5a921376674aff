//! Tests of the object store, and of reading endpoints from its objects.

use super::*;
use serde_json::json;

fn object(name: &str, version: &str, data: Value) -> Value {
    let mut value = data;
    value["metadata"] = json!({
        "name": name,
        "namespace": "default",
        "resourceVersion": version,
        "labels": { SERVICE_LABEL: SERVICE },
    });
    value
}

/// A store of slices after a list of this version.
fn store(list: Vec<Value>, version: &str) -> ObjectStore {
    ObjectStore::new(WatchedResource::SlicesV1, list, version)
}

fn slice(addresses: &[&str]) -> Value {
    json!({
        "addressType": "IPv4",
        "ports": [{ "name": "https", "protocol": "TCP", "port": 6443 }],
        "endpoints": addresses.iter().map(|a| json!({ "addresses": [a] })).collect::<Vec<_>>(),
    })
}

fn addresses(found: &DiscoveredEndpoints) -> Vec<String> {
    found.candidates.iter().map(|candidate| candidate.address.to_string()).collect()
}

fn endpoints_of(resource: WatchedResource, data: Value) -> DiscoveredEndpoints {
    ObjectStore::new(resource, vec![object(SERVICE, "1", data)], "1").endpoints()
}

#[test]
fn compare_versions_orders_decimal_numbers_of_any_length() {
    let long = "340282366920938463463374607431768211456000";
    for (a, b, expected) in [
        ("9", "10", Some(Ordering::Less)),
        ("100", "99", Some(Ordering::Greater)),
        ("7", "007", Some(Ordering::Equal)),
        (long, "340282366920938463463374607431768211455999", Some(Ordering::Greater)),
        ("", "1", None),
        ("1a", "2", None),
        ("-1", "2", None),
    ] {
        assert_eq!(compare_versions(a, b), expected, "{a} {b}");
    }
}

#[test]
fn apply_replayed_event_changes_nothing() {
    let mut store = store(vec![object("a", "98", slice(&["10.0.0.1"]))], "98");
    assert_eq!(addresses(&store.endpoints()), ["10.0.0.1:6443"]);

    assert!(store.apply(object("a", "100", slice(&["10.0.0.2"])), false));
    for (version, host, deleted, why) in [
        ("99", "10.0.0.9", false, "an older object"),
        ("100", "10.0.0.2", false, "a duplicate"),
        ("99", "10.0.0.9", true, "a deletion of an earlier object"),
    ] {
        assert!(!store.apply(object("a", version, slice(&[host])), deleted), "{why}");
        assert_eq!(addresses(&store.endpoints()), ["10.0.0.2:6443"], "{why}");
    }
    let other = object("b", "98", slice(&["10.0.0.8"]));
    assert!(!store.apply(other, false), "an object that the list did not have any more");
    let deletion = object("a", "100", slice(&[]));
    assert!(store.apply(deletion.clone(), true), "with the version of the deleted object");
    assert!(!store.apply(deletion, true));
    assert!(
        !store.apply(object("a", "99", slice(&["10.0.0.9"])), false),
        "an object older than its deletion"
    );
    assert_eq!(addresses(&store.endpoints()), [""; 0]);
    assert!(store.apply(object("a", "101", slice(&["10.0.0.3"])), false), "created again");
}

/// After a restore of etcd from a backup, versions are lower.
#[test]
fn store_applies_a_list_with_a_lower_version() {
    let mut store = store(vec![object("b", "7", slice(&["10.0.0.4"]))], "7");
    assert!(store.apply(object("a", "8", slice(&["10.0.0.5"])), false));
    assert_eq!(addresses(&store.endpoints()), ["10.0.0.5:6443", "10.0.0.4:6443"]);
}

#[test]
fn apply_event_whose_version_is_no_number_is_applied() {
    let mut store = store(Vec::new(), "1");
    assert!(store.apply(object("a", "x9", slice(&["10.0.0.1"])), false));
    assert!(store.apply(object("a", "x1", slice(&["10.0.0.2"])), false));
    assert_eq!(addresses(&store.endpoints()), ["10.0.0.2:6443"]);
}

#[test]
fn object_of_another_service_or_namespace_is_ignored() {
    let mut other = object("other-x7", "1", slice(&["10.0.0.1"]));
    other["metadata"]["labels"] = json!({ SERVICE_LABEL: "other" });
    let mut elsewhere = object("a", "1", slice(&["10.0.0.2"]));
    elsewhere["metadata"]["namespace"] = "kube-system".into();
    let malformed = [json!(7), json!({ "metadata": 7 }), json!({ "metadata": { "name": 7 } })];
    let store = store([vec![other, elsewhere], malformed.to_vec()].concat(), "1");
    assert_eq!(store.endpoints(), DiscoveredEndpoints::default());
}

#[test]
fn more_objects_than_the_maximum_are_not_stored() {
    let objects = |name: &str| -> Vec<_> {
        let name = |n| object(&format!("{name}{n}"), "2", slice(&["10.0.0.1"]));
        (0..MAX_OBJECTS + 100).map(name).collect()
    };
    assert_eq!(store(objects("l"), "1").objects.len(), MAX_OBJECTS);
    let mut store = store(Vec::new(), "1");
    for object in objects("s") {
        store.apply(object, false);
    }
    for object in objects("t") {
        store.apply(object, true);
    }
    assert_eq!(store.objects.len(), MAX_OBJECTS);
}

#[test]
fn endpoints_of_slices_are_ready_addresses_with_https_port() {
    let found = endpoints_of(
        WatchedResource::SlicesV1,
        json!({
            "addressType": "IPv4",
            "ports": [
                { "name": "dns", "protocol": "UDP", "port": 53 },
                { "name": "metrics", "port": 9090 },
                { "name": "https", "protocol": "TCP", "port": 6443 },
            ],
            "endpoints": [
                { "addresses": ["10.0.0.1"], "conditions": { "ready": true } },
                { "addresses": ["10.0.0.2"], "conditions": { "ready": false } },
                { "addresses": ["10.0.0.3"], "conditions": {} },
                { "addresses": ["10.0.0.4", "10.0.0.1"] },
                { "addresses": ["0.0.0.0", "224.0.0.1", "node-1", 7, ""] },
                { "addresses": null },
            ],
        }),
    );
    assert_eq!(addresses(&found), ["10.0.0.1:6443", "10.0.0.3:6443", "10.0.0.4:6443"]);
    assert_eq!((found.not_ready, found.rejected_count), (1, 5), "{found:?}");
    assert!(
        found.candidates.iter().all(|c| c.server_name.as_deref() == Some(DISCOVERED_SERVER_NAME))
    );

    let v6 = json!({
        "addressType": "IPv6",
        "ports": [{ "port": 443 }],
        "endpoints": [{ "addresses": ["fd00:0::3"] }],
    });
    assert_eq!(addresses(&endpoints_of(WatchedResource::SlicesV1Beta1, v6)), ["[fd00::3]:443"]);
    let names = json!({
        "addressType": "FQDN",
        "ports": [{ "port": 443 }],
        "endpoints": [{ "addresses": ["api.example.com"] }],
    });
    let found = endpoints_of(WatchedResource::SlicesV1, names);
    assert_eq!((found.candidates.len(), found.rejected_count), (0, 1));
    assert!(found.rejected[0].contains("FQDN"), "{found:?}");
}

#[test]
fn endpoints_of_endpoints_object_are_ready_addresses_with_https_port() {
    let data = json!({
        "subsets": [
            {
                "addresses": [{ "ip": "10.0.0.1" }, { "ip": "fd00::1" }, { "hostname": "x" }],
                "notReadyAddresses": [{ "ip": "10.0.0.2" }],
                "ports": [{ "name": "https", "port": 6443, "protocol": "TCP" }],
            },
            { "addresses": [{ "ip": "10.0.0.3" }], "ports": [{ "port": 53, "protocol": "UDP" }] },
        ],
    });
    let found = endpoints_of(WatchedResource::Endpoints, data);
    assert_eq!(addresses(&found), ["10.0.0.1:6443", "[fd00::1]:6443"]);
    assert_eq!((found.not_ready, found.rejected_count), (1, 2), "{found:?}");
}

#[test]
fn endpoints_of_malformed_objects_are_empty() {
    for data in [
        json!({}),
        json!({ "endpoints": 3, "ports": "x", "addressType": [] }),
        json!({ "endpoints": [3, null, "x"], "ports": [{ "port": 70_000 }] }),
        json!({ "endpoints": [{}], "ports": [{ "port": 0 }, 3] }),
        json!({ "subsets": [3, { "addresses": [null], "ports": [null] }] }),
    ] {
        for resource in WatchedResource::ALL {
            assert!(endpoints_of(resource, data.clone()).candidates.is_empty(), "{data}");
        }
    }
    let many: Vec<_> = (0..1000).map(|n| format!("x{n}")).collect();
    let many: Vec<_> = many.iter().map(String::as_str).collect();
    let found = endpoints_of(WatchedResource::SlicesV1, slice(&many));
    assert_eq!((found.rejected_count, found.rejected.len()), (1000, 20));
}
