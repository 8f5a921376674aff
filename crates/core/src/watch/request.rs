//! Decides which watches the proxy can follow, and rewrites their requests for the upstream.
//!
//! The proxy *follows* a watch if it parses the frames of the response. It follows requests with the verb
//! `watch` and without Upgrade whose client accepts JSON, protobuf or CBOR; other media types in `Accept` are
//! removed from the upstream request, and gzip is asked for as [`WatchRequest::asks_for_gzip`] says. A watch that
//! has delivered events is resumed in every API group, except
//! those that the configuration names in `never_resume_groups` and those in which a watch has shown versions
//! that are not ordered.
//!
//! Parameters are read as the apiserver reads them ([`crate::request::info`]). Parameters that are
//! not changed keep their bytes and their order.

use super::codec::Encoding;
use super::codec::version::ResourceVersion;
use crate::request::info::{first_value, is_built_in_group, parse_bool, unescape_query};
use http::{HeaderMap, HeaderValue, Uri, header, uri};
use std::borrow::Cow;
use std::time::Duration;

/// The request of a watch that can be followed.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools)] // parameters, each independent of the others
pub struct WatchRequest {
    /// `resourceVersion`; `None` if it is missing, zero or not a number.
    pub version: Option<ResourceVersion>,
    /// `sendInitialEvents`: the existing objects come first, then a bookmark that marks their end.
    pub send_initial_events: bool,
    /// `sendInitialEvents=false` without a version: the watch starts at the most recent version. The same
    /// request, sent again, would start at a later version.
    pub starts_at_most_recent: bool,
    /// `allowWatchBookmarks`: the client receives bookmarks.
    pub bookmarks: bool,
    /// `timeoutSeconds`; `None` if the server chooses the duration.
    pub timeout: Option<Duration>,
    /// Watches of the API group are resumed after their first event.
    pub resumable_group: bool,
    /// kube-apiserver serves the API group itself. Any other group may belong to an aggregated apiserver.
    pub built_in_group: bool,
    /// The objects expire together, so that several DELETED events have one version
    /// ([`super::session`]).
    pub objects_expire: bool,
    /// The upstream request asks for bookmarks: because the client does, or because they keep the cursor
    /// recent.
    ///
    /// Bookmarks that only the proxy asks for are swallowed. It does not ask for them in groups that cannot
    /// be resumed, nor for tables: the first event of a table contains the column definitions, and a
    /// swallowed bookmark would remove them. The first request of a watch without a version does not ask for
    /// them either: with bookmarks it would be a `WatchList`, which an apiserver refuses if its etcd does not
    /// report progress on request (3.5.13 and later do; `cacher.go`, `getBookmarkAfterResourceVersionLockedFunc`).
    pub upstream_bookmarks: bool,
    /// What the client says about gzip.
    pub gzip: GzipPreference,
}

/// What a client says about gzip in `Accept-Encoding` (RFC 9110, section 12.5.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GzipPreference {
    /// It accepts gzip.
    Accepted,
    /// Nothing: the header is missing.
    Unspecified,
    /// It does not accept gzip.
    Refused,
}

impl GzipPreference {
    fn of(headers: &HeaderMap) -> Self {
        let mut values = headers.get_all(header::ACCEPT_ENCODING).iter().peekable();
        if values.peek().is_none() {
            return Self::Unspecified;
        }
        let codings = values.filter_map(|value| value.to_str().ok()).flat_map(|v| v.split(','));
        // A coding by its name has precedence over `*`.
        let (mut named, mut any) = (None, None);
        for coding in codings {
            let mut parts = coding.split(';').map(str::trim);
            let name = parts.next().unwrap_or_default();
            let is_accepted = !parts.any(is_refused);
            if name.eq_ignore_ascii_case("gzip") || name.eq_ignore_ascii_case("x-gzip") {
                named = named.max(Some(is_accepted));
            } else if name == "*" {
                any = any.max(Some(is_accepted));
            }
        }
        if named.or(any) == Some(true) { Self::Accepted } else { Self::Refused }
    }
}

/// Whether a parameter of a media range or coding is the weight "not acceptable" (RFC 9110, section 12.4.2).
fn is_refused(parameter: &str) -> bool {
    parameter
        .split_once('=')
        .filter(|(name, _)| name.trim().eq_ignore_ascii_case("q"))
        .is_some_and(|(_, value)| value.trim().parse().is_ok_and(|q: f32| q <= 0.0))
}

