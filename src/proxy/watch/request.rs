//! Decides which watches the proxy can follow, and rewrites their requests for the upstream.
//!
//! A watch is followed, frame by frame, if it is read-only (verb `watch`, no Upgrade) and its client
//! accepts JSON or protobuf. Other media types that the client accepts as well are not offered
//! upstream. A watch is resumed only in API groups that kube-apiserver serves itself, or that the
//! configuration names: an aggregated apiserver may have any kind of history.
//!
//! Parameters are read as the apiserver reads them ([`crate::proxy::request_info`]) and otherwise
//! passed on byte for byte, in their order.

use super::codec::version::ResourceVersion;
use crate::proxy::request_info::{first, is_built_in_group, parse_bool, unescape_query};
use http::{HeaderMap, HeaderValue, Uri, header, uri};
use std::borrow::Cow;
use std::time::Duration;

/// A watch that can be followed, and what its client asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools)] // parameters, each independent of the others
pub struct WatchRequest {
    /// Where to start; `None` if the client gave no version, or zero, or one that is not a number.
    pub version: Option<ResourceVersion>,
    /// The existing objects come first, and then a bookmark that marks their end.
    pub send_initial_events: bool,
    /// `sendInitialEvents=false` without a version: the watch starts at the most recent version. The same
    /// request sent later would start later.
    pub starts_at_most_recent: bool,
    /// The client wants bookmarks.
    pub bookmarks: bool,
    /// How long the watch lasts; `None`: the server decides.
    pub timeout: Option<Duration>,
    /// kube-apiserver serves the API group itself, or the configuration allows to resume it.
    pub resumable_group: bool,
    /// The proxy asks upstream for bookmarks whether the client wants them or not.
    ///
    /// It does not if the watch is never resumed, and not for tables: the first event of a table
    /// contains the column definitions, and the client would miss them if the first event were a
    /// swallowed bookmark.
    pub upstream_bookmarks: bool,
}

impl WatchRequest {
    /// Parses a request; `None` if the proxy cannot follow its response.
    ///
    /// `verb` is the Kubernetes verb; `query` is the part of the URI after `?`.
    pub fn new(
        verb: &str,
        path: &str,
        query: &str,
        headers: &HeaderMap,
        resume_groups: &[String],
    ) -> Option<Self> {
        if verb != "watch" || headers.contains_key(header::UPGRADE) {
            return None;
        }
        let table = accepts_table(headers)?;
        let group = group(path)?;
        let resumable_group = is_built_in_group(group) || resume_groups.iter().any(|g| g == group);
        let mut request = Self {
            version: first(query, "resourceVersion")
                .and_then(|version| ResourceVersion::parse(version.as_bytes())),
            send_initial_events: parse_bool(first(query, "sendInitialEvents").as_deref()),
            starts_at_most_recent: false,
            bookmarks: parse_bool(first(query, "allowWatchBookmarks").as_deref()),
            timeout: first(query, "timeoutSeconds")
                .and_then(|seconds| seconds.parse().ok())
                .filter(|&seconds| seconds > 0)
                .map(Duration::from_secs),
            resumable_group,
            upstream_bookmarks: false,
        };
        request.starts_at_most_recent = request.version.is_none()
            && !request.send_initial_events
            && first(query, "sendInitialEvents").is_some();
        request.upstream_bookmarks = request.bookmarks || resumable_group && !table;
        Some(request)
    }
}

/// Media types whose frames the codec reads, and ranges that the apiserver answers with one of them.
const READABLE: [&str; 4] =
    ["application/json", "application/vnd.kubernetes.protobuf", "*/*", "application/*"];

/// One media range of an `Accept` header.
struct MediaRange<'a> {
    text: &'a str,
    /// The codec reads it, and the client does not refuse it.
    readable: bool,
    table: bool,
}

impl<'a> MediaRange<'a> {
    fn new(text: &'a str) -> Self {
        let mut parts = text.split(';').map(str::trim);
        let essence = parts.next().unwrap_or_default();
        let mut table = false;
        let mut refused = false;
        for parameter in parts {
            table |= parameter.eq_ignore_ascii_case("as=Table");
            // q=0 is "not acceptable" (RFC 9110, section 12.4.2).
            refused |= parameter
                .split_once('=')
                .filter(|(name, _)| name.trim().eq_ignore_ascii_case("q"))
                .is_some_and(|(_, value)| value.trim().parse().is_ok_and(|q: f32| q <= 0.0));
        }
        let known = READABLE.iter().any(|known| essence.eq_ignore_ascii_case(known));
        Self { text, readable: known && !refused, table }
    }

