//! What an object shows of a write, in each encoding.

use serde_json::{Value, json};

use super::super::{Found, MAX_BODY, ObjectKind, WrittenObject};
use Found::{Other, Unknown, Unwritten, Written};

const JSON: &[u8] = b"application/json";
const CBOR: &[u8] = b"application/cbor";
const PROTOBUF: &[u8] = b"application/vnd.kubernetes.protobuf";
const ENCODINGS: [&[u8]; 3] = [JSON, CBOR, PROTOBUF];

/// A Lease as kubelet writes it.
fn lease() -> Value {
    json!({
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {
            "name": "node-1",
            "namespace": "kube-node-lease",
            "uid": "5c0e1b0a-0000-4000-8000-000000000001",
            "resourceVersion": "1000",
            "labels": {"a": "b"},
            "ownerReferences": [
                {"apiVersion": "v1", "kind": "Node", "name": "node-1", "uid": "u", "controller": true},
            ],
        },
        "spec": {
            "holderIdentity": "node-1",
            "leaseDurationSeconds": 40,
            "renewTime": "2026-11-30T02:28:53.123456Z",
        },
    })
}

/// The Lease with another value, or without the member.
fn with(pointer: &str, value: Value) -> Value {
    let mut lease = lease();
    let (parent, name) = pointer.rsplit_once('/').unwrap();
    let parent = lease.pointer_mut(parent).unwrap().as_object_mut().unwrap();
    if value.is_null() {
        parent.remove(name)
    } else {
        parent.insert(name.to_owned(), value)
    };
    lease
}

/// The Lease after the write, as the apiserver shows it.
fn read(version: &str) -> Value {
    let mut read = with("/metadata/resourceVersion", version.into());
    read["metadata"]["creationTimestamp"] = "2026-11-01T00:00:00Z".into();
    read["metadata"]["managedFields"] = json!([{"manager": "kubelet", "operation": "Update"}]);
    read["metadata"]["generation"] = 3.into();
    read
}

fn encode(content_type: &[u8], object: &Value) -> Vec<u8> {
    match content_type {
        JSON => object.to_string().into_bytes(),
        CBOR => cbor(object),
        _ => protobuf(object),
    }
}

fn written(content_type: &[u8], object: &Value) -> Option<WrittenObject> {
    WrittenObject::parse(ObjectKind::Lease, content_type, &encode(content_type, object))
}

#[test]
fn lease_shows_the_write_in_every_encoding_of_both() {
    for sent in ENCODINGS {
        let written = written(sent, &lease()).unwrap();
        assert!(written.names_uid());
        for received in ENCODINGS {
            let found = |object: &Value| written.found(200, received, &encode(received, object));
            assert_eq!(found(&read("1001")), Written);
            assert_eq!(found(&read("1000")), Unwritten);
            assert_eq!(
                found(&with("/spec/renewTime", json!("2026-11-30T02:28:43.123456Z"))),
                Unwritten
            );
            assert_eq!(found(&read("999")), Other, "a restored etcd");
            for (pointer, value) in [
                ("/spec/holderIdentity", json!("node-2")),
                ("/spec/renewTime", json!("2026-11-30T02:28:53.123457Z")),
                ("/spec/acquireTime", json!("2026-11-30T02:28:53.123456Z")),
                ("/spec/leaseTransitions", json!(1)),
                ("/spec/leaseDurationSeconds", json!(41)),
                ("/metadata/uid", json!("another")),
                ("/metadata/uid", Value::Null),
                ("/metadata/labels", json!({"a": "c"})),
                ("/metadata/annotations", json!({"a": "b"})),
                ("/metadata/finalizers", json!(["example.com/a"])),
                ("/metadata/ownerReferences", Value::Null),
            ] {
                let mut changed = with(pointer, value);
                changed["metadata"]["resourceVersion"] = "1001".into();
                assert_eq!(found(&changed), Other, "{pointer}");
            }
        }
        for (status, expected) in
            [(404, Other), (403, Unknown), (401, Unknown), (429, Unknown), (504, Unknown)]
        {
            assert_eq!(written.found(status, JSON, b"{}"), expected, "{status}");
        }
        for body in [&b""[..], b"{}", b"[]", b"k8s\0", b"\xa0", b"{\"metadata\":{}}"] {
            assert_eq!(written.found(200, JSON, body), Unknown);
            assert_eq!(written.found(200, b"text/html", body), Unknown);
        }
    }
}

