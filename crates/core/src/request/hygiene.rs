//! Refuses ambiguous request heads, and removes the headers that belong to one connection only.
//!
//! A client can smuggle a request or forge an identity if two parties read a message differently.
//! Therefore an ambiguous head is refused ([`check_request`]), and headers of one connection are not
//! forwarded on the next one ([`upstream_headers`], [`downstream_headers`]). The values of other headers
//! and the path are not changed.
//!
//! * Hop-by-hop headers are removed (RFC 9110, section 7.6.1), and so are the headers that `Connection`
//!   names. `Trailer` stays, because trailers are forwarded and hyper sends only announced ones on
//!   HTTP/1.1.
//! * `X-Remote-*` is removed from every request, because it sets the identity on a connection with a
//!   front-proxy certificate. `X_Remote_User` stays, because Go treats it as another header.
//! * `Priority` (RFC 9218) is removed from every request. It ranks a stream above the others of its connection, and the
//!   streams of many clients share one to the apiserver. (Go's HTTP/2 server honours it from 1.27 on, unless a request
//!   has `X-Forwarded-For`, `Forwarded` or `Via`: `MetaHeadersFrame.rfc9218Priority` in `http2/frame.go`. Other
//!   servers honour it for each request.) PRIORITY and `PRIORITY_UPDATE` frames end at the listener. A heartbeat gets one
//!   of jackstay, because it matters more than any other request.
//! * `Expect` is removed from every request, because jackstay itself asks for the body. On HTTP/1.1, hyper
//!   sends the 100 with the first read of the body, when the upstream stream is open
//!   (the forwarder). On HTTP/2, hyper 1.12 cannot send a 100.
//! * hyper refuses obs-fold, whitespace in names and malformed chunks, and h2 refuses most heads that
//!   HTTP/2 forbids. The checks here do not depend on that.

#[cfg(test)]
mod tests;

use std::fmt::Display;
use std::net::IpAddr;

use http::header::{
    AUTHORIZATION, CONNECTION, CONTENT_LENGTH, Entry, HOST, HeaderMap, HeaderName, HeaderValue, TE,
    TRANSFER_ENCODING, UPGRADE,
};
use http::request::Parts;
use http::uri::Authority;
use http::{Method, Version};

use super::status_error::StatusError;
use crate::admission::Refusal;

/// The digits of the largest `Content-Length`, which 64 bits can hold: h2 refuses longer ones, also with leading
/// zeros.
const MAX_LENGTH_DIGITS: usize = 19;

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

/// Longest method that is forwarded, in bytes. The longest registered one has 17 (IANA, HTTP methods).
const MAX_METHOD: usize = 32;

/// Refuses a head that two parties could read differently, or that could not be forwarded unchanged.
///
/// # Errors
/// 400 with the reason. It ends an HTTP/1.1 connection, because a client or a proxy that reads this head
/// differently may also disagree about where the next request begins.
pub fn check_request(parts: &Parts) -> Result<(), StatusError> {
    let is_http1 = parts.version < Version::HTTP_2;
    check_head(parts).map_err(|error| if is_http1 { error.closing_connection() } else { error })
}

fn check_head(parts: &Parts) -> Result<(), StatusError> {
    if parts.method == Method::CONNECT {
        return refuse("CONNECT is not served here");
    }
    if parts.method.as_str().len() > MAX_METHOD {
        return refuse("the method is too long");
    }
    let target = parts.uri.path_and_query().map_or("", |target| target.as_str());
    let is_asterisk = target == "*" && parts.method == Method::OPTIONS;
    if !target.starts_with('/') && !is_asterisk {
        return refuse("the request target is not a path");
    }
    if target.bytes().any(|byte| byte <= b' ' || byte == 0x7f) {
        return refuse("the request target holds a control character or a space");
    }
    if parts.version == Version::HTTP_2 {
        check_http2(parts)?;
    } else {
        check_http1(parts)?;
    }
    // Go reads the first of several, and other servers may ignore an empty one and read the second.
    if parts.headers.get_all(AUTHORIZATION).iter().nth(1).is_some() {
        return refuse("more than one Authorization header");
    }
    check_content_length(&parts.headers)
}

/// Bytes that a field counts besides its name and value: what RFC 9113, section 6.5.2 adds for the memory of a field.
pub const FIELD_OVERHEAD: usize = 32;

/// The largest head of a response, in bytes, counted as that of a request.
pub const MAX_RESPONSE_HEAD: usize = 64 * 1024;

