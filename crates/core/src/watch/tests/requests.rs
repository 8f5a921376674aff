//! Which watches are followed, and how their requests are rewritten.

use super::super::codec::Encoding;
use super::super::codec::version::ResourceVersion;
use super::super::request::{
    GzipPreference, WatchRequest, accept_only, resume_query, upstream_headers, upstream_query,
};
use http::HeaderMap;
use std::time::Duration;

fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
    pairs.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect()
}

fn request(query: &str) -> WatchRequest {
    WatchRequest::new("watch", "/api/v1/pods", query, &HeaderMap::new(), &[], |_| false).unwrap()
}

#[test]
fn request_is_followed_if_the_codec_reads_an_accepted_type() {
    let never = ["metrics.k8s.io".to_owned(), "batch".to_owned()];
    // A built-in group is never found to be unordered; if it were, it would still be resumed.
    let is_unordered = |group: &str| ["example.com", "apps"].contains(&group);
    let protobuf = "application/vnd.kubernetes.protobuf, application/json";
    let table = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json";
    let cbor = "application/cbor, application/json;q=0.9";
    // Expected: `resumable_group` and `upstream_bookmarks`; `None` if the request is not followed.
    let cases = [
        ("watch", "/api/v1/pods", &[][..], Some((true, true))),
        ("watch", "/apis/apps/v1/deployments", &[("accept", protobuf)], Some((true, true))),
        ("watch", "/apis/cilium.io/v2/ciliumnodes", &[], Some((true, true))),
        ("watch", "/apis/example.com/v1/things", &[], Some((false, false))),
        ("watch", "/apis/metrics.k8s.io/v1/pods", &[], Some((false, false))),
        ("watch", "/apis/batch/v1/jobs", &[], Some((false, false))),
        ("watch", "/api/v1/pods", &[("accept", table)], Some((true, false))),
        ("watch", "/api/v1/pods", &[("accept", "*/*")], Some((true, true))),
        ("watch", "/api/v1/pods", &[("accept", cbor)], Some((true, true))),
        ("watch", "/api/v1/pods", &[("accept", "application/cbor")], Some((true, true))),
        ("watch", "/api/v1/pods", &[("accept", "application/cbor;as=Table")], Some((true, false))),
        ("watch", "/api/v1/pods", &[("accept", "application/yaml, application/cbor;q=0")], None),
        ("watch", "/api/v1/pods", &[("accept", "application/yaml")], None),
        ("watch", "/api/v1/pods", &[("upgrade", "websocket")], None),
        ("list", "/api/v1/pods", &[], None),
        ("watch", "/healthz", &[], None),
    ];
    for (verb, path, pairs, expected) in cases {
        let headers = headers(pairs);
        let request = WatchRequest::new(verb, path, "watch=1", &headers, &never, is_unordered);
        let actual = request.map(|r| (r.resumable_group, r.upstream_bookmarks));
        assert_eq!(actual, expected, "{path} {pairs:?}");
    }
}

#[test]
fn objects_of_events_expire() {
    for (path, expected) in [
        ("/api/v1/events", true),
        ("/api/v1/namespaces/default/events", true),
        ("/api/v1/namespaces/default/events/a", true),
        ("/api/v1/watch/namespaces/default/events", true),
        ("/api/v1/watch/events/", true),
        ("/apis/events.k8s.io/v1/events", true),
        ("/apis/events.k8s.io/v1/namespaces/events/events", true),
        ("/api/v1/namespaces/events", false),
        ("/api/v1/namespaces/events/pods", false),
        ("/api/v1/pods", false),
        ("/apis/example.com/v1/events", false),
        ("/apis/events.k8s.io/v1", false),
    ] {
        let request =
            WatchRequest::new("watch", path, "", &HeaderMap::new(), &[], |_| false).unwrap();
        assert_eq!(request.objects_expire, expected, "{path}");
    }
}

