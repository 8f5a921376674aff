//! Says which watches can be kept alive, and rewrites their requests for the upstream leg.
//!
//! A watch is [`Asked`] to be followed if it is read (verb watch, no Upgrade) and its client accepts
//! JSON or protobuf; other media types that it accepts beside them are not offered upstream.
//! It is resumed only in groups that kube-apiserver serves itself, or that the configuration names:
//! an aggregated apiserver may have any notion of history. Parameters are understood as apiserver
//! understands them (the first of several counts; any boolean but `false` and `0` is true) and
//! otherwise passed on byte for byte, in their order.

use super::codec::version::ResourceVersion;
use super::verdict::Reissue;
use crate::proxy::request_info::is_built_in_group;
use http::{HeaderMap, HeaderValue, Uri, header, uri};
use std::borrow::Cow;
use std::fmt::Write as _;
use std::time::Duration;

/// A watch that can be followed frame by frame, and what its client asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools)] // parameters, each independent of the others
pub struct Asked {
    /// Where to start; `None` if the client gave none, or zero, or what is not a number.
    pub version: Option<ResourceVersion>,
    /// The objects there are come first, and then a bookmark that says so.
    pub send_initial_events: bool,
    /// It begins at the server's present (`sendInitialEvents=false` without a version): asked for
    /// again, it would begin later.
    pub from_present: bool,
    /// The client wants bookmarks.
    pub bookmarks: bool,
    /// How long the watch shall last; `None` leaves it to the server.
    pub timeout: Option<Duration>,
    /// The group is served by kube-apiserver itself, or configured to be resumed.
    pub resumable_group: bool,
    /// Bookmarks are asked for upstream whether the client wants them or not.
    ///
    /// Not where nothing will be resumed, and not for tables: the first event of a table carries
    /// the columns, and were it a bookmark that we swallow, the client would have none.
    pub ask_bookmarks: bool,
}

impl Asked {
    /// What is asked for, or `None` if the answer is not one that we can follow.
    ///
    /// `verb` is the Kubernetes verb, `query` what follows the `?`, both as they came.
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
        let table = accepts(headers)?;
        let group = group(path)?;
        let resumable_group = is_built_in_group(group) || resume_groups.iter().any(|g| g == group);
        let mut asked = Self {
            version: first(query, "resourceVersion")
                .and_then(|v| ResourceVersion::parse(v.as_bytes())),
            send_initial_events: is_true(first(query, "sendInitialEvents")),
            from_present: false,
            bookmarks: is_true(first(query, "allowWatchBookmarks")),
            timeout: first(query, "timeoutSeconds")
                .and_then(|seconds| seconds.parse().ok())
                .filter(|&seconds| seconds > 0)
                .map(Duration::from_secs),
            resumable_group,
            ask_bookmarks: false,
        };
        asked.from_present = asked.version.is_none()
            && !asked.send_initial_events
            && first(query, "sendInitialEvents").is_some();
        asked.ask_bookmarks = asked.bookmarks || resumable_group && !table;
        Some(asked)
    }
}

/// Media types whose watch frames can be followed, or that the apiserver answers with one of them.
const FOLLOWED: [&str; 4] =
    ["application/json", "application/vnd.kubernetes.protobuf", "*/*", "application/*"];

/// One media range of an `Accept` header.
struct MediaRange<'a> {
    text: &'a str,
    followed: bool,
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
        let known = FOLLOWED.iter().any(|known| essence.eq_ignore_ascii_case(known));
        Self { text, followed: known && !refused, table }
    }

    fn all(value: &'a str) -> impl Iterator<Item = Self> {
        value.split(',').map(str::trim).filter(|text| !text.is_empty()).map(Self::new)
    }
}

/// Whether the client accepts tables; `None` if it accepts nothing that can be followed.
///
/// The response's Content-Type has the last word ([`super::codec::Encoding::from_content_type`]); but
/// bookmarks have to be asked for before it is known, and could not be swallowed in CBOR. So the
/// request that goes upstream offers only what can be followed ([`upstream_headers`]).
fn accepts(headers: &HeaderMap) -> Option<bool> {
    let (mut any, mut followed, mut table) = (false, false, false);
    for value in headers.get_all(header::ACCEPT) {
        for range in MediaRange::all(value.to_str().ok()?) {
            any = true;
            followed |= range.followed;
            table |= range.followed && range.table;
        }
    }
    (followed || !any).then_some(table)
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
pub fn upstream_query<'a>(query: &'a str, asked: &Asked) -> Cow<'a, str> {
    if asked.bookmarks || !asked.ask_bookmarks {
        return Cow::Borrowed(query);
    }
    Cow::Owned(rewrite(query, &[("allowWatchBookmarks", Set::To("true"))]))
}

