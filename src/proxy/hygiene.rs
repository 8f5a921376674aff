//! Which heads are refused, and which headers may cross from one connection to the other.
//!
//! Two parties that read one message differently are how requests are smuggled and identities
//! forged, so what is ambiguous is refused ([`check_request`]) and what belongs to one connection
//! never reaches the next ([`upstream_request_headers`], [`downstream_response_headers`]). Heads
//! are always serialised anew; values and paths are not changed.
//!
//! * Hop-by-hop headers go (RFC 9110, section 7.6.1), those that `Connection` names first.
//!   `Trailer` stays: trailers pass, and hyper's HTTP/1.1 side sends only those it announces.
//! * `X-Remote-*` always goes: on a connection that carries a front-proxy certificate it would
//!   *be* the identity. `X_Remote_User` is another header to the apiserver, since Go does not map
//!   underscores, and is left alone.
//! * `Expect` always goes: the body is asked for here, not by the apiserver. On HTTP/1.1, hyper sends
//!   the 100 with the first read of the body, which is as soon as the upstream stream is open
//!   ([`super::forward`]); on HTTP/2 it has no way to send one (hyper 1.12).
//! * hyper has already refused obs-fold, whitespace in names and bad chunks, and h2 most of what
//!   HTTP/2 forbids; what is checked here again costs nothing and does not depend on them.

#[cfg(test)]
mod tests;

use super::request_info::has_token;
use super::status_error::StatusError;
use http::header::{
    CONNECTION, CONTENT_LENGTH, Entry, HOST, HeaderMap, HeaderName, HeaderValue, TE,
    TRANSFER_ENCODING, UPGRADE,
};
use http::request::Parts;
use http::{Method, Version};
use std::net::IpAddr;

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

/// Refuses a head that could be read in two ways, or that would be forwarded as something else.
///
/// Returns a 400 that says what is wrong.
pub fn check_request(parts: &Parts) -> Result<(), StatusError> {
    let refuse = |what: &str| Err(StatusError::bad_request(what));
    if parts.method == Method::CONNECT {
        return refuse("CONNECT is not served here");
    }
    let target = parts.uri.path_and_query().map_or("", |target| target.as_str());
    let asterisk = target == "*" && parts.method == Method::OPTIONS;
    if !target.starts_with('/') && !asterisk {
        return refuse("the request target is not a path");
    }
    if target.bytes().any(|byte| byte <= b' ' || byte == 0x7f) {
        return refuse("the request target holds a control character or a space");
    }
    let http2 = parts.version == Version::HTTP_2;
    if http2 { check_http2(parts) } else { check_http1(parts) }?;
    check_content_length(&parts.headers)
}

/// Refuses a head above `most` bytes, its fields counted as they were written.
pub fn check_size(parts: &Parts, most: usize) -> Result<(), StatusError> {
    let target = parts.uri.path_and_query().map_or(0, |target| target.as_str().len());
    // `: ` and the end of the line.
    let fields = parts.headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 4);
    if target + fields.sum::<usize>() > most {
        let message = format!("the request's headers are larger than {most} bytes");
        return Err(StatusError::header_too_large(&message));
    }
    Ok(())
}

/// RFC 9113, sections 8.2.2 and 8.3.1.
fn check_http2(parts: &Parts) -> Result<(), StatusError> {
    for name in parts.headers.keys() {
        if *name != TE && is_hop_by_hop(name.as_str()) && !name.as_str().starts_with("proxy-auth") {
            let message = format!("the header {name} does not exist in HTTP/2");
            return Err(StatusError::bad_request(&message));
        }
    }
    if parts.headers.get_all(TE).iter().any(|te| te != "trailers") {
        return Err(StatusError::bad_request("TE in HTTP/2 may only say trailers"));
    }
    let authority = parts.uri.authority().map(http::uri::Authority::as_str);
    if authority.is_some_and(|authority| authority.contains('@')) {
        return Err(StatusError::bad_request(":authority holds user information"));
    }
    let mut hosts = parts.headers.get_all(HOST).iter();
    match (hosts.next(), hosts.next(), authority) {
        (_, Some(_), _) => Err(StatusError::bad_request("more than one Host header")),
        (Some(host), None, Some(authority))
            if !host.as_bytes().eq_ignore_ascii_case(authority.as_bytes()) =>
        {
            Err(StatusError::bad_request("Host and :authority differ"))
        }
        _ => Ok(()),
    }
}

/// RFC 9112, sections 3.2 and 6.1.
fn check_http1(parts: &Parts) -> Result<(), StatusError> {
    let refuse = |what: &str| Err(StatusError::bad_request(what));
    let headers = &parts.headers;
    if parts.uri.scheme().is_some() || parts.uri.authority().is_some() {
        return refuse("the request target must be a path, not an absolute URI");
    }
    let mut hosts = headers.get_all(HOST).iter();
    match (hosts.next(), hosts.next()) {
        (_, Some(_)) => return refuse("more than one Host header"),
        (None, _) if parts.version == Version::HTTP_11 => return refuse("no Host header"),
        _ => {}
    }
    if headers.contains_key(TRANSFER_ENCODING) && headers.contains_key(CONTENT_LENGTH) {
        return refuse("both Transfer-Encoding and Content-Length");
    }
    for token in connection_tokens(headers) {
        if is_protected(token) {
            // The token is the client's own and short; it was a header's value, so it prints.
            let token = String::from_utf8_lossy(token);
            return refuse(&format!("Connection names {token}, which is not a header of one hop"));
        }
    }
    Ok(())
}