#[test]
fn request_parameters_are_read_as_apiserver_reads_them() {
    let version = |query| request(query).version.map(|v| v.as_str().to_owned());
    assert_eq!(version("watch=1&resourceVersion=12&resourceVersion=13").as_deref(), Some("12"));
    assert_eq!(version("resource%56ersion=%31").as_deref(), Some("1"));
    for query in ["", "resourceVersion=", "resourceVersion=0", "resourceVersion=abc"] {
        assert_eq!(version(query), None, "{query}");
    }
    for (query, bookmarks) in [
        ("allowWatchBookmarks=true", true),
        ("allowWatchBookmarks=1", true),
        ("allowWatchBookmarks", true),
        ("allowWatchBookmarks=False", false),
        ("allowWatchBookmarks=0", false),
        ("", false),
    ] {
        assert_eq!(request(query).bookmarks, bookmarks, "{query}");
    }
    assert_eq!(request("timeoutSeconds=9").timeout, Some(Duration::from_secs(9)));
    assert_eq!(request("timeoutSeconds=0").timeout, None);
    assert!(request("sendInitialEvents=true").send_initial_events);
    assert!(!request("sendInitialEvents=false").send_initial_events);
    for (query, expected) in [
        ("sendInitialEvents=false", true),
        ("sendInitialEvents=0&resourceVersion=0", true),
        ("sendInitialEvents=false&resourceVersion=5", false),
        ("sendInitialEvents=true", false),
        ("watch=1", false),
    ] {
        assert_eq!(request(query).starts_at_most_recent, expected, "{query}");
    }
}

#[test]
fn query_rewrite_changes_only_the_parameters_of_resuming() {
    let cursor = ResourceVersion::parse(b"77").unwrap();
    for (query, first, resumed) in [
        ("watch=1", "watch=1", "watch=1&allowWatchBookmarks=true&resourceVersion=77"),
        (
            "labelSelector=a%3Db%2Cc&allowWatchBookmarks=true&resourceVersion=5&watch=true",
            "labelSelector=a%3Db%2Cc&allowWatchBookmarks=true&resourceVersion=5&watch=true",
            "labelSelector=a%3Db%2Cc&allowWatchBookmarks=true&resourceVersion=77&watch=true",
        ),
        (
            "allowWatchBookmarks=false&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&resourceVersion=&watch=1&timeoutSeconds=300",
            "allowWatchBookmarks=false&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&resourceVersion=&watch=1&timeoutSeconds=300",
            "allowWatchBookmarks=true&resourceVersion=77&watch=1&timeoutSeconds=41",
        ),
        (
            "resourceVersion=0&watch",
            "resourceVersion=0&watch",
            "resourceVersion=77&watch&allowWatchBookmarks=true",
        ),
        (
            "resourceVersion=1&watch&resourceVersion=2",
            "resourceVersion=1&watch&resourceVersion=2&allowWatchBookmarks=true",
            "resourceVersion=77&watch&allowWatchBookmarks=true",
        ),
    ] {
        let watch = request(query);
        assert_eq!(upstream_query(query, &watch), first);
        let remaining = watch.timeout.map(|_| Duration::from_millis(41_900));
        assert_eq!(resume_query(first, &watch, Some(&cursor), remaining), resumed);
        let restarted = resume_query(first, &watch, None, remaining);
        assert_eq!(restarted, first.replace("timeoutSeconds=300", "timeoutSeconds=41"));
    }
}

#[test]
fn upstream_headers_do_not_accept_compression() {
    let mut map = headers(&[("accept-encoding", "gzip"), ("accept", "application/json")]);
    upstream_headers(&mut map);
    assert_eq!(map, headers(&[("accept", "application/json")]));
}

