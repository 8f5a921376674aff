//! Tests of the object store, and of reading endpoints from its objects.

use super::*;
use serde_json::json;

fn object(name: &str, version: &str, data: Value) -> DynamicObject {
    let mut value = data;
    value["metadata"] = json!({
        "name": name,
        "namespace": "default",
        "resourceVersion": version,
        "labels": { SERVICE_LABEL: SERVICE },
    });
    serde_json::from_value(value).unwrap()
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
    let mut store = ObjectStore::new(resource, WatchStartVersion::default());
    store.apply(Event::Init);
    store.apply(Event::InitApply(object(SERVICE, "1", data)));
    assert!(store.apply(Event::InitDone));
    store.endpoints()
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
    let mut store = ObjectStore::new(WatchedResource::SlicesV1, WatchStartVersion::default());
    assert!(
        !store.apply(Event::Apply(object("a", "5", slice(&["10.0.0.1"])))),
        "before a list is complete"
    );
    store.apply(Event::Init);
    store.apply(Event::InitApply(object("a", "98", slice(&["10.0.0.1"]))));
    assert!(store.apply(Event::InitDone));
    assert_eq!(addresses(&store.endpoints()), ["10.0.0.1:6443"]);

    assert!(store.apply(Event::Apply(object("a", "100", slice(&["10.0.0.2"])))));
    for (event, why) in [
        (Event::Apply(object("a", "99", slice(&["10.0.0.9"]))), "an older object"),
        (Event::Apply(object("a", "100", slice(&["10.0.0.2"]))), "a duplicate"),
        (Event::Delete(object("a", "99", slice(&["10.0.0.9"]))), "a deletion of an earlier object"),
    ] {
        assert!(!store.apply(event), "{why}");
        assert_eq!(addresses(&store.endpoints()), ["10.0.0.2:6443"], "{why}");
    }
    assert!(
        store.apply(Event::Delete(object("a", "100", slice(&[])))),
        "a deletion with the version of the deleted object"
    );
    assert!(!store.apply(Event::Delete(object("a", "100", slice(&[])))));
    assert!(
        !store.apply(Event::Apply(object("a", "99", slice(&["10.0.0.9"])))),
        "an object older than its deletion"
    );
    assert_eq!(addresses(&store.endpoints()), [""; 0]);
    assert!(store.apply(Event::Apply(object("a", "101", slice(&["10.0.0.3"])))), "created again");

    // After a restore of etcd from a backup, versions are lower. The list is applied nevertheless.
    store.apply(Event::Init);
    store.apply(Event::InitApply(object("b", "7", slice(&["10.0.0.4"]))));
    assert_eq!(addresses(&store.endpoints()), ["10.0.0.3:6443"], "the list is not complete yet");
    store.apply(Event::InitDone);
    assert!(store.apply(Event::Apply(object("a", "8", slice(&["10.0.0.5"])))));
    assert_eq!(addresses(&store.endpoints()), ["10.0.0.5:6443", "10.0.0.4:6443"]);
}

#[test]
fn apply_event_whose_version_is_no_number_is_applied() {
    let mut store = ObjectStore::new(WatchedResource::SlicesV1, WatchStartVersion::default());
    store.apply(Event::Init);
    store.apply(Event::InitDone);
    assert!(store.apply(Event::Apply(object("a", "x9", slice(&["10.0.0.1"])))));
    assert!(store.apply(Event::Apply(object("a", "x1", slice(&["10.0.0.2"])))));
    assert_eq!(addresses(&store.endpoints()), ["10.0.0.2:6443"]);
}

#[test]
fn apply_object_of_another_service_or_namespace_is_ignored() {
    let mut store = ObjectStore::new(WatchedResource::SlicesV1, WatchStartVersion::default());
    store.apply(Event::Init);
    let mut other = object("other-x7", "1", slice(&["10.0.0.1"]));
    other.metadata.labels = Some([(SERVICE_LABEL.to_owned(), "other".to_owned())].into());
    store.apply(Event::InitApply(other));
    let mut elsewhere = object("a", "1", slice(&["10.0.0.2"]));
    elsewhere.metadata.namespace = Some("kube-system".into());
    store.apply(Event::InitApply(elsewhere));
    store.apply(Event::InitDone);
    assert_eq!(store.endpoints(), DiscoveredEndpoints::default());
}

#[test]
fn apply_more_objects_than_the_maximum_stores_the_maximum() {
    let mut store = ObjectStore::new(WatchedResource::SlicesV1, WatchStartVersion::default());
    store.apply(Event::Init);
    store.apply(Event::InitDone);
    for n in 0..MAX_OBJECTS + 100 {
        store.apply(Event::Apply(object(&format!("s{n}"), "1", slice(&["10.0.0.1"]))));
    }
    for n in 0..MAX_OBJECTS + 100 {
        store.apply(Event::Delete(object(&format!("t{n}"), "1", slice(&["10.0.0.1"]))));
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

#[test]
fn record_first_watch_after_list_sets_version() {
    let version = WatchStartVersion::default();
    for (query, expected) in [
        ("limit=500", None),
        ("watch=true&resourceVersion=7&timeoutSeconds=290", Some("7")),
        ("watch=true&resourceVersion=9", Some("7")),
        ("resourceVersion=0", None),
        ("watch=true", None),
        ("watch=true&resourceVersion=12", Some("12")),
    ] {
        version.record(query);
        assert_eq!(version.get().as_deref(), expected, "{query}");
    }
}