impl WatchRequest {
    /// Parses a request; `None` if the proxy cannot follow it.
    ///
    /// `verb` is the Kubernetes verb; `query` is the part of the URI after `?`.
    pub fn new(
        verb: &str,
        path: &str,
        query: &str,
        headers: &HeaderMap,
        never_resume_groups: &[String],
        is_unordered: impl Fn(&str) -> bool,
    ) -> Option<Self> {
        if verb != "watch" || headers.contains_key(header::UPGRADE) {
            return None;
        }
        let table = accepts_table(headers)?;
        let group = group(path)?;
        let built_in_group = is_built_in_group(group);
        let resumable_group = !never_resume_groups.iter().any(|never| never == group)
            && (built_in_group || !is_unordered(group));
        let mut request = Self {
            version: first_value(query, "resourceVersion")
                .and_then(|version| ResourceVersion::parse(version.as_bytes())),
            send_initial_events: parse_bool(first_value(query, "sendInitialEvents").as_deref()),
            starts_at_most_recent: false,
            bookmarks: parse_bool(first_value(query, "allowWatchBookmarks").as_deref()),
            timeout: first_value(query, "timeoutSeconds")
                .and_then(|seconds| seconds.parse().ok())
                .filter(|&seconds| seconds > 0)
                .map(Duration::from_secs),
            resumable_group,
            built_in_group,
            objects_expire: objects_expire(group, path),
            upstream_bookmarks: false,
            gzip: GzipPreference::of(headers),
        };
        request.starts_at_most_recent = request.version.is_none()
            && !request.send_initial_events
            && first_value(query, "sendInitialEvents").is_some();
        request.upstream_bookmarks = request.bookmarks || resumable_group && !table;
        Some(request)
    }

    /// Whether the upstream request asks for gzip, which the proxy decodes. If the client says nothing, the proxy asks for
    /// it where kube-apiserver compresses: a watch that begins with all objects (since 1.37). Other servers may compress
    /// answers that are no events, which the proxy does not decode.
    pub fn asks_for_gzip(&self) -> bool {
        match self.gzip {
            GzipPreference::Accepted => true,
            GzipPreference::Unspecified => self.send_initial_events && self.built_in_group,
            GzipPreference::Refused => false,
        }
    }
}

/// Media ranges for which the apiserver selects a type that the codec reads.
const WILDCARDS: [&str; 2] = ["*/*", "application/*"];

/// One media range of an `Accept` header.
struct MediaRange<'a> {
    text: &'a str,
    essence: &'a str,
    /// The codec reads this type, and its weight is not zero.
    readable: bool,
    /// The client accepts the objects as a Table.
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
            refused |= is_refused(parameter);
        }
        let mut range = Self { text, essence, readable: false, table };
        let known = Encoding::ALL.iter().any(|encoding| range.is_one_of(encoding.accepted_types()));
        range.readable = !refused && (known || range.is_one_of(&WILDCARDS));
        range
    }

    fn is_one_of(&self, types: &[&str]) -> bool {
        types.iter().any(|name| self.essence.eq_ignore_ascii_case(name))
    }

    fn all(value: &'a str) -> impl Iterator<Item = Self> {
        value.split(',').map(str::trim).filter(|text| !text.is_empty()).map(Self::new)
    }
}

/// Whether the client accepts tables; `None` if it accepts no type that the codec reads.
///
/// The response may still have a Content-Type that the codec cannot read
/// ([`super::codec::Encoding::of_response`]), and a bookmark that only the proxy asked for could then not
/// be swallowed. So the upstream request offers only types that the codec reads ([`upstream_headers`]).
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
pub fn group(path: &str) -> Option<&str> {
    let mut parts = path.strip_prefix('/')?.split('/');
    match parts.next()? {
        "api" => Some(""),
        "apis" => parts.next().filter(|group| !group.is_empty()),
        _ => None,
    }
}

/// Whether kube-apiserver deletes the objects of the resource after some time (`--event-ttl`; only the storage of Events
/// has a TTL: `registry/core/event/storage`). Both groups serve the same objects.
fn objects_expire(group: &str, path: &str) -> bool {
    let parents = match group {
        "" => 2,
        "events.k8s.io" => 3,
        _ => return false,
    };
    let mut parts = path.split('/').filter(|part| !part.is_empty()).skip(parents).peekable();
    // A deprecated prefix.
    parts.next_if_eq(&"watch");
    let resource = match parts.next() {
        Some("namespaces") => parts.nth(1),
        first => first,
    };
    resource == Some("events")
}