/// The longest request target, in bytes. An [`http::Uri`] holds no longer one.
pub const MAX_TARGET: usize = u16::MAX as usize - 1;

/// The names of a head, at most. [`HeaderMap`] holds 24,576, and panics when one more is inserted; jackstay adds some.
pub const MAX_NAMES: usize = 24_000;

/// Refuses a method, a request target and header fields that take more than `max` bytes, counted alike for HTTP/1.1 and
/// HTTP/2: name and value of each field and [`FIELD_OVERHEAD`], as kube-apiserver counts those of HTTP/2.
///
/// # Errors
/// 431.
pub fn check_size(parts: &Parts, max: usize) -> Result<(), StatusError> {
    let target = parts.uri.path_and_query().map_or(0, |target| target.as_str().len());
    let authority = parts.uri.authority().map_or(0, |authority| authority.as_str().len());
    let line = parts.method.as_str().len() + target + authority;
    let size = |(name, value): (&HeaderName, &HeaderValue)| {
        name.as_str().len() + value.len() + FIELD_OVERHEAD
    };
    if line + parts.headers.iter().map(size).sum::<usize>() > max {
        return Err(head_too_large(max));
    }
    if parts.headers.keys_len() > MAX_NAMES {
        let message = format_args!("the request has more than {MAX_NAMES} different headers");
        return Err(StatusError::header_too_large(message));
    }
    Ok(())
}

/// The error of a head that takes more than `max` bytes.
pub fn head_too_large(max: usize) -> StatusError {
    let (reason, limit) = (Refusal::HeadSize.reason(), Refusal::HeadSize.limits());
    StatusError::header_too_large(format_args!("{reason} {max} bytes: see {}", limit.join(", ")))
}

/// The error of a request target that is longer than [`MAX_TARGET`].
pub fn target_too_long() -> StatusError {
    StatusError::target_too_long(format_args!(
        "the request target is longer than {MAX_TARGET} bytes, which is a fixed limit"
    ))
}

fn refuse(reason: impl Display) -> Result<(), StatusError> {
    Err(StatusError::bad_request(reason))
}

/// RFC 9113, sections 8.2.2 and 8.3.1.
fn check_http2(parts: &Parts) -> Result<(), StatusError> {
    for name in parts.headers.keys() {
        if *name != TE && is_hop_by_hop(name.as_str()) && !name.as_str().starts_with("proxy-auth") {
            return refuse(format_args!("the header {name} does not exist in HTTP/2"));
        }
    }
    if parts.headers.get_all(TE).iter().any(|te| te != "trailers") {
        return refuse("TE in HTTP/2 may only say trailers");
    }
    let authority = parts.uri.authority();
    if authority.is_some_and(|authority| !is_host_and_port(authority)) {
        return refuse(":authority is not a host with an optional port");
    }
    let mut hosts = parts.headers.get_all(HOST).iter();
    match (hosts.next(), hosts.next(), authority.map(Authority::as_str)) {
        (_, Some(_), _) => refuse("more than one Host header"),
        (Some(host), None, Some(authority))
            if !host.as_bytes().eq_ignore_ascii_case(authority.as_bytes()) =>
        {
            refuse("Host and :authority differ")
        }
        (Some(host), None, _) => check_host(host),
        _ => Ok(()),
    }
}

/// RFC 9112, section 3.2: a `Host` is a host with an optional port. It may be empty.
fn check_host(host: &HeaderValue) -> Result<(), StatusError> {
    let host = host.as_bytes();
    if host.is_empty() || Authority::try_from(host).is_ok_and(|host| is_host_and_port(&host)) {
        return Ok(());
    }
    refuse("the Host header is not a host with an optional port")
}

/// Whether an authority has no user information, and only digits in its port.
pub fn is_host_and_port(authority: &Authority) -> bool {
    let text = authority.as_str();
    let port = text.get(authority.host().len()..).unwrap_or_default();
    !text.contains('@') && port.trim_start_matches(':').bytes().all(|byte| byte.is_ascii_digit())
}