#[test]
fn only_leases_that_can_be_recognised_are_settled() {
    for encoding in ENCODINGS {
        let parsed = |pointer, value| written(encoding, &with(pointer, value));
        // A write without a version is not settled.
        assert_eq!(parsed("/metadata/resourceVersion", Value::Null), None);
        assert_eq!(parsed("/metadata/resourceVersion", json!("0")), None);
        // Two clients may write the same.
        assert_eq!(parsed("/spec/renewTime", json!("2026-11-30T02:28:53.000000Z")), None);
        assert_eq!(parsed("/spec/renewTime", Value::Null), None);
        assert!(!parsed("/metadata/uid", Value::Null).unwrap().names_uid());
    }
    let body = |object: &Value| encode(JSON, object);
    let parse = |kind, media_type: &[u8], body: &[u8]| WrittenObject::parse(kind, media_type, body);
    assert!(
        parse(ObjectKind::Lease, b"application/json; charset=utf-8", &body(&lease())).is_some()
    );
    assert_eq!(parse(ObjectKind::Lease, b"application/yaml", &body(&lease())), None);
    assert_eq!(parse(ObjectKind::Lease, JSON, b"{\"metadata\":"), None);
    assert_eq!(parse(ObjectKind::Lease, JSON, &vec![b' '; MAX_BODY + 1]), None);
    for cut in 0..protobuf(&lease()).len() {
        parse(ObjectKind::Lease, PROTOBUF, &protobuf(&lease())[..cut]);
        parse(ObjectKind::Lease, CBOR, &cbor(&lease())[..cut.min(cbor(&lease()).len())]);
    }
}

#[test]
fn times_of_other_clients_are_compared_as_times() {
    // Python writes an offset, Java a fraction in nanoseconds.
    for time in [
        "2026-11-30T02:28:53.123456+00:00",
        "2026-11-30T03:28:53.123456+01:00",
        "2026-11-30T02:28:53.123456789Z",
    ] {
        let written = written(JSON, &with("/spec/renewTime", json!(time))).unwrap();
        assert_eq!(written.found(200, PROTOBUF, &protobuf(&read("1001"))), Written, "{time}");
    }
    assert_eq!(written(JSON, &with("/spec/renewTime", json!("soon"))), None);
}

#[test]
fn configured_object_shows_the_write_if_it_contains_it() {
    let object = json!({
        "metadata": {"name": "a", "resourceVersion": "7", "uid": "u", "labels": {"x": "y"}},
        "status": {"beat": "2026-11-30T02:28:53Z", "list": [{"a": 1}], "unset": null},
    });
    let written =
        WrittenObject::parse(ObjectKind::Configured, JSON, &encode(JSON, &object)).unwrap();
    let mut read = object.clone();
    read["metadata"]["resourceVersion"] = "8".into();
    read["metadata"]["annotations"] = json!({"added": "by a webhook"});
    read["spec"] = json!({"kept": true});
    read["status"]["list"][0]["b"] = 2.into();
    assert_eq!(written.found(200, JSON, &encode(JSON, &read)), Written);
    assert_eq!(written.found(200, CBOR, &encode(CBOR, &read)), Written);
    read["status"]["list"] = json!([{"a": 1}, {"a": 1}]);
    assert_eq!(written.found(200, JSON, &encode(JSON, &read)), Other);
    // Only Leases are known in protobuf.
    assert_eq!(WrittenObject::parse(ObjectKind::Configured, PROTOBUF, &protobuf(&lease())), None);
}

#[test]
fn unknown_field_of_a_lease_in_protobuf_is_not_settled() {
    let mut spec = Vec::new();
    field(&mut spec, 15, b"new");
    let mut object = Vec::new();
    field(&mut object, 2, &spec);
    let mut body = b"k8s\0".to_vec();
    field(&mut body, 2, &object);
    assert_eq!(WrittenObject::parse(ObjectKind::Lease, PROTOBUF, &body), None);
}

