//! Which heads are refused, which headers are forwarded, and that no combination of headers changes the
//! identity of a request.

use super::*;
use http::Request;
use proptest::prelude::*;
use std::net::Ipv4Addr;

fn parts(method: &str, uri: &str, version: Version, headers: &[(&str, &str)]) -> Parts {
    let mut request = Request::builder().method(method).uri(uri).version(version);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.body(()).unwrap().into_parts().0
}

fn header_map(headers: &[(&str, &str)]) -> HeaderMap {
    parts("GET", "/", Version::HTTP_11, headers).headers
}

/// All headers as text, sorted.
fn sorted(headers: &HeaderMap) -> Vec<(String, String)> {
    let mut all: Vec<_> = headers
        .iter()
        .map(|(name, value)| {
            (name.to_string(), String::from_utf8_lossy(value.as_bytes()).into_owned())
        })
        .collect();
    all.sort();
    all
}

const CLIENT: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 1, 2, 3));

#[test]
fn check_request_refuses_ambiguous_http1_heads() {
    const HOST: (&str, &str) = ("Host", "a");
    for (method, uri, headers, refusal) in [
        ("GET", "/api/v1/pods?x=y", &[HOST][..], None),
        ("OPTIONS", "*", &[HOST], None),
        ("GET", "/a%0d%0ab", &[HOST], None),
        ("GET", "/", &[HOST, ("Connection", "close, X-Mine")], None),
        ("POST", "/", &[HOST, ("Transfer-Encoding", "Chunked")], None),
        ("POST", "/", &[HOST, ("Transfer-Encoding", "gzip, chunked")], Some("other than chunked")),
        (
            "POST",
            "/",
            &[HOST, ("Transfer-Encoding", "chunked"), ("Transfer-Encoding", "chunked")],
            Some("other than chunked"),
        ),
        ("GET", "/", &[("Host", "")], None),
        ("GET", "/", &[("Host", "[::1]:6443")], None),
        ("GET", "/", &[("Host", "api:")], None),
        ("GET", "/", &[("Host", "u@api")], Some("Host")),
        ("GET", "/", &[("Host", "api/b")], Some("Host")),
        ("GET", "/", &[("Host", "api b")], Some("Host")),
        ("GET", "/", &[("Host", "api:x")], Some("Host")),
        ("GET", "/", &[("Host", "[::1")], Some("Host")),
        ("POST", "/", &[HOST, ("Content-Length", "5"), ("Content-Length", "5")], None),
        ("CONNECT", "a:1", &[HOST], Some("CONNECT")),
        ("GET", "https://a/b", &[HOST], Some("absolute")),
        ("GET", "/", &[], Some("no Host")),
        ("GET", "/", &[HOST, HOST], Some("more than one Host")),
        (
            "GET",
            "/",
            &[HOST, ("authorization", ""), ("authorization", "Bearer a")],
            Some("more than one Authorization"),
        ),
        (
            "POST",
            "/",
            &[HOST, ("content-length", "9223372036854775808")],
            Some("Content-Length is malformed"),
        ),
        ("POST", "/", &[HOST, ("content-length", "9223372036854775807")], None),
        (
            "POST",
            "/",
            &[HOST, ("Content-Length", "5"), ("Content-Length", "6")],
            Some("Content-Length"),
        ),
        ("POST", "/", &[HOST, ("Content-Length", "+5")], Some("Content-Length")),
        ("POST", "/", &[HOST, ("Content-Length", "5, 5")], Some("Content-Length")),
        ("POST", "/", &[HOST, ("Content-Length", "")], Some("Content-Length")),
        ("POST", "/", &[HOST, ("Content-Length", "0000000000000000005")], None),
        ("POST", "/", &[HOST, ("Content-Length", "00000000000000000005")], Some("Content-Length")),
        (
            "POST",
            "/",
            &[HOST, ("Content-Length", "5"), ("Transfer-Encoding", "chunked")],
            Some("both"),
        ),
        ("GET", "/", &[HOST, ("Connection", "close, Authorization")], Some("Authorization")),
        (
            "GET",
            "/",
            &[HOST, ("Connection", "close"), ("Connection", "x-REMOTE-user")],
            Some("x-REMOTE-user"),
        ),
        ("GET", "/", &[HOST, ("Connection", "Impersonate-Extra-Scopes")], Some("Impersonate")),
        ("GET", "/", &[HOST, ("Connection", "x-forwarded-for")], Some("x-forwarded-for")),
        ("GET", "/", &[HOST, ("Connection", "cookie")], Some("cookie")),
        ("GET", "/", &[HOST, ("Connection", "content-length")], Some("content-length")),
        ("GET", "/", &[HOST, ("Connection", "Sec-WebSocket-Protocol")], Some("Sec-WebSocket")),
    ] {
        assert_check(method, uri, Version::HTTP_11, headers, refusal);
    }
    assert_check("GET", "/", Version::HTTP_10, &[], None);
}