/// RFC 9112, sections 3.2 and 6.1.
fn check_http1(parts: &Parts) -> Result<(), StatusError> {
    let headers = &parts.headers;
    if parts.uri.scheme().is_some() || parts.uri.authority().is_some() {
        return refuse("the request target must be a path, not an absolute URI");
    }
    let mut hosts = headers.get_all(HOST).iter();
    match (hosts.next(), hosts.next()) {
        (_, Some(_)) => return refuse("more than one Host header"),
        (None, _) if parts.version == Version::HTTP_11 => return refuse("no Host header"),
        (Some(host), None) => check_host(host)?,
        (None, _) => {}
    }
    if headers.contains_key(TRANSFER_ENCODING) && headers.contains_key(CONTENT_LENGTH) {
        return refuse("both Transfer-Encoding and Content-Length");
    }
    let mut codings = headers.get_all(TRANSFER_ENCODING).iter();
    if let Some(coding) = codings.next()
        && (codings.next().is_some() || !coding.as_bytes().eq_ignore_ascii_case(b"chunked"))
    {
        // hyper decodes `chunked` if it is the last coding, and no other coding.
        return refuse("a Transfer-Encoding other than chunked");
    }
    for token in list_items(headers.get_all(CONNECTION)) {
        if is_protected(token) {
            // A header value contains no control characters but tabs, so the token can be quoted.
            let token = String::from_utf8_lossy(token);
            return refuse(format_args!(
                "Connection names {token}, which is not a header of one hop"
            ));
        }
    }
    Ok(())
}

/// RFC 9110, section 8.6: repeated lengths must be equal numbers. One of more than [`MAX_LENGTH_DIGITS`] digits is
/// refused by h2, and one above 2⁶³ − 1 overflows in Go.
fn check_content_length(headers: &HeaderMap) -> Result<(), StatusError> {
    let mut lengths = headers.get_all(CONTENT_LENGTH).iter();
    let Some(first) = lengths.next() else { return Ok(()) };
    let is_number = !first.is_empty() && first.as_bytes().iter().all(u8::is_ascii_digit);
    let number = first.to_str().ok().and_then(|length| length.parse::<i64>().ok());
    let is_valid = is_number && first.len() <= MAX_LENGTH_DIGITS && number.is_some();
    if !is_valid || lengths.any(|other| other != first) {
        return refuse("the Content-Length is malformed or ambiguous");
    }
    Ok(())
}

/// Prepares a request's headers for the upstream: removes hop-by-hop headers and identities that only a
/// front proxy may set, and appends the client's address to `X-Forwarded-For`, which audit logs record.
///
/// If the request asks for an upgrade, `Connection` becomes exactly `Upgrade`, and `Upgrade` is not
/// changed. `Sec-WebSocket-*` and `X-Stream-Protocol-Version` are end-to-end headers and stay.
pub fn upstream_headers(headers: &mut HeaderMap, client: &ForwardedFor, asks_for_upgrade: bool) {
    strip(headers, Direction::Request, asks_for_upgrade);
    client.append_to(headers);
}

/// Removes hop-by-hop headers from a response. In a 101 (`is_upgrade`), `Connection` and `Upgrade` stay.
pub fn downstream_headers(headers: &mut HeaderMap, is_upgrade: bool) {
    strip(headers, Direction::Response, is_upgrade);
}

/// Limit on the fields of a request's trailers.
const MAX_TRAILERS: usize = 32;
/// Limit on the bytes of their names and values.
const MAX_TRAILER_BYTES: usize = 4 * 1024;

/// Removes the trailers that must not be sent upstream: hop-by-hop ones, which h2 refuses to send, and those
/// that could change the identity, the length or the routing of the request (RFC 9110, section 6.5.1).
///
/// `None` if they are larger than [`MAX_TRAILERS`] and [`MAX_TRAILER_BYTES`] permit. A request of kubectl or kubelet
/// has none.
pub fn upstream_trailers(mut trailers: HeaderMap) -> Option<HeaderMap> {
    let bytes: usize = trailers.iter().map(|(name, value)| name.as_str().len() + value.len()).sum();
    if trailers.len() > MAX_TRAILERS || bytes > MAX_TRAILER_BYTES {
        return None;
    }
    let is_removed = |name: &&HeaderName| {
        let name = name.as_str();
        is_hop_by_hop(name) || name == "expect" || is_protected(name.as_bytes())
    };
    let removed: Vec<_> = trailers.keys().filter(is_removed).cloned().collect();
    for name in removed {
        trailers.remove(name);
    }
    Some(trailers)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Request,
    Response,
}

/// Headers that belong to one connection. `HTTP2-Settings` is part of an h2c upgrade (RFC 7540,
/// section 3.2.1).
pub fn is_hop_by_hop(name: &str) -> bool {
    matches!(
        name,
        "connection"
            | "http2-settings"
            | "keep-alive"
            | "proxy-authenticate"
            | "proxy-authorization"
            | "proxy-connection"
            | "te"
            | "transfer-encoding"
            | "upgrade"
    )
}