/// RFC 9110, section 8.6: repeated lengths must agree, and be numbers.
fn check_content_length(headers: &HeaderMap) -> Result<(), StatusError> {
    let mut lengths = headers.get_all(CONTENT_LENGTH).iter();
    let Some(first) = lengths.next() else { return Ok(()) };
    let digits = !first.is_empty() && first.as_bytes().iter().all(u8::is_ascii_digit);
    if !digits || lengths.any(|other| other != first) {
        return Err(StatusError::bad_request("the Content-Length is malformed or ambiguous"));
    }
    Ok(())
}

/// Makes a request's headers fit for the upstream: nothing of this hop, no forged identity, and
/// the client's address at the end of `X-Forwarded-For`, which is what audit logs record.
pub fn upstream_request_headers(headers: &mut HeaderMap, client: &ForwardedFor) {
    strip(headers, Direction::Request);
    client.append_to(headers);
}

/// The same for a request that upgrades: `Connection` becomes exactly `Upgrade`, and the protocol
/// stays as the client wrote it. `Sec-WebSocket-*` and `X-Stream-Protocol-Version` are end-to-end
/// and stay anyway.
pub fn upstream_upgrade_headers(headers: &mut HeaderMap, client: &ForwardedFor) {
    keeping_upgrade(headers, Direction::Request);
    client.append_to(headers);
}

/// Makes an answer's headers fit for the client: nothing of the upstream hop.
pub fn downstream_response_headers(headers: &mut HeaderMap) {
    strip(headers, Direction::Response);
}

/// The same for a 101, whose `Connection` and `Upgrade` are the point.
pub fn downstream_upgrade_headers(headers: &mut HeaderMap) {
    keeping_upgrade(headers, Direction::Response);
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Request,
    Response,
}

/// Headers that belong to one connection. `HTTP2-Settings` is part of an h2c upgrade (RFC 7540,
/// section 3.2.1).
pub(super) fn is_hop_by_hop(name: &str) -> bool {
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

/// Whether `Connection` must not name this header: it says who speaks, whom they speak for, what
/// they want or where the message ends, and dropping it would change that.
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
            token.get(..prefix.len()).is_some_and(|t| t.eq_ignore_ascii_case(prefix.as_bytes()))
        })
}

fn connection_tokens(headers: &HeaderMap) -> impl Iterator<Item = &[u8]> {
    headers
        .get_all(CONNECTION)
        .iter()
        .flat_map(|value| value.as_bytes().split(|&byte| byte == b','))
        .map(<[u8]>::trim_ascii)
        .filter(|token| !token.is_empty())
}

/// Removes what must not cross. One pass over the names finds out whether there is anything to do;
/// on HTTP/2 there nearly never is.
fn strip(headers: &mut HeaderMap, direction: Direction) {
    let goes = |name: &HeaderName| {
        let name = name.as_str();
        is_hop_by_hop(name)
            || direction == Direction::Request
                && (name == "expect" || name.starts_with("x-remote-"))
    };
    if !headers.keys().any(goes) {
        return;
    }
    // `check_request` refused a `Connection` that names a protected header; should one come here
    // all the same, dropping an identity would be the worse outcome.
    let mut names: Vec<HeaderName> = connection_tokens(headers)
        .filter(|token| !is_protected(token))
        .filter_map(|token| HeaderName::from_bytes(token).ok())
        .collect();
    names.extend(headers.keys().filter(|name| goes(name)).cloned());
    // The one value of TE that may be passed on, and that gRPC needs (as Go's ReverseProxy does).
    let trailers = direction == Direction::Request && has_token(headers, TE, "trailers");
    for name in names {
        headers.remove(name);
    }
    if trailers {
        headers.insert(TE, HeaderValue::from_static("trailers"));
    }
}

fn keeping_upgrade(headers: &mut HeaderMap, direction: Direction) {
    let protocols: Vec<HeaderValue> = headers.get_all(UPGRADE).iter().cloned().collect();
    strip(headers, direction);
    if protocols.is_empty() {
        return;
    }
    headers.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
    for protocol in protocols {
        headers.append(UPGRADE, protocol);
    }
}

/// What a client's requests get in `X-Forwarded-For`; written once for all requests of its
/// connection.
#[derive(Debug, Clone)]
pub struct ForwardedFor(HeaderValue);

impl ForwardedFor {
    /// For a client at this address.
    pub fn new(client: IpAddr) -> Self {
        // An IPv4 client of a dual-stack socket is an IPv4 client.
        let address = client.to_canonical().to_string();
        Self(HeaderValue::from_str(&address).expect("an address is a header value"))
    }

    /// Appends as Go's `httputil.ReverseProxy`: one header, one list.
    fn append_to(&self, headers: &mut HeaderMap) {
        match headers.entry(X_FORWARDED_FOR) {
            Entry::Vacant(entry) => {
                entry.insert(self.0.clone());
            }
            Entry::Occupied(mut entry) => {
                let mut list = Vec::new();
                for value in entry.iter().filter(|value| !value.is_empty()) {
                    list.extend_from_slice(value.as_bytes());
                    list.extend_from_slice(b", ");
                }
                list.extend_from_slice(self.0.as_bytes());
                // Header values joined by a comma are a header value.
                if let Ok(value) = HeaderValue::from_bytes(&list) {
                    entry.insert(value);
                }
            }
        }
    }
}