#[test]
fn check_request_refuses_ambiguous_http2_heads() {
    for (method, uri, headers, refusal) in [
        ("GET", "https://a/api", &[][..], None),
        ("GET", "https://A:6443/api", &[("host", "a:6443")], None),
        ("GET", "/api", &[("host", "a")], None),
        ("GET", "https://a/api", &[("te", "trailers")], None),
        ("GET", "https://a/api", &[("proxy-authorization", "x")], None),
        ("GET", "https://a/api", &[("host", "b")], Some("differ")),
        ("GET", "https://a/api", &[("host", "a"), ("host", "a")], Some("more than one Host")),
        ("GET", "https://u:p@a/api", &[], Some(":authority")),
        ("GET", "/api", &[("host", "u@a")], Some("Host")),
        ("GET", "https://a/api", &[("te", "gzip")], Some("TE")),
        ("GET", "https://a/api", &[("te", "trailers, deflate")], Some("TE")),
        ("GET", "https://a/api", &[("connection", "close")], Some("connection")),
        ("GET", "https://a/api", &[("keep-alive", "5")], Some("keep-alive")),
        ("GET", "https://a/api", &[("proxy-connection", "x")], Some("proxy-connection")),
        ("GET", "https://a/api", &[("transfer-encoding", "chunked")], Some("transfer-encoding")),
        ("GET", "https://a/api", &[("upgrade", "websocket")], Some("upgrade")),
        (
            "POST",
            "https://a/api",
            &[("content-length", "1"), ("content-length", "2")],
            Some("Content-Length"),
        ),
        ("CONNECT", "a:443", &[], Some("CONNECT")),
        ("ABCDEFGHIJKLMNOPQRSTUVWXYZABCDEF", "https://a/x", &[], None),
        ("ABCDEFGHIJKLMNOPQRSTUVWXYZABCDEFG", "https://a/x", &[], Some("too long")),
    ] {
        assert_check(method, uri, Version::HTTP_2, headers, refusal);
    }
}

#[test]
fn check_size_counts_the_bytes_of_http2_alike_for_both_versions() {
    // The method, the target and, for each field, its name, its value and 32 bytes.
    let groups: Vec<_> = (0..100).map(|_| ("impersonate-group", "team")).collect();
    let size = 3 + 5 + 100 * (17 + 4 + 32);
    for (version, uri, host, rest) in [
        (Version::HTTP_11, "/api?", Some(("host", "ab")), 4 + 2 + 32),
        (Version::HTTP_2, "https://ab/api?", None, 2),
    ] {
        let headers = [&groups[..], host.as_slice()].concat();
        let parts = parts("GET", uri, version, &headers);
        check_size(&parts, size + rest).unwrap();
        let error = check_size(&parts, size + rest - 1).unwrap_err();
        let message = format!(
            "jackstay: the request's headers are larger than {} bytes: see limits.max_header_bytes",
            size + rest - 1
        );
        assert_eq!((error.code.as_u16(), &*error.message), (431, &*message), "{version:?}");
    }
}