#[test]
fn gzip_is_asked_for_where_the_client_accepts_it_or_lists() {
    const LIST: &str = "watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan";
    for (values, preference, asks_for_changes, asks_for_list) in [
        (&[][..], GzipPreference::Unspecified, false, true),
        (&["gzip"], GzipPreference::Accepted, true, true),
        (&["deflate, GZIP;q=0.5"], GzipPreference::Accepted, true, true),
        (&["zstd", "x-gzip"], GzipPreference::Accepted, true, true),
        (&["*"], GzipPreference::Accepted, true, true),
        (&["*;q=0, gzip"], GzipPreference::Accepted, true, true),
        (&["gzip; q=0"], GzipPreference::Refused, false, false),
        (&["*, gzip;q=0.000"], GzipPreference::Refused, false, false),
        (&["identity"], GzipPreference::Refused, false, false),
        (&[""], GzipPreference::Refused, false, false),
        (&["br"], GzipPreference::Refused, false, false),
    ] {
        let values: Vec<_> = values.iter().map(|value| ("accept-encoding", *value)).collect();
        let request = |query| {
            let headers = headers(&values);
            WatchRequest::new("watch", "/api/v1/pods", query, &headers, &[], |_| false).unwrap()
        };
        assert_eq!(request("watch=1").gzip, preference, "{values:?}");
        assert_eq!(request("watch=1").asks_for_gzip(), asks_for_changes, "{values:?}");
        assert_eq!(request(LIST).asks_for_gzip(), asks_for_list, "{values:?}");
    }
    let path = "/apis/example.com/v1/things";
    let other = WatchRequest::new("watch", path, LIST, &HeaderMap::new(), &[], |_| false).unwrap();
    assert!(!other.asks_for_gzip(), "an aggregated apiserver may compress a Status");
}

#[test]
fn upstream_headers_offer_only_types_that_the_codec_reads() {
    for (accept, offered) in [
        ("application/json", "application/json"),
        (
            "application/cbor, application/json;q=0.9, */*;q=0.1",
            "application/cbor, application/json;q=0.9, */*;q=0.1",
        ),
        (
            "application/json;as=Table;v=v1;g=meta.k8s.io,application/yaml,application/json",
            "application/json;as=Table;v=v1;g=meta.k8s.io, application/json",
        ),
        ("application/yaml,*/*", "*/*"),
        ("application/cbor;q=0,application/json", "application/json"),
        (
            "application/vnd.kubernetes.protobuf,application/json",
            "application/vnd.kubernetes.protobuf,application/json",
        ),
    ] {
        let mut map = headers(&[("accept", accept)]);
        upstream_headers(&mut map);
        assert_eq!(map, headers(&[("accept", offered)]), "{accept}");
    }
    let mut map = HeaderMap::new();
    map.append("accept", "application/yaml".parse().unwrap());
    map.append("accept", "application/json".parse().unwrap());
    upstream_headers(&mut map);
    assert_eq!(map, headers(&[("accept", "application/json")]));
}

#[test]
fn accept_only_offers_the_established_encoding() {
    use Encoding::{Cbor, Json, Protobuf};
    let both = "application/cbor, application/json;q=0.9";
    let table = "application/cbor;as=Table;v=v1;g=meta.k8s.io, application/json";
    let named = "application/vnd.kubernetes.protobuf, */*;q=0.5";
    for (accept, encoding, offered) in [
        (both, Cbor, "application/cbor"),
        (both, Json, "application/json;q=0.9"),
        (table, Cbor, "application/cbor;as=Table;v=v1;g=meta.k8s.io"),
        (named, Protobuf, "application/vnd.kubernetes.protobuf"),
        (named, Json, "*/*;q=0.5"),
        ("application/cbor-seq, */*", Cbor, "application/cbor-seq"),
        ("Application/CBOR", Cbor, "Application/CBOR"),
        ("*/*", Json, "*/*"),
        // The server has ignored the header.
        ("application/cbor", Json, "application/cbor"),
    ] {
        let mut map = headers(&[("accept", accept)]);
        accept_only(&mut map, encoding);
        assert_eq!(map, headers(&[("accept", offered)]), "{accept}");
    }
    let mut map = HeaderMap::new();
    accept_only(&mut map, Json);
    assert!(map.is_empty());
}