/// The query of a request that goes on where a lost stream ended, or starts it anew.
pub fn reissued_query(query: &str, asked: &Asked, reissue: &Reissue<'_>) -> String {
    let seconds = reissue.remaining.map(|remaining| remaining.as_secs().max(1).to_string());
    let mut changes = Vec::with_capacity(5);
    if !asked.bookmarks && asked.ask_bookmarks {
        changes.push(("allowWatchBookmarks", Set::To("true")));
    }
    if let Some(cursor) = reissue.cursor {
        changes.push(("resourceVersion", Set::To(cursor.as_str())));
        changes.push(("sendInitialEvents", Set::Drop));
        changes.push(("resourceVersionMatch", Set::Drop));
    }
    // Without one the server picks its own, and does so again: 1 to 2 times --min-request-timeout.
    if let Some(seconds) = &seconds {
        changes.push(("timeoutSeconds", Set::To(seconds)));
    }
    rewrite(query, &changes)
}

/// Changes the headers for the upstream leg: frames must come as they are, not compressed, and in a
/// media type that can be followed.
pub fn upstream_headers(headers: &mut HeaderMap) {
    headers.remove(header::ACCEPT_ENCODING);
    let values = || headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    if values().flat_map(MediaRange::all).all(|range| range.followed) {
        return;
    }
    let followed: Vec<_> = values()
        .flat_map(MediaRange::all)
        .filter(|range| range.followed)
        .map(|range| range.text)
        .collect();
    // Parts of a valid value are one.
    if let Ok(value) = HeaderValue::try_from(followed.join(", ")) {
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
    // The query was made from a valid one; if that is ever wrong the watch is asked as before.
    if let Ok(path_and_query) = uri::PathAndQuery::try_from(path_and_query) {
        parts.path_and_query = Some(path_and_query);
    }
    Uri::from_parts(parts).unwrap_or_else(|_| target.clone())
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Set<'a> {
    To(&'a str),
    Drop,
}

/// Sets and drops parameters; the others stay as and where they are.
fn rewrite(query: &str, changes: &[(&str, Set<'_>)]) -> String {
    let mut done = vec![false; changes.len()];
    let mut new = String::with_capacity(query.len() + 64);
    let push = |new: &mut String| {
        if !new.is_empty() {
            new.push('&');
        }
    };
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let key = decode(pair.split_once('=').map_or(pair, |(key, _)| key));
        match changes.iter().position(|(name, _)| *name == key) {
            None => {
                push(&mut new);
                new.push_str(pair);
            }
            Some(at) => {
                if let (name, Set::To(value)) = changes[at]
                    && !std::mem::replace(&mut done[at], true)
                {
                    push(&mut new);
                    let _ = write!(new, "{name}={value}");
                }
            }
        }
    }
    for ((name, set), done) in changes.iter().zip(done) {
        if let Set::To(value) = set
            && !done
        {
            push(&mut new);
            let _ = write!(new, "{name}={value}");
        }
    }
    new
}

/// The first value of a parameter.
fn first<'a>(query: &'a str, name: &str) -> Option<Cow<'a, str>> {
    query.split('&').find_map(|pair| {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        (decode(key) == name).then(|| decode(value))
    })
}

/// As apimachinery converts a parameter to a boolean (`Convert_Slice_string_To_bool`).
fn is_true(value: Option<Cow<'_, str>>) -> bool {
    value.is_some_and(|value| value != "0" && !value.eq_ignore_ascii_case("false"))
}

/// Percent-decodes a key or value; what is not well formed stays as it is.
fn decode(text: &str) -> Cow<'_, str> {
    if !text.contains(['%', '+']) {
        return Cow::Borrowed(text);
    }
    let bytes = text.as_bytes();
    let mut decoded = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let hex = |at: usize| bytes.get(at).and_then(|&b| char::from(b).to_digit(16));
        match (bytes[at], hex(at + 1), hex(at + 2)) {
            (b'%', Some(high), Some(low)) => {
                decoded.push((high * 16 + low) as u8);
                at += 3;
                continue;
            }
            (b'+', ..) => decoded.push(b' '),
            (byte, ..) => decoded.push(byte),
        }
        at += 1;
    }
    String::from_utf8(decoded).map_or(Cow::Borrowed(text), Cow::Owned)
}