#[test]
fn check_size_refuses_more_names_than_a_header_map_can_take_more_of() {
    let head = |names: usize| {
        let mut parts = parts("GET", "/", Version::HTTP_11, &[]);
        for number in 0..names {
            let name = HeaderName::try_from(format!("a{number}")).unwrap();
            parts.headers.append(name, HeaderValue::from_static(""));
        }
        parts
    };
    let mut largest = head(MAX_NAMES);
    check_size(&largest, usize::MAX).unwrap();
    upstream_headers(&mut largest.headers, &ForwardedFor::new(CLIENT), false);
    assert_eq!(largest.headers.keys_len(), MAX_NAMES + 1);
    let error = check_size(&head(MAX_NAMES + 1), usize::MAX).unwrap_err();
    assert_eq!(error.code, 431);
    // Fields of one name are bounded by their bytes only.
    let mut parts = parts("GET", "/", Version::HTTP_11, &[]);
    for _ in 0..30_000 {
        parts.headers.append("a", HeaderValue::from_static(""));
    }
    check_size(&parts, usize::MAX).unwrap();
}

/// Asserts that a head is accepted, or refused with a message that contains `refusal`.
fn assert_check(
    method: &str,
    uri: &str,
    version: Version,
    headers: &[(&str, &str)],
    refusal: Option<&str>,
) {
    match (check_request(&parts(method, uri, version, headers)), refusal) {
        (Ok(()), None) => {}
        (Err(error), Some(refusal)) => {
            assert_eq!(error.code, 400);
            assert_eq!(error.closes_connection, version != Version::HTTP_2);
            assert!(error.message.contains(refusal), "{error:?} for {refusal}");
        }
        (result, refusal) => panic!("{method} {uri} {headers:?}: {result:?}, not {refusal:?}"),
    }
}

#[test]
fn upstream_headers_add_only_x_forwarded_for_to_common_request() {
    let mut headers =
        header_map(&[("authorization", "Bearer t"), ("accept", "*/*"), ("te", "trailers")]);
    let mut expected = headers.clone();
    expected.insert(X_FORWARDED_FOR, HeaderValue::from_static("10.1.2.3"));
    upstream_headers(&mut headers, &ForwardedFor::new(CLIENT), false);
    assert_eq!(sorted(&headers), sorted(&expected));
}

#[test]
fn upstream_headers_remove_hop_by_hop_and_x_remote_headers() {
    let mut headers = header_map(&[
        ("Connection", "close, X-Mine ,TE, bad name"),
        ("X-Mine", "1"),
        ("X-Mine", "2"),
        ("TE", "deflate;q=0.5, Trailers"),
        ("Keep-Alive", "timeout=5"),
        ("Proxy-Connection", "keep-alive"),
        ("Proxy-Authorization", "Basic x"),
        ("Transfer-Encoding", "chunked"),
        ("Upgrade", "h2c"),
        ("HTTP2-Settings", "AAMAAABkAAQAAP__"),
        ("Expect", "100-continue"),
        ("Priority", "u=0"),
        ("X-Remote-User", "root"),
        ("X-REMOTE-EXTRA-anything", "root"),
        ("X_Remote_User", "stays"),
        ("Impersonate-User", "jane"),
        ("X-Forwarded-For", "1.1.1.1"),
        ("X-Forwarded-For", ""),
        ("X-Forwarded-For", "2.2.2.2, 3.3.3.3"),
        ("Trailer", "x-checksum"),
    ]);
    upstream_headers(&mut headers, &ForwardedFor::new("::ffff:10.1.2.3".parse().unwrap()), false);
    let expected = header_map(&[
        ("te", "trailers"),
        ("x_remote_user", "stays"),
        ("impersonate-user", "jane"),
        ("x-forwarded-for", "1.1.1.1, 2.2.2.2, 3.3.3.3, 10.1.2.3"),
        ("trailer", "x-checksum"),
    ]);
    assert_eq!(sorted(&headers), sorted(&expected));
}