/// Whether `Connection` must not name this header, because its removal would change the identity, the
/// meaning or the length of the request.
fn is_protected(token: &[u8]) -> bool {
    const PREFIXES: [&str; 4] = ["x-remote-", "impersonate-", "x-forwarded-", "content-"];
    const NAMES: [&str; 9] = [
        "accept",
        "audit-id",
        "authorization",
        "cookie",
        "forwarded",
        "host",
        "sec-websocket-protocol",
        "set-cookie",
        "x-real-ip",
    ];
    NAMES.iter().any(|name| token.eq_ignore_ascii_case(name.as_bytes()))
        || PREFIXES.iter().any(|prefix| {
            let start = token.get(..prefix.len());
            start.is_some_and(|start| start.eq_ignore_ascii_case(prefix.as_bytes()))
        })
}

/// The items of a header that is a comma-separated list, repeated or not (RFC 9110, section 5.6.1).
pub fn list_items<'a>(
    values: impl IntoIterator<Item = &'a HeaderValue>,
) -> impl Iterator<Item = &'a [u8]> {
    let items = |value: &'a HeaderValue| value.as_bytes().split(|&byte| byte == b',');
    values.into_iter().flat_map(items).map(<[u8]>::trim_ascii)
}

/// Whether a list header contains `token`, in any case.
pub fn has_token(headers: &HeaderMap, name: HeaderName, token: &str) -> bool {
    list_items(headers.get_all(name)).any(|item| item.eq_ignore_ascii_case(token.as_bytes()))
}

/// Removes the headers that must not be forwarded. HTTP/2 requests rarely have any, so it first checks
/// all names, without an allocation.
fn strip(headers: &mut HeaderMap, direction: Direction, keeps_upgrade: bool) {
    let is_removed = |name: &HeaderName| {
        let name = name.as_str();
        is_hop_by_hop(name)
            || direction == Direction::Request
                && (matches!(name, "expect" | "priority") || name.starts_with("x-remote-"))
    };
    if !headers.keys().any(is_removed) {
        return;
    }
    let protocols = headers.get_all(UPGRADE).iter().filter(|_| keeps_upgrade);
    let protocols: Vec<HeaderValue> = protocols.cloned().collect();
    // A protected header is not removed. `check_request` refuses a request whose `Connection` names one,
    // but responses are not checked.
    let mut names: Vec<HeaderName> = list_items(headers.get_all(CONNECTION))
        .filter(|token| !is_protected(token))
        .filter_map(|token| HeaderName::from_bytes(token).ok())
        .collect();
    names.extend(headers.keys().filter(|name| is_removed(name)).cloned());
    // `trailers` is the only value of TE that may be forwarded. gRPC needs it, and Go's ReverseProxy
    // forwards it too.
    let trailers = direction == Direction::Request && has_token(headers, TE, "trailers");
    for name in names {
        headers.remove(name);
    }
    if trailers {
        headers.insert(TE, HeaderValue::from_static("trailers"));
    }
    if !protocols.is_empty() {
        headers.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
    }
    for protocol in protocols {
        headers.append(UPGRADE, protocol);
    }
}

/// The address that is appended to `X-Forwarded-For`, formatted once for all requests of a connection.
#[derive(Debug, Clone)]
pub struct ForwardedFor(HeaderValue);

impl ForwardedFor {
    /// Formats the address of a client.
    pub fn new(client: IpAddr) -> Self {
        // A dual-stack socket reports IPv4 clients as IPv4-mapped IPv6 addresses.
        let address = client.to_canonical().to_string();
        Self(HeaderValue::from_str(&address).expect("an address is a header value"))
    }

    /// Appends the address to the list, and joins several headers into one, as Go's `httputil.ReverseProxy`
    /// does.
    fn append_to(&self, headers: &mut HeaderMap) {
        match headers.entry(X_FORWARDED_FOR) {
            Entry::Vacant(entry) => {
                entry.insert(self.0.clone());
            }
            Entry::Occupied(mut entry) => {
                let values = entry.iter().chain([&self.0]).filter(|value| !value.is_empty());
                let list = values.map(HeaderValue::as_bytes).collect::<Vec<_>>().join(&b", "[..]);
                // Valid header values joined by commas are a valid value.
                if let Ok(value) = HeaderValue::from_bytes(&list) {
                    entry.insert(value);
                }
            }
        }
    }
}
