//! Reads query strings exactly as Go's `net/url`, which the apiserver uses.
//!
//! `url.URL.Query()` splits at `&`, drops a pair with a `;` or an invalid escape, unescapes keys and
//! values, and turns `+` into a space. With other rules, jackstay could classify a request differently
//! from the apiserver that executes it. The crates `percent-encoding` and `form_urlencoded` are not used,
//! because they keep a pair with an invalid escape or a `;`.

use std::borrow::Cow;

/// The value of one hexadecimal digit.
fn hex(digit: u8) -> Option<u8> {
    char::from(digit).to_digit(16).map(|value| value as u8)
}

/// Percent-decodes `text`. Returns `None` for an invalid escape, as Go's `url.PathUnescape` and
/// `QueryUnescape` return an error. Borrows if nothing is encoded.
fn unescape(text: &str, plus_is_space: bool) -> Option<Cow<'_, str>> {
    if !text.bytes().any(|byte| byte == b'%' || (plus_is_space && byte == b'+')) {
        return Some(Cow::Borrowed(text));
    }
    let mut decoded = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        decoded.push(match byte {
            b'%' => hex(bytes.next()?)? << 4 | hex(bytes.next()?)?,
            b'+' if plus_is_space => b' ',
            other => other,
        });
    }
    // Go keeps invalid UTF-8. No Kubernetes name contains any, so a replacement character is equivalent.
    Some(Cow::Owned(match String::from_utf8(decoded) {
        Ok(text) => text,
        Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
    }))
}

/// Decodes a path as Go's `url.PathUnescape`, which does not change `+`.
pub fn unescape_path(path: &str) -> Option<Cow<'_, str>> {
    unescape(path, false)
}

/// Decodes a key or a value as Go's `url.QueryUnescape`.
pub fn unescape_query(text: &str) -> Option<Cow<'_, str>> {
    unescape(text, true)
}

/// The decoded pairs of a query (without its `?`), in order, without malformed ones.
pub fn pairs(query: &str) -> impl Iterator<Item = (Cow<'_, str>, Cow<'_, str>)> {
    query.split('&').filter(|pair| !pair.is_empty() && !pair.contains(';')).filter_map(|pair| {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        Some((unescape_query(key)?, unescape_query(value)?))
    })
}

/// The first value of `key`, as Go's `url.Values.Get`; `Some("")` for a key without a value.
pub fn first_value<'a>(query: &'a str, key: &str) -> Option<Cow<'a, str>> {
    pairs(query).find(|(name, _)| name == key).map(|(_, value)| value)
}

/// Parses a boolean parameter as `apimachinery` (`Convert_Slice_string_To_bool`): false if it is absent,
/// `0`, or `false` in any case. `watch` without a value is true.
pub fn parse_bool(value: Option<&str>) -> bool {
    value.is_some_and(|value| value != "0" && !value.eq_ignore_ascii_case("false"))
}