#[test]
fn headers_of_upgrade_keep_upgrade_and_end_to_end_headers() {
    let mut headers = header_map(&[
        ("Connection", "keep-alive, upgrade, X-Mine"),
        ("Upgrade", "SPDY/3.1"),
        ("X-Mine", "1"),
        ("Expect", "100-continue"),
        ("X-Remote-Group", "system:masters"),
        ("X-Stream-Protocol-Version", "v4.channel.k8s.io"),
        ("X-Stream-Protocol-Version", "v3.channel.k8s.io"),
        ("Sec-WebSocket-Key", "k"),
    ]);
    upstream_headers(&mut headers, &ForwardedFor::new(CLIENT), true);
    let mut expected = header_map(&[
        ("Connection", "Upgrade"),
        ("Upgrade", "SPDY/3.1"),
        ("X-Stream-Protocol-Version", "v4.channel.k8s.io"),
        ("X-Stream-Protocol-Version", "v3.channel.k8s.io"),
        ("Sec-WebSocket-Key", "k"),
    ]);
    let mut response = expected.clone();
    downstream_headers(&mut response, true);
    assert_eq!(sorted(&response), sorted(&expected));
    expected.insert(X_FORWARDED_FOR, HeaderValue::from_static("10.1.2.3"));
    assert_eq!(sorted(&headers), sorted(&expected));
}

#[test]
fn downstream_headers_remove_hop_by_hop_headers() {
    let mut headers = header_map(&[
        ("Connection", "close, X-Hop"),
        ("X-Hop", "1"),
        ("Transfer-Encoding", "chunked"),
        ("Proxy-Authenticate", "Basic"),
        ("Audit-Id", "a"),
        ("Trailer", "x"),
        ("X-Remote-User", "stays in a response"),
        ("Expect", "100-continue"),
    ]);
    downstream_headers(&mut headers, false);
    let expected = header_map(&[
        ("Audit-Id", "a"),
        ("Trailer", "x"),
        ("X-Remote-User", "stays in a response"),
        ("Expect", "100-continue"),
    ]);
    assert_eq!(sorted(&headers), sorted(&expected));
}

#[test]
fn upstream_trailers_keep_only_end_to_end_fields_without_a_role() {
    let trailers = header_map(&[
        ("x-checksum", "1"),
        ("x_remote_user", "another header"),
        ("connection", "close"),
        ("transfer-encoding", "chunked"),
        ("content-length", "5"),
        ("host", "evil"),
        ("expect", "100-continue"),
        ("authorization", "Bearer other"),
        ("cookie", "a=b"),
        ("X-Remote-User", "root"),
        ("Impersonate-Group", "system:masters"),
        ("X-Forwarded-For", "10.0.0.1"),
    ]);
    let expected = [("x-checksum", "1"), ("x_remote_user", "another header")];
    assert_eq!(sorted(&upstream_trailers(trailers).unwrap()), sorted(&header_map(&expected)));
}

#[test]
fn upstream_trailers_are_limited_in_number_and_size() {
    let fields = |count: usize, size: usize| {
        let value = "x".repeat(size);
        let names: Vec<_> = (0..count).map(|n| format!("x-{n:04}")).collect();
        let fields: Vec<_> = names.iter().map(|name| (name.as_str(), value.as_str())).collect();
        header_map(&fields)
    };
    for (count, size, fits) in
        [(32, 1, true), (33, 1, false), (1, 4_090, true), (1, 4_091, false), (30, 200, false)]
    {
        let trailers = upstream_trailers(fields(count, size));
        assert_eq!(trailers.is_some(), fits, "{count} of {size} bytes");
    }
}

/// Names for random headers. `Connection` is listed repeatedly, to be frequent.
const NAMES: [&str; 24] = [
    "Authorization",
    "Connection",
    "Connection",
    "Connection",
    "Keep-Alive",
    "Proxy-Connection",
    "Proxy-Authorization",
    "Proxy-Authenticate",
    "TE",
    "Transfer-Encoding",
    "Upgrade",
    "HTTP2-Settings",
    "X-Remote-User",
    "X-Remote-Group",
    "X-Remote-Uid",
    "X-Remote-Extra-Foo",
    "Impersonate-User",
    "Impersonate-Group",
    "X-Forwarded-For",
    "Cookie",
    "X-Mine",
    "Accept",
    "Content-Type",
    "Trailer",
];