    fn all(value: &'a str) -> impl Iterator<Item = Self> {
        value.split(',').map(str::trim).filter(|text| !text.is_empty()).map(Self::new)
    }
}

/// Whether the client accepts tables; `None` if it accepts nothing that the codec reads.
///
/// The Content-Type of the response decides in the end
/// ([`super::codec::Encoding::of_response`]). But bookmarks are requested before it is known, and
/// they cannot be swallowed in CBOR. So the upstream request offers only what the codec reads
/// ([`upstream_headers`]).
fn accepts_table(headers: &HeaderMap) -> Option<bool> {
    let (mut any, mut readable, mut table) = (false, false, false);
    for value in headers.get_all(header::ACCEPT) {
        for range in MediaRange::all(value.to_str().ok()?) {
            any = true;
            readable |= range.readable;
            table |= range.readable && range.table;
        }
    }
    (readable || !any).then_some(table)
}

/// The API group of a resource's path; empty for the core group.
fn group(path: &str) -> Option<&str> {
    let mut parts = path.strip_prefix('/')?.split('/');
    match parts.next()? {
        "api" => Some(""),
        "apis" => parts.next().filter(|group| !group.is_empty()),
        _ => None,
    }
}

/// The query of the first request upstream.
pub fn upstream_query<'a>(query: &'a str, request: &WatchRequest) -> Cow<'a, str> {
    if request.bookmarks || !request.upstream_bookmarks {
        return Cow::Borrowed(query);
    }
    Cow::Owned(rewrite(query, &[("allowWatchBookmarks", Some("true"))]))
}

/// The query of a request that continues a watch at the cursor, or, without one, starts it again. `query`
/// is that of the first request upstream, `remaining` is what is left of the client's `timeoutSeconds`.
pub fn resume_query(
    query: &str,
    cursor: Option<&ResourceVersion>,
    remaining: Option<Duration>,
) -> String {
    let seconds = remaining.map(|remaining| remaining.as_secs().max(1).to_string());
    let mut changes = Vec::with_capacity(4);
    if let Some(cursor) = cursor {
        changes.push(("resourceVersion", Some(cursor.as_str())));
        changes.push(("sendInitialEvents", None));
        changes.push(("resourceVersionMatch", None));
    }
    // Without timeoutSeconds the server picks a time, 1 to 2 times --min-request-timeout.
    if let Some(seconds) = &seconds {
        changes.push(("timeoutSeconds", Some(seconds)));
    }
    rewrite(query, &changes)
}

/// Changes the headers of the upstream request: frames must come uncompressed and in a media type that
/// the codec reads.
pub fn upstream_headers(headers: &mut HeaderMap) {
    headers.remove(header::ACCEPT_ENCODING);
    let values = || headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    if values().flat_map(MediaRange::all).all(|range| range.readable) {
        return;
    }
    let readable: Vec<_> = values()
        .flat_map(MediaRange::all)
        .filter(|range| range.readable)
        .map(|range| range.text)
        .collect();
    // A list of parts of a valid value is a valid value.
    if let Ok(value) = HeaderValue::try_from(readable.join(", ")) {
        headers.insert(header::ACCEPT, value);
    }
}

/// The same target with another query.
pub fn with_query(target: &Uri, query: &str) -> Uri {
    let mut parts = target.clone().into_parts();
    let path_and_query = if query.is_empty() {
        target.path().to_owned()
    } else {
        format!("{}?{query}", target.path())
    };
    // The query was made from a valid one. Should it be invalid, the old target is used.
    if let Ok(path_and_query) = uri::PathAndQuery::try_from(path_and_query) {
        parts.path_and_query = Some(path_and_query);
    }
    Uri::from_parts(parts).unwrap_or_else(|_| target.clone())
}

/// Sets parameters, or drops those without a value; the others keep their bytes and their order.
fn rewrite(query: &str, changes: &[(&str, Option<&str>)]) -> String {
    let mut new = String::with_capacity(query.len() + 64);
    let mut push = |parts: &[&str]| {
        if !new.is_empty() {
            new.push('&');
        }
        new.extend(parts.iter().copied());
    };
    let mut pending: Vec<_> = changes.iter().collect();
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let key = unescape_query(pair.split_once('=').map_or(pair, |(key, _)| key));
        let is_named = |(name, _): &(&str, _)| key.as_deref() == Some(*name);
        if !changes.iter().any(is_named) {
            push(&[pair]);
        } else if let Some(at) = pending.iter().position(|change| is_named(change))
            && let (name, Some(value)) = pending.remove(at)
        {
            push(&[name, "=", value]);
        }
    }
    for (name, value) in pending {
        if let Some(value) = value {
            push(&[name, "=", value]);
        }
    }
    new
}
