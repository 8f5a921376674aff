//! Bytes of HTTP: request heads, and the frames of a connection.

use std::convert::Infallible;
use std::net::IpAddr;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use ::http::{HeaderMap, HeaderName, HeaderValue, Request, Version};
use jackstay_core::http2_frames::{FrameHeader, FrameScanner};
use jackstay_core::request::hygiene::{
    ForwardedFor, check_request, check_size, downstream_headers, is_hop_by_hop, upstream_headers,
    upstream_trailers,
};
use jackstay_core::request::info::{RequestInfo, is_upgrade};
use jackstay_core::request::path_prefix::PathPrefix;
use jackstay_net::frame_limiter::FrameLimiter;
use tokio::io::{AsyncRead, ReadBuf};

/// A request head, as lines: method and target, then headers. A head that is accepted carries no hop-by-hop header
/// and no identity of a front proxy upstream, and keeps its credentials.
pub(super) fn request(bytes: &[u8]) {
    let mut lines = bytes.split(|byte| *byte == b'\n');
    let first = lines.next().unwrap_or_default();
    let mut words = first.splitn(2, |byte| *byte == b' ');
    let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let version = if bytes.len().is_multiple_of(2) { Version::HTTP_2 } else { Version::HTTP_11 };
    let builder = Request::builder().method(method).uri(target).version(version);
    let Ok(mut request) = builder.body(()) else { return };
    for line in lines {
        let mut field = line.splitn(2, |byte| *byte == b':');
        let (name, value) = (field.next().unwrap_or_default(), field.next().unwrap_or_default());
        let name = HeaderName::from_bytes(name);
        let value = HeaderValue::from_bytes(value.trim_ascii());
        if let (Ok(name), Ok(value)) = (name, value) {
            request.headers_mut().append(name, value);
        }
    }
    let (parts, ()) = request.into_parts();
    let info = RequestInfo::new(&parts, &PathPrefix::default());
    let _ = (info.path(), info.query(), info.long_running(), check_size(&parts, 100));
    let path = parts.uri.path();
    if let Ok(prefix) = PathPrefix::parse(path) {
        assert_eq!(PathPrefix::parse(prefix.encoded()).as_ref(), Ok(&prefix));
        let below = RequestInfo::new(&parts, &prefix);
        let _ = (below.path(), below.resource_name(), prefix.strip_sent(path));
    }
    let upgrade = is_upgrade(&parts.method, &parts.headers, parts.version);
    if let Some(trailers) = upstream_trailers(parts.headers.clone()) {
        let is_removed =
            |name: &HeaderName| is_hop_by_hop(name.as_str()) || name == "authorization";
        assert!(!trailers.keys().any(is_removed));
    }
    let mut response = parts.headers.clone();
    downstream_headers(&mut response, false);
    assert!(!response.keys().any(|name| is_hop_by_hop(name.as_str())));
    if check_request(&parts).is_err() {
        return;
    }
    let client = ForwardedFor::new(IpAddr::from([127, 0, 0, 1]));
    let mut sent = parts.headers.clone();
    upstream_headers(&mut sent, &client, upgrade);
    check_sent(&sent, upgrade);
    let values =
        |headers: &HeaderMap, name: &str| headers.get_all(name).iter().cloned().collect::<Vec<_>>();
    for name in ["authorization", "impersonate-user", "content-length", "content-type", "host"] {
        assert_eq!(values(&sent, name), values(&parts.headers, name), "{name}");
    }
}

fn check_sent(sent: &HeaderMap, upgrade: bool) {
    for (name, value) in sent {
        let name = name.as_str();
        assert!(!name.starts_with("x-remote-") && name != "expect", "{name}");
        let is_allowed = match name {
            "te" => value == "trailers",
            "connection" => upgrade && value == "Upgrade",
            "upgrade" => upgrade,
            _ => !is_hop_by_hop(name),
        };
        assert!(is_allowed, "{name}: {value:?}");
    }
}

/// Frames of a client: the scanner finds the same headers however the bytes are split, and the limiter passes
/// bytes on unchanged.
pub(super) fn frames(bytes: &[u8]) {
    let scan = |step: usize| {
        let mut scanner = FrameScanner::new(0);
        let mut headers: Vec<FrameHeader> = Vec::new();
        for chunk in bytes.chunks(step) {
            let Ok(()) = scanner.scan(chunk, |header| {
                headers.push(header);
                Ok::<_, Infallible>(())
            });
        }
        (format!("{headers:?}"), scanner.is_at_frame_boundary())
    };
    let whole = scan(bytes.len().max(1));
    assert_eq!(scan(1), whole);
    assert_eq!(scan(7), whole);
    let (mut limiter, frames) = FrameLimiter::of_client(
        tokio::io::join(bytes, tokio::io::sink()),
        100,
        Duration::from_secs(10),
    );
    let mut cx = Context::from_waker(Waker::noop());
    let (mut read, mut buffer) = (Vec::new(), [0; 100]);
    loop {
        let mut buffer = ReadBuf::new(&mut buffer);
        match Pin::new(&mut limiter).poll_read(&mut cx, &mut buffer) {
            Poll::Ready(Ok(())) if buffer.filled().is_empty() => break,
            Poll::Ready(Ok(())) => read.extend_from_slice(buffer.filled()),
            // The limiter yields to other connections.
            Poll::Pending => {}
            Poll::Ready(Err(_)) => {
                assert!(frames.violation().is_some());
                return;
            }
        }
    }
    assert_eq!(read, bytes);
    assert!(frames.violation().is_none());
}