/// A name of [`NAMES`] or a random token, in random case.
fn any_name() -> impl Strategy<Value = String> {
    let name = prop_oneof![
        4 => proptest::sample::select(&NAMES[..]).prop_map(str::to_owned),
        1 => "[Xx]-[Rr]emote-[a-zA-Z0-9_-]{0,8}",
        1 => "[a-zA-Z0-9_-]{1,12}",
    ];
    (name, any::<u64>()).prop_map(|(name, cases)| {
        let flip = |(i, c): (usize, char)| match cases >> (i % 64) & 1 {
            0 => c.to_ascii_lowercase(),
            _ => c.to_ascii_uppercase(),
        };
        name.chars().enumerate().map(flip).collect()
    })
}

fn any_header() -> impl Strategy<Value = (String, String)> {
    let tokens = proptest::collection::vec(any_name(), 0..4).prop_map(|tokens| tokens.join(" ,\t"));
    (any_name(), prop_oneof![tokens, "[ -~]{0,12}".prop_map(|v| v.trim().to_owned())])
}

proptest! {
    #[test]
    fn upstream_headers_keep_identity_for_any_client_headers(
        sent in proptest::collection::vec(any_header(), 0..12),
        upgrade in any::<bool>(),
    ) {
        let mut headers = HeaderMap::new();
        for (name, value) in &sent {
            headers.append(HeaderName::from_bytes(name.as_bytes()).unwrap(), value.parse().unwrap());
        }
        let named_in_connection: Vec<String> = list_items(headers.get_all(CONNECTION))
            .map(|token| String::from_utf8_lossy(token).to_lowercase())
            .collect();
        let before = headers.clone();
        upstream_headers(&mut headers, &ForwardedFor::new(CLIENT), upgrade);
        let keeps_upgrade = upgrade && before.contains_key(UPGRADE);
        for name in headers.keys().map(HeaderName::as_str) {
            prop_assert!(!name.starts_with("x-remote-"), "{name}");
            let may_stay = name == "te" || keeps_upgrade && matches!(name, "upgrade" | "connection");
            let is_named = named_in_connection.iter().any(|named| named == name);
            prop_assert!(may_stay || !is_hop_by_hop(name), "{name}");
            prop_assert!(may_stay || is_protected(name.as_bytes()) || !is_named, "{name}");
        }
        prop_assert!(headers.get_all(TE).iter().all(|te| te == "trailers"));
        if keeps_upgrade {
            prop_assert_eq!(headers.get_all(CONNECTION).iter().collect::<Vec<_>>(), ["Upgrade"]);
        }
        // All other end-to-end headers, such as Authorization and Impersonate-*, are unchanged and in order.
        for name in before.keys() {
            let text = name.as_str();
            let is_named = named_in_connection.iter().any(|named| named == text);
            let must_stay = !is_hop_by_hop(text)
                && !text.starts_with("x-remote-")
                && *name != X_FORWARDED_FOR
                && (is_protected(text.as_bytes()) || !is_named);
            if must_stay {
                prop_assert!(before.get_all(name).iter().eq(headers.get_all(name).iter()), "{name}");
            }
        }
        prop_assert_eq!(headers.get_all(X_FORWARDED_FOR).iter().count(), 1);
        prop_assert!(headers[X_FORWARDED_FOR].as_bytes().ends_with(b"10.1.2.3"));
    }

    #[test]
    fn check_request_refuses_connection_that_names_protected_header(
        prefix in "[a-z, ]{0,8}",
        name in proptest::sample::select(
            &["Authorization", "X-Remote-User", "Impersonate-Uid", "X-Forwarded-For", "Cookie"][..],
        ),
        upper in any::<bool>(),
    ) {
        let name = if upper { name.to_uppercase() } else { name.to_lowercase() };
        let value = format!("{prefix},{name}");
        let parts = parts("GET", "/", Version::HTTP_11, &[("host", "a"), ("connection", &value)]);
        prop_assert!(check_request(&parts).is_err());
    }
}
