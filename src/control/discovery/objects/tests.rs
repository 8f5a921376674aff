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

fn with(addresses: &[&str]) -> Value {
    json!({
        "addressType": "IPv4",
        "ports": [{ "name": "https", "protocol": "TCP", "port": 6443 }],
        "endpoints": addresses.iter().map(|a| json!({ "addresses": [a] })).collect::<Vec<_>>(),
    })
}

fn labels(said: &DiscoveredEndpoints) -> Vec<String> {
    said.entries.iter().map(|entry| entry.address.to_string()).collect()
}

fn said_of(resource: Resource, data: Value) -> DiscoveredEndpoints {
    let mut store = Store::new(resource, WatchStartVersion::default());
    store.feed(Event::Init);
    store.feed(Event::InitApply(object(SERVICE, "1", data)));
    assert!(store.feed(Event::InitDone));
    store.said()
}

#[test]
fn versions_are_compared_as_numbers_of_any_length() {
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
        assert_eq!(compare(a, b), expected, "{a} {b}");
    }
}

#[test]
fn replays_change_nothing() {
    let mut store = Store::new(Resource::SlicesV1, WatchStartVersion::default());
    assert!(!store.feed(Event::Apply(object("a", "5", with(&["10.0.0.1"])))), "not synced");
    store.feed(Event::Init);
    store.feed(Event::InitApply(object("a", "98", with(&["10.0.0.1"]))));
    assert!(store.feed(Event::InitDone));
    assert_eq!(labels(&store.said()), ["10.0.0.1:6443"]);

    assert!(store.feed(Event::Apply(object("a", "100", with(&["10.0.0.2"])))));
    for (event, why) in [
        (Event::Apply(object("a", "99", with(&["10.0.0.9"]))), "an older object"),
        (Event::Apply(object("a", "100", with(&["10.0.0.2"]))), "a duplicate"),
        (Event::Delete(object("a", "99", with(&["10.0.0.9"]))), "the end of an earlier life"),
    ] {
        assert!(!store.feed(event), "{why}");
        assert_eq!(labels(&store.said()), ["10.0.0.2:6443"], "{why}");
    }
    assert!(store.feed(Event::Delete(object("a", "100", with(&[])))), "with the version it ends");
    assert!(!store.feed(Event::Delete(object("a", "100", with(&[])))));
    assert!(!store.feed(Event::Apply(object("a", "99", with(&["10.0.0.9"])))), "after its end");
    assert_eq!(labels(&store.said()), [""; 0]);
    assert!(store.feed(Event::Apply(object("a", "101", with(&["10.0.0.3"])))), "another life");

    // After a restore from a backup versions start lower; a list is believed all the same.
    store.feed(Event::Init);
    store.feed(Event::InitApply(object("b", "7", with(&["10.0.0.4"]))));
    assert_eq!(labels(&store.said()), ["10.0.0.3:6443"], "not before it is complete");
    store.feed(Event::InitDone);
    assert!(store.feed(Event::Apply(object("a", "8", with(&["10.0.0.5"])))));
    assert_eq!(labels(&store.said()), ["10.0.0.5:6443", "10.0.0.4:6443"]);
}

#[test]
fn versions_that_are_no_numbers_are_taken_in_order() {
    let mut store = Store::new(Resource::SlicesV1, WatchStartVersion::default());
    store.feed(Event::Init);
    store.feed(Event::InitDone);
    assert!(store.feed(Event::Apply(object("a", "x9", with(&["10.0.0.1"])))));
    assert!(store.feed(Event::Apply(object("a", "x1", with(&["10.0.0.2"])))));
    assert_eq!(labels(&store.said()), ["10.0.0.2:6443"]);
}

#[test]
fn objects_of_others_are_not_believed() {
    let mut store = Store::new(Resource::SlicesV1, WatchStartVersion::default());
    store.feed(Event::Init);
    let mut other = object("other-x7", "1", with(&["10.0.0.1"]));
    other.metadata.labels = Some([(SERVICE_LABEL.to_owned(), "other".to_owned())].into());
    store.feed(Event::InitApply(other));
    let mut elsewhere = object("a", "1", with(&["10.0.0.2"]));
    elsewhere.metadata.namespace = Some("kube-system".into());
    store.feed(Event::InitApply(elsewhere));
    store.feed(Event::InitDone);
    assert_eq!(store.said(), DiscoveredEndpoints::default());
}

#[test]
fn objects_are_bounded() {
    let mut store = Store::new(Resource::SlicesV1, WatchStartVersion::default());
    store.feed(Event::Init);
    store.feed(Event::InitDone);
    for n in 0..MOST_OBJECTS + 100 {
        store.feed(Event::Apply(object(&format!("s{n}"), "1", with(&["10.0.0.1"]))));
    }
    for n in 0..MOST_OBJECTS + 100 {
        store.feed(Event::Delete(object(&format!("t{n}"), "1", with(&["10.0.0.1"]))));
    }
    assert_eq!(store.known.len(), MOST_OBJECTS);
}

#[test]
fn what_a_slice_says() {
    let said = said_of(
        Resource::SlicesV1,
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
    assert_eq!(labels(&said), ["10.0.0.1:6443", "10.0.0.3:6443", "10.0.0.4:6443"]);
    assert_eq!((said.not_ready, said.refused_count), (1, 5), "{said:?}");
    assert!(said.entries.iter().all(|e| e.server_name.as_deref() == Some(DISCOVERED_NAME)));

    let v6 = json!({
        "addressType": "IPv6",
        "ports": [{ "port": 443 }],
        "endpoints": [{ "addresses": ["fd00:0::3"] }],
    });
    assert_eq!(labels(&said_of(Resource::SlicesV1Beta1, v6)), ["[fd00::3]:443"]);
    let names = json!({
        "addressType": "FQDN",
        "ports": [{ "port": 443 }],
        "endpoints": [{ "addresses": ["api.example.com"] }],
    });
    let said = said_of(Resource::SlicesV1, names);
    assert_eq!((said.entries.len(), said.refused_count), (0, 1));
    assert!(said.refused[0].contains("FQDN"), "{said:?}");
}

#[test]
fn what_endpoints_say() {
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
    let said = said_of(Resource::Endpoints, data);
    assert_eq!(labels(&said), ["10.0.0.1:6443", "[fd00::1]:6443"]);
    assert_eq!((said.not_ready, said.refused_count), (1, 2), "{said:?}");
}

#[test]
fn nonsense_says_nothing() {
    for data in [
        json!({}),
        json!({ "endpoints": 3, "ports": "x", "addressType": [] }),
        json!({ "endpoints": [3, null, "x"], "ports": [{ "port": 70_000 }] }),
        json!({ "endpoints": [{}], "ports": [{ "port": 0 }, 3] }),
        json!({ "subsets": [3, { "addresses": [null], "ports": [null] }] }),
    ] {
        for resource in Resource::ALL {
            assert!(said_of(resource, data.clone()).entries.is_empty(), "{data}");
        }
    }
    let many: Vec<_> = (0..1000).map(|n| format!("x{n}")).collect();
    let many: Vec<_> = many.iter().map(String::as_str).collect();
    let said = said_of(Resource::SlicesV1, with(&many));
    assert_eq!((said.refused_count, said.refused.len()), (1000, MOST_REFUSED));
}