/// The query of the first request upstream.
pub fn upstream_query<'a>(query: &'a str, request: &WatchRequest) -> Cow<'a, str> {
    if request.bookmarks || !request.upstream_bookmarks || request.version.is_none() {
        return Cow::Borrowed(query);
    }
    Cow::Owned(rewrite(query, &[("allowWatchBookmarks", Some("true"))]))
}

/// The query of a request that continues a watch at the cursor, or, without a cursor, starts it again.
/// `query` is the query of the first upstream request, `remaining` the unexpired part of the client's
/// `timeoutSeconds`.
pub fn resume_query(
    query: &str,
    request: &WatchRequest,
    cursor: Option<&ResourceVersion>,
    remaining: Option<Duration>,
) -> String {
    let seconds = remaining.map(|remaining| remaining.as_secs().max(1).to_string());
    let mut changes = Vec::with_capacity(5);
    if let Some(cursor) = cursor {
        if request.upstream_bookmarks {
            changes.push(("allowWatchBookmarks", Some("true")));
        }
        changes.push(("resourceVersion", Some(cursor.as_str())));
        changes.push(("sendInitialEvents", None));
        changes.push(("resourceVersionMatch", None));
    }
    // Without timeoutSeconds the server chooses a duration: 1 to 2 times --min-request-timeout.
    if let Some(seconds) = &seconds {
        changes.push(("timeoutSeconds", Some(seconds)));
    }
    rewrite(query, &changes)
}

/// Changes the headers of the upstream request so that the response is uncompressed and has a media type
/// that the codec reads.
pub fn upstream_headers(headers: &mut HeaderMap) {
    headers.remove(header::ACCEPT_ENCODING);
    keep_media_ranges(headers, |range| range.readable);
}

/// Changes the headers of a request that was answered in this encoding, so that another apiserver answers in the same
/// one, or with 406. It may serve other encodings, as during a change of the feature gates for CBOR.
pub fn accept_only(headers: &mut HeaderMap, encoding: Encoding) {
    let types = encoding.accepted_types();
    let mut values = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    let is_named = values.any(|value| MediaRange::all(value).any(|range| range.is_one_of(types)));
    let types = if is_named { types } else { &WILDCARDS };
    keep_media_ranges(headers, |range| range.readable && range.is_one_of(types));
}

/// Removes the other media ranges from `Accept`, unless none would be left.
fn keep_media_ranges(headers: &mut HeaderMap, keep: impl Fn(&MediaRange<'_>) -> bool) {
    let values = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    let (kept, removed): (Vec<_>, Vec<_>) = values.flat_map(MediaRange::all).partition(keep);
    if kept.is_empty() || removed.is_empty() {
        return;
    }
    let kept: Vec<_> = kept.iter().map(|range| range.text).collect();
    // Parts of a valid header value, joined by commas, are a valid value.
    if let Ok(value) = HeaderValue::try_from(kept.join(", ")) {
        headers.insert(header::ACCEPT, value);
    }
}

/// Changes the headers of the upstream request so that the response may be compressed.
pub fn accept_gzip(headers: &mut HeaderMap) {
    headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static("gzip"));
}

/// The same target with another query.
pub fn with_query(target: &Uri, query: &str) -> Uri {
    let mut parts = target.clone().into_parts();
    // A watch keeps it. `format!` would reserve half as much again.
    let path_and_query = if query.is_empty() {
        target.path().to_owned()
    } else {
        [target.path(), "?", query].concat()
    };
    // The new query consists of a valid one and of valid values. If it is invalid all the same, the old
    // query is kept.
    if let Ok(path_and_query) = uri::PathAndQuery::try_from(path_and_query) {
        parts.path_and_query = Some(path_and_query);
    }
    Uri::from_parts(parts).unwrap_or_else(|_| target.clone())
}

/// Sets each parameter of `changes` once, or removes it if it has no value. The other parameters keep their
/// bytes and their order.
pub fn rewrite(query: &str, changes: &[(&str, Option<&str>)]) -> String {
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
