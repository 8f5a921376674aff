//! Paths (those of Kubernetes' `requestinfo_test.go` and others), request kinds, upgrades and API groups.

use super::*;

fn info(method: &str, target: &str) -> RequestInfo {
    info_with_headers(method, target, &[])
}

fn info_below(prefix: &str, method: &str, target: &str) -> RequestInfo {
    let request = http::Request::builder().method(method).uri(target).body(()).unwrap();
    RequestInfo::new(&request.into_parts().0, &PathPrefix::parse(prefix).unwrap())
}

fn info_with_headers(method: &str, target: &str, headers: &[(&str, &str)]) -> RequestInfo {
    let mut request = http::Request::builder().method(method).uri(target);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    RequestInfo::new(&request.body(()).unwrap().into_parts().0, &PathPrefix::default())
}

const UPGRADE: &[(&str, &str)] = &[("Connection", "keep-alive, Upgrade"), ("Upgrade", "websocket")];

#[test]
fn request_info_of_resource_path_matches_kubernetes() {
    // method, target, verb, group, resource, subresource, name
    type Row = [&'static str; 7];
    #[rustfmt::skip]
    let rows: &[Row] = &[
        ["GET", "/api/v1/namespaces", "list", "", "namespaces", "", ""],
        ["GET", "/api/v1/namespaces/other", "get", "", "namespaces", "", "other"],
        ["GET", "/api/v1/namespaces/other/pods", "list", "", "pods", "", ""],
        ["GET", "/api/v1/namespaces/other/pods/foo", "get", "", "pods", "", "foo"],
        ["HEAD", "/api/v1/namespaces/other/pods/foo", "get", "", "pods", "", "foo"],
        ["GET", "/api/v1/pods", "list", "", "pods", "", ""],
        ["HEAD", "/api/v1/pods", "list", "", "pods", "", ""],
        ["GET", "/api/v1/pods/", "list", "", "pods", "", ""],
        ["GET", "//api/v1/pods//", "list", "", "pods", "", ""],
        ["GET", "/api/v1/nodes/n1", "get", "", "nodes", "", "n1"],
        ["PATCH", "/api/v1/nodes/n1/status", "patch", "", "nodes", "status", "n1"],
        // Path prefixes that set the verb.
        ["GET", "/api/v1/proxy/namespaces/other/pods/foo", "proxy", "", "pods", "", "foo"],
        ["GET", "/api/v1/proxy/namespaces/other/pods/foo/sub/path/not/sub", "proxy", "", "pods", "", "foo"],
        ["POST", "/api/v1/proxy/nodes/n1", "proxy", "", "nodes", "", "n1"],
        ["GET", "/api/v1/watch/pods", "watch", "", "pods", "", ""],
        ["GET", "/api/v1/watch/namespaces/other/pods", "watch", "", "pods", "", ""],
        ["GET", "/api/v1/watch/namespaces/other/pods/foo", "watch", "", "pods", "", "foo"],
        ["GET", "/api/v1/watch/namespaces", "watch", "", "namespaces", "", ""],
        ["GET", "/apis/apps/v1/watch/deployments", "watch", "apps", "deployments", "", ""],
        ["GET", "/api/v1/watch", "get", "", "", "", ""],
        ["DELETE", "/api/v1/proxy/", "delete", "", "", "", ""],
        // The query decides between list and watch. Unlike the apiserver, jackstay reads no name from it.
        ["GET", "/api/v1/pods?watch=true", "watch", "", "pods", "", ""],
        ["GET", "/api/v1/pods?watch=1", "watch", "", "pods", "", ""],
        ["GET", "/api/v1/pods?watch", "watch", "", "pods", "", ""],
        ["GET", "/api/v1/pods?watch=", "watch", "", "pods", "", ""],
        ["GET", "/api/v1/pods?watch=yes", "watch", "", "pods", "", ""],
        ["GET", "/api/v1/pods?w%61tch=t", "watch", "", "pods", "", ""],
        ["GET", "/api/v1/pods?watch=False", "list", "", "pods", "", ""],
        ["GET", "/api/v1/pods?watch=0", "list", "", "pods", "", ""],
        ["GET", "/api/v1/pods?watch=false&watch=true", "list", "", "pods", "", ""],
        ["GET", "/api/v1/pods?limit=1;watch=true", "list", "", "pods", "", ""],
        ["GET", "/api/v1/pods?watch=%zz", "list", "", "pods", "", ""],
        ["GET", "/api/v1/namespaces/x/pods/foo?watch=true", "get", "", "pods", "", "foo"],
        ["GET", "/api/v1/namespaces/x/pods?fieldSelector=metadata.name%3Dfoo", "list", "", "pods", "", ""],
        ["GET", "/api/v1/namespaces/x/pods?watch=1&fieldSelector=metadata.name=foo", "watch", "", "pods", "", ""],
        ["DELETE", "/api/v1/namespaces/x/pods?fieldSelector=metadata.name%3Dfoo", "deletecollection", "", "pods", "", ""],
        // Subresources; `status` and `finalize` are those of a namespace.
        ["GET", "/api/v1/namespaces/other/pods/foo/status", "get", "", "pods", "status", "foo"],
        ["GET", "/api/v1/namespaces/other/pods/foo/proxy/sub/path", "get", "", "pods", "proxy", "foo"],
        ["GET", "/api/v1/namespaces/other/pods/foo/log?follow=true", "get", "", "pods", "log", "foo"],
        ["PUT", "/api/v1/namespaces/x/finalize", "update", "", "namespaces", "finalize", "x"],
        ["PUT", "/api/v1/namespaces/x/status", "update", "", "namespaces", "status", "x"],
        ["GET", "/api/v1/namespaces/x/status/y", "get", "", "namespaces", "status", "x"],
        ["POST", "/api/v1/namespaces/x/serviceaccounts/sa/token", "create", "", "serviceaccounts", "token", "sa"],
        ["POST", "/api/v1/namespaces/x/pods/foo/binding", "create", "", "pods", "binding", "foo"],
        // Writes.
        ["POST", "/api/v1/namespaces/other/pods", "create", "", "pods", "", ""],
        ["PUT", "/api/v1/namespaces/other/pods/foo", "update", "", "pods", "", "foo"],
        ["PATCH", "/apis/apps/v1/namespaces/x/deployments/d/scale", "patch", "apps", "deployments", "scale", "d"],
        ["DELETE", "/api/v1/namespaces/other/pods/foo", "delete", "", "pods", "", "foo"],
        ["DELETE", "/api/v1/namespaces/other/pods", "deletecollection", "", "pods", "", ""],
        ["DELETE", "/api/v1/nodes", "deletecollection", "", "nodes", "", ""],
        ["OPTIONS", "/api/v1/pods", "other", "", "pods", "", ""],
        // Groups.
        ["GET", "/apis/extensions/v1beta1/namespaces/x/ingresses", "list", "extensions", "ingresses", "", ""],
        ["PUT", "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/n1", "update", "coordination.k8s.io", "leases", "", "n1"],
        // A repeated slash is an empty part, as in Go. Escapes are decoded before the path is split.
        ["GET", "/api//v1/pods", "get", "", "v1", "", "pods"],
        ["GET", "/api/v1/namespaces//pods", "list", "", "pods", "", ""],
        ["GET", "/api/v1/namespaces/a%2Fpods", "list", "", "pods", "", ""],
        ["GET", "/%61pi/v1/namespaces/x/pods/p%20q", "get", "", "pods", "", "p q"],
        ["POST", "/api/v1/namespaces/x/pods/foo/ex%65c", "create", "", "pods", "exec", "foo"],
        ["GET", "/api/v1/namespaces/x/pods/foo+bar", "get", "", "pods", "", "foo+bar"],
        ["GET", "/api/v1/namespaces/x/pods/%ff", "get", "", "pods", "", "\u{fffd}"],
    ];
    for row in rows {
        let info = info(row[0], row[1]);
        assert!(info.is_resource, "{row:?}");
        let fields = [
            info.verb.as_str(),
            info.part(info.group),
            info.part(info.resource),
            info.part(info.subresource),
            info.part(info.name),
        ];
        assert_eq!(fields, row[2..], "{} {}", row[0], row[1]);
    }
}

#[test]
fn request_info_of_other_path_is_not_a_resource() {
    for (method, target, verb) in [
        ("GET", "/", "get"),
        ("GET", "/healthz", "get"),
        ("GET", "/readyz?verbose", "get"),
        ("GET", "/api", "get"),
        ("GET", "/api/", "get"),
        ("GET", "/api/v1", "get"),
        ("GET", "/apis", "get"),
        ("GET", "/apis/apps", "get"),
        ("GET", "/apis/apps/v1", "get"),
        ("GET", "/apis/apps/v1/", "get"),
        ("GET", "/openapi/v3/apis/apps/v1", "get"),
        ("GET", "/API/v1/pods", "get"),
        ("GET", "/not/an/api/path/at/all", "get"),
        ("HEAD", "/version", "head"),
        ("POST", "/foo", "post"),
        ("PUT", "/a/b/c/d", "put"),
        ("PATCH", "/foo", "patch"),
        ("DELETE", "/foo", "delete"),
        ("OPTIONS", "*", "options"),
        ("BREW", "/coffee", "other"),
        ("GET", "/api%zz/v1/pods", "get"),
    ] {
        let info = info(method, target);
        assert!(!info.is_resource, "{target}");
        assert_eq!(info.verb.as_str(), verb, "{target}");
        assert_eq!(
            (info.part(info.resource), info.part(info.name), info.part(info.group)),
            ("", "", ""),
            "{target}"
        );
    }
}

#[test]
fn request_kind_follows_from_verb_subresource_and_dry_run() {
    use RequestKind::{Log, NonMutating, Read, Tunnel, Watch, Write};
    const AUTHN: &str = "/apis/authentication.k8s.io/v1/";
    const AUTHZ: &str = "/apis/authorization.k8s.io/v1/";
    const NS: &str = "/api/v1/namespaces/x/";
    for (method, prefix, rest, kind) in [
        ("GET", NS, "pods", Read),
        ("GET", NS, "pods/p", Read),
        ("HEAD", NS, "pods/p", Read),
        ("GET", "/apis", "", Read),
        ("GET", "/healthz", "", Read),
        ("HEAD", "/version", "", Read),
        ("OPTIONS", "/api/v1/pods", "", Read),
        ("GET", NS, "pods?watch=true", Watch),
        ("GET", "/api/v1/watch/pods", "", Watch),
        ("HEAD", NS, "pods?watch=true", Read),
        ("POST", "/api/v1/watch/pods", "", Write),
        ("GET", NS, "pods/p/log", Log),
        ("GET", NS, "pods/p/log?follow=true", Log),
        ("POST", NS, "pods/p/log", Write),
        ("POST", NS, "pods", Write),
        ("PUT", NS, "pods/p/status", Write),
        ("PATCH", NS, "pods/p", Write),
        ("DELETE", NS, "pods/p", Write),
        ("DELETE", NS, "pods", Write),
        ("POST", NS, "pods/p/binding", Write),
        ("POST", NS, "pods/p/eviction", Write),
        ("POST", NS, "serviceaccounts/sa/token", Write),
        ("POST", NS, "serviceaccounts/sa/token?dryRun=All", Write),
        ("POST", "/foo", "", Write),
        ("TRACE", "/foo", "", Write),
        ("POST", AUTHN, "tokenreviews", NonMutating),
        ("POST", AUTHN, "selfsubjectreviews", NonMutating),
        ("POST", AUTHZ, "subjectaccessreviews", NonMutating),
        ("POST", AUTHZ, "selfsubjectaccessreviews", NonMutating),
        ("POST", AUTHZ, "selfsubjectrulesreviews", NonMutating),
        ("POST", AUTHZ, "namespaces/x/localsubjectaccessreviews", NonMutating),
        ("POST", AUTHZ, "tokenreviews", Write),
        ("POST", AUTHN, "subjectaccessreviews", Write),
        ("POST", "/apis/evil.example.com/v1/", "tokenreviews", Write),
        ("POST", NS, "tokenreviews", Write),
        ("PUT", AUTHN, "tokenreviews/x", Write),
        ("POST", AUTHN, "tokenreviews/x", Write),
        ("POST", NS, "pods?dryRun=All", NonMutating),
        ("PUT", NS, "pods/p?dryRun=All&fieldManager=x", NonMutating),
        ("PATCH", "/apis/apps/v1/namespaces/x/deployments/d", "?dry%52un=%41ll", NonMutating),
        ("POST", NS, "pods?dryRun=all", Write),
        ("POST", NS, "pods?dryRun", Write),
        ("POST", NS, "pods?dryRun=All&dryRun=", Write),
        ("POST", NS, "pods?dryRun=&dryRun=All", Write),
        ("POST", NS, "pods?dryRun=All;x", Write),
        ("DELETE", NS, "pods/p?dryRun=All", Write),
        ("POST", "/apis/metrics.example.com/v1/", "things?dryRun=All", Write),
        ("POST", "/foo?dryRun=All", "", Write),
        ("POST", NS, "pods/p/exec?command=sh", Tunnel),
        ("GET", NS, "pods/p/exec?command=sh", Tunnel),
        ("POST", NS, "pods/p/attach", Tunnel),
        ("POST", NS, "pods/p/portforward", Tunnel),
        ("GET", NS, "services/s/proxy/", Tunnel),
        ("DELETE", NS, "pods/p/proxy/a/b", Tunnel),
        ("GET", "/api/v1/nodes/n1/proxy/stats", "", Tunnel),
        ("GET", "/api/v1/proxy/nodes/n1", "", Tunnel),
    ] {
        let target = format!("{prefix}{rest}");
        assert_eq!(info(method, &target).kind, kind, "{method} {target}");
    }
    for target in
        ["/api/v1/namespaces/x/pods/p/exec", "/api/v1/pods?watch=1", "/apis/x.y/v1/z/a/vnc"]
    {
        let info = info_with_headers("GET", target, UPGRADE);
        assert_eq!(info.kind, Tunnel, "{target}");
        assert!(info.long_running());
    }
}

#[test]
fn is_upgrade_requires_connect_or_http11_with_both_headers() {
    let is_upgrade_with = |version, headers: &[(&str, &str)]| {
        let mut request = http::Request::get("/").version(version);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let parts = request.body(()).unwrap().into_parts().0;
        is_upgrade(&parts.method, &parts.headers, parts.version)
    };
    assert!(is_upgrade_with(Version::HTTP_11, UPGRADE));
    assert!(is_upgrade_with(
        Version::HTTP_11,
        &[("connection", "UPGRADE"), ("upgrade", "SPDY/3.1")]
    ));
    assert!(is_upgrade_with(
        Version::HTTP_11,
        &[("connection", "close"), ("connection", "a,upgrade ,b"), ("upgrade", "x")]
    ));
    assert!(!is_upgrade_with(
        Version::HTTP_11,
        &[("connection", "upgraded"), ("upgrade", "websocket")]
    ));
    assert!(!is_upgrade_with(Version::HTTP_11, &[("upgrade", "websocket")]));
    assert!(!is_upgrade_with(Version::HTTP_11, &[("connection", "upgrade")]));
    assert!(!is_upgrade_with(
        Version::HTTP_11,
        &[("connection", "upgrade"), ("upgrade", "H2C, websocket")]
    ));
    assert!(!is_upgrade_with(Version::HTTP_10, UPGRADE));
    assert!(!is_upgrade_with(Version::HTTP_2, UPGRADE));
    assert!(is_upgrade(&Method::CONNECT, &HeaderMap::new(), Version::HTTP_2));
}

#[test]
fn request_below_a_prefix_is_read_as_at_the_root() {
    for prefix in ["/k8s/clusters/c-1", "/clusters/root:org:ws", "/api", "/apis/x/y", "/a%20b"] {
        for (method, target) in [
            ("GET", "/api/v1/namespaces/x/pods/p"),
            ("GET", "/api/v1/pods?watch=1"),
            ("GET", "/api/v1/watch/pods"),
            ("GET", "/apis/apps/v1/namespaces/a%2Fpods"),
            ("PUT", "/apis/coordination.k8s.io/v1/namespaces/n/leases/l"),
            ("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"),
            ("PATCH", "/api/v1/nodes/n?dryRun=All"),
            ("POST", "/api/v1/namespaces/x/pods/p/exec"),
            ("GET", "/debug/pprof/profile"),
            ("GET", "/version"),
            ("GET", "/"),
        ] {
            let below = info_below(prefix, method, &format!("{prefix}{target}"));
            let at_root = info(method, target);
            let read = |info: &RequestInfo| {
                let parts = [info.group, info.resource, info.name, info.subresource];
                let parts = parts.map(|part| info.part(part).to_owned());
                (info.verb, info.kind, info.is_resource, info.long_running(), parts)
            };
            assert_eq!(read(&below), read(&at_root), "{method} {prefix}{target}");
            assert_eq!((below.path(), below.query()), (at_root.path(), at_root.query()));
        }
    }
}

#[test]
fn request_outside_the_prefix_is_no_resource_request() {
    let prefix = "/k8s/clusters/c-1";
    for (method, target, verb, kind) in [
        ("GET", "/api/v1/pods?watch=1", Verb::Get, RequestKind::Read),
        ("GET", "/k8s/clusters/c-10/api/v1/pods?watch=1", Verb::Get, RequestKind::Read),
        ("GET", "/k8s/clusters", Verb::Get, RequestKind::Read),
        ("GET", "//k8s/clusters/c-1/api/v1/pods", Verb::Get, RequestKind::Read),
        ("DELETE", "/api/v1/pods", Verb::Delete, RequestKind::Write),
        ("POST", "/api/v1/pods?dryRun=All", Verb::Post, RequestKind::Write),
    ] {
        let info = info_below(prefix, method, target);
        assert_eq!((info.verb, info.kind, info.is_resource), (verb, kind, false), "{target}");
        assert_eq!(info.resource_name(), None, "{target}");
        let path = target.split('?').next().unwrap();
        assert_eq!(info.path(), path);
    }
    // Both spellings of a path are the same path.
    let encoded = info_below("/clusters/root:ws", "GET", "/clusters/root%3Aws/api/v1/pods?watch=1");
    assert_eq!(encoded.kind, RequestKind::Watch);
}

#[test]
fn resource_name_is_that_of_the_versions_in_the_response() {
    for (method, target, expected) in [
        ("POST", "/api/v1/namespaces/x/pods", Some("pods")),
        ("DELETE", "/apis/apps/v1/namespaces/x/deployments/d", Some("apps/deployments")),
        ("PUT", "/apis/apps/v1/namespaces/x/deployments/d/scale", Some("apps/deployments")),
        ("PATCH", "/api/v1/nodes/n/status", Some("nodes")),
        ("PATCH", "/api/v1/namespaces/x/pods/p/resize", Some("pods")),
        ("PATCH", "/api/v1/namespaces/x/pods/p/ephemeralcontainers", Some("pods")),
        ("POST", "/api/v1/namespaces/x/pods/p/binding", Some("pods")),
        ("POST", "/api/v1/namespaces/x/pods/p/eviction", Some("pods")),
        ("POST", "/api/v1/namespaces/x/bindings", Some("pods")),
        ("POST", "/apis/e.com/v1/namespaces/x/bindings", Some("e.com/bindings")),
        ("POST", "/apis/e.com/v1/namespaces/x/pods/p/eviction", None),
        ("POST", "/api/v1/namespaces/x/serviceaccounts/a/token", None),
        ("GET", "/api/v1/namespaces/x/pods/p/log", None),
        ("GET", "/api/v1", None),
    ] {
        assert_eq!(info(method, target).resource_name().as_deref(), expected, "{target}");
    }
}

#[test]
fn request_info_with_a_prefix_is_not_larger() {
    // Each request keeps one.
    assert_eq!(size_of::<RequestInfo>(), 96);
}

#[test]
fn long_running_matches_kube_apiserver() {
    for (method, target, expected) in [
        ("GET", "/api/v1/pods?watch=true", true),
        ("GET", "/api/v1/proxy/nodes/n1", true),
        ("GET", "/api/v1/namespaces/x/pods/p/log", true),
        ("POST", "/api/v1/namespaces/x/pods/p/attach", true),
        ("GET", "/debug/pprof/profile", true),
        ("GET", "/api/v1/pods", false),
        ("GET", "/logs/x", false),
        ("POST", "/api/v1/namespaces/x/pods", false),
    ] {
        assert_eq!(info(method, target).long_running(), expected, "{target}");
    }
}

#[test]
fn is_built_in_group_accepts_only_listed_groups() {
    for group in ["", "apps", "batch", "policy", "resource.k8s.io", "flowcontrol.apiserver.k8s.io"]
    {
        assert!(is_built_in_group(group), "{group}");
    }
    for group in ["metrics.k8s.io", "gateway.networking.k8s.io", "snapshot.storage.k8s.io", "Apps"]
    {
        assert!(!is_built_in_group(group), "{group}");
    }
}

proptest::proptest! {
    #[test]
    fn request_info_of_any_target_classifies_no_unsafe_method_as_read(
        method in "(GET|HEAD|POST|PUT|PATCH|DELETE|OPTIONS|BREW)",
        path in "(/(api|apis|v1|watch|proxy|namespaces|pods|x|apps|log|exec|%2[fF]|%|)){0,11}",
        query in "([a-zA-Z=&;%+0-9]{0,20}|watch=1|dryRun=All)",
    ) {
        let target = format!("/{path}?{query}");
        if target.parse::<http::Uri>().is_ok() {
            let info = info(&method, &target);
            if !matches!(method.as_str(), "GET" | "HEAD" | "OPTIONS") {
                proptest::prop_assert!(!matches!(info.kind, RequestKind::Read | RequestKind::Watch | RequestKind::Log));
            }
            proptest::prop_assert!(info.is_resource || info.part(info.resource).is_empty());
        }
    }
}