fn cbor(value: &Value) -> Vec<u8> {
    fn head(out: &mut Vec<u8>, major: u8, argument: u64) {
        match argument {
            0..=23 => out.push(major << 5 | argument as u8),
            24..=255 => out.extend([major << 5 | 0x18, argument as u8]),
            _ => {
                out.push(major << 5 | 0x1b);
                out.extend(argument.to_be_bytes());
            }
        }
    }
    fn item(out: &mut Vec<u8>, value: &Value) {
        match value {
            Value::Null => out.push(0xf6),
            Value::Bool(value) => out.push(0xf4 | u8::from(*value)),
            Value::Number(number) => head(out, 0, number.as_u64().unwrap()),
            Value::String(text) => {
                head(out, 2, text.len() as u64);
                out.extend(text.as_bytes());
            }
            Value::Array(items) => {
                head(out, 4, items.len() as u64);
                for one in items {
                    item(out, one);
                }
            }
            Value::Object(members) => {
                head(out, 5, members.len() as u64);
                for (name, member) in members {
                    item(out, &Value::from(name.clone()));
                    item(out, member);
                }
            }
        }
    }
    // The tag of self-described CBOR.
    let mut out = vec![0xd9, 0xd9, 0xf7];
    item(&mut out, value);
    out
}

fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value > 0x7f {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn field(out: &mut Vec<u8>, number: u32, bytes: &[u8]) {
    varint(out, u64::from(number) << 3 | 2);
    varint(out, bytes.len() as u64);
    out.extend(bytes);
}

fn number(out: &mut Vec<u8>, number: u32, value: u64) {
    varint(out, u64::from(number) << 3);
    varint(out, value);
}

/// A Lease in its envelope, as client-go encodes it.
fn protobuf(lease: &Value) -> Vec<u8> {
    let text = |out: &mut Vec<u8>, at: u32, value: &Value| {
        if let Some(text) = value.as_str() {
            field(out, at, text.as_bytes());
        }
    };
    let map = |out: &mut Vec<u8>, at: u32, value: &Value| {
        for (key, value) in value.as_object().into_iter().flatten() {
            let mut entry = Vec::new();
            field(&mut entry, 1, key.as_bytes());
            text(&mut entry, 2, value);
            field(out, at, &entry);
        }
    };
    let time = |out: &mut Vec<u8>, at: u32, value: &Value| {
        if let Some(time) = value.as_str().and_then(|time| time.parse::<jiff::Timestamp>().ok()) {
            let mut message = Vec::new();
            number(&mut message, 1, time.as_second().cast_unsigned());
            number(&mut message, 2, time.subsec_nanosecond() as u64);
            field(out, at, &message);
        }
    };
    let metadata = &lease["metadata"];
    let mut out = Vec::new();
    text(&mut out, 1, &metadata["name"]);
    text(&mut out, 2, &json!(""));
    text(&mut out, 3, &metadata["namespace"]);
    text(&mut out, 5, &metadata["uid"]);
    text(&mut out, 6, &metadata["resourceVersion"]);
    number(&mut out, 7, metadata["generation"].as_u64().unwrap_or_default());
    field(&mut out, 8, b"");
    map(&mut out, 11, &metadata["labels"]);
    map(&mut out, 12, &metadata["annotations"]);
    for owner in metadata["ownerReferences"].as_array().into_iter().flatten() {
        let mut message = Vec::new();
        text(&mut message, 5, &owner["apiVersion"]);
        text(&mut message, 1, &owner["kind"]);
        text(&mut message, 3, &owner["name"]);
        text(&mut message, 4, &owner["uid"]);
        if let Some(controller) = owner["controller"].as_bool() {
            number(&mut message, 6, controller.into());
        }
        field(&mut out, 13, &message);
    }
    for finalizer in metadata["finalizers"].as_array().into_iter().flatten() {
        text(&mut out, 14, finalizer);
    }
    let spec = &lease["spec"];
    let mut spec_out = Vec::new();
    text(&mut spec_out, 1, &spec["holderIdentity"]);
    for (at, name) in [(2, "leaseDurationSeconds"), (5, "leaseTransitions")] {
        if let Some(value) = spec[name].as_u64() {
            number(&mut spec_out, at, value);
        }
    }
    time(&mut spec_out, 3, &spec["acquireTime"]);
    time(&mut spec_out, 4, &spec["renewTime"]);
    let mut object = Vec::new();
    field(&mut object, 1, &out);
    field(&mut object, 2, &spec_out);
    let mut type_meta = Vec::new();
    field(&mut type_meta, 1, b"coordination.k8s.io/v1");
    field(&mut type_meta, 2, b"Lease");
    let mut body = b"k8s\0".to_vec();
    field(&mut body, 1, &type_meta);
    field(&mut body, 2, &object);
    field(&mut body, 3, b"");
    field(&mut body, 4, b"");
    body
}
