//! Query strings read exactly as Go's `net/url` reads them, because the apiserver does.
//!
//! `url.URL.Query()` splits at `&`, drops a pair with a `;` or a broken escape, unescapes keys and
//! values, and turns `+` into a space. A reader with other rules could classify a request differently
//! from the apiserver that executes it. That is why this is not percent-encoding or `form_urlencoded`:
//! both keep a broken escape as text, and keep a pair with a `;`.

use std::borrow::Cow;

/// The value of one hexadecimal digit.
fn hex(digit: u8) -> Option<u8> {
    char::from(digit).to_digit(16).map(|value| value as u8)
}

/// Percent-decodes `text`; `None` for a broken escape, for which Go's `url.PathUnescape` and
/// `QueryUnescape` return an error. Borrows if there is nothing to decode.
fn unescape(text: &str, plus_is_space: bool) -> Option<Cow<'_, str>> {
    if !text.bytes().any(|b| b == b'%' || (plus_is_space && b == b'+')) {
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
    // Go keeps invalid UTF-8. No name contains it, so a replacement character is equivalent.
    Some(Cow::Owned(match String::from_utf8(decoded) {
        Ok(text) => text,
        Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
    }))
}

/// Decodes a path as Go's `url.PathUnescape`: `+` stays a plus.
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

/// The first value of `key`, as Go's `url.Values.Get`; `Some("")` when it is there without one.
pub fn first_value<'a>(query: &'a str, key: &str) -> Option<Cow<'a, str>> {
    pairs(query).find(|(k, _)| k == key).map(|(_, value)| value)
}

/// A boolean parameter as `apimachinery` converts it (`Convert_Slice_string_To_bool`): only
/// absence, `0` and `false` in any case are false; a bare `watch` is true.
pub fn parse_bool(value: Option<&str>) -> bool {
    value.is_some_and(|v| v != "0" && !v.eq_ignore_ascii_case("false"))
}
