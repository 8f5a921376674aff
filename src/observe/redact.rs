//! Removes secrets from request paths before they are logged.
//!
//! Object names are logged. Query values are logged only for keys that Kubernetes reads and that never
//! contain a secret. This is an allow-list, because the value of any other key may be a secret, such as
//! `command=` of an exec with a password.

use std::borrow::Cow;

use percent_encoding::percent_decode_str;

/// Maximum length of a path in a log line, in bytes.
const MAX_PATH: usize = 1024;

/// Replaces a secret.
const MASK: &str = "***";

/// Query keys whose values are logged, as Kubernetes spells them.
const SHOWN: &[&str] = &[
    "allowWatchBookmarks",
    "container",
    "continue",
    "dryRun",
    "exclude",
    "fieldManager",
    "fieldSelector",
    "fieldValidation",
    "follow",
    "force",
    "gracePeriodSeconds",
    "includeObject",
    "insecureSkipTLSVerifyBackend",
    "labelSelector",
    "limit",
    "limitBytes",
    "orphanDependents",
    "ports",
    "pretty",
    "previous",
    "propagationPolicy",
    "resourceVersion",
    "resourceVersionMatch",
    "sendInitialEvents",
    "sinceSeconds",
    "sinceTime",
    "stderr",
    "stdin",
    "stdout",
    "stream",
    "tailLines",
    "timeout",
    "timeoutSeconds",
    "timestamps",
    "tty",
    "verbose",
    "watch",
];

/// Path and query without secret values and bearer tokens, cut after [`MAX_PATH`] bytes. Borrows if
/// nothing is removed, which is the usual case.
pub fn redact_path(path_and_query: &str) -> Cow<'_, str> {
    let (path, query) = path_and_query
        .split_once('?')
        .map_or((path_and_query, None), |(path, query)| (path, Some(query)));
    let path_is_clean = !path.split('/').any(looks_secret);
    let query_is_clean = query.is_none_or(|query| query.split('&').all(pair_is_clean));
    if path_is_clean && query_is_clean {
        return shorten(path_and_query, MAX_PATH);
    }

    let segments = path.split('/').map(|part| if looks_secret(part) { MASK } else { part });
    let mut out = segments.collect::<Vec<_>>().join("/");
    let pairs = query.into_iter().flat_map(|query| query.split('&'));
    let pairs = pairs.map(|pair| match pair.split_once('=') {
        _ if pair_is_clean(pair) => Cow::Borrowed(pair),
        Some((key, _)) if !looks_secret(key) => Cow::Owned(format!("{key}={MASK}")),
        // No `=`, or a key that looks like a secret: mask the whole pair.
        _ => Cow::Borrowed(MASK),
    });
    for (index, pair) in pairs.enumerate() {
        out.push(if index == 0 { '?' } else { '&' });
        out.push_str(&pair);
    }
    Cow::Owned(shorten(&out, MAX_PATH).into_owned())
}

/// Whether a pair may be logged: its key is in the list, literally, and its value is no token; or its
/// value is empty and its key is no token.
fn pair_is_clean(pair: &str) -> bool {
    match pair.split_once('=') {
        Some((key, value)) => {
            value.is_empty() && !looks_secret(key) || SHOWN.contains(&key) && !looks_secret(value)
        }
        None => pair.is_empty() || SHOWN.contains(&pair),
    }
}

/// Whether the text contains `bearer`, also percent-encoded, or begins like a JWT.
fn looks_secret(text: &str) -> bool {
    const BEARER: &[u8] = b"bearer";
    let contains =
        |text: &[u8]| text.windows(BEARER.len()).any(|window| window.eq_ignore_ascii_case(BEARER));
    if text.contains('%') {
        let decoded: Vec<u8> = percent_decode_str(text).collect();
        return contains(&decoded) || decoded.starts_with(b"eyJ");
    }
    // Every JWT begins with base64url of `{"`.
    text.starts_with("eyJ") || contains(text.as_bytes())
}

/// At most `max` bytes of `text`, cut at a character boundary and then followed by `…`.
pub(super) fn shorten(text: &str, max: usize) -> Cow<'_, str> {
    if text.len() <= max {
        return Cow::Borrowed(text);
    }
    let mut end = max;
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    Cow::Owned(format!("{}…", &text[..end]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redact_path_masks_secrets() {
        let table = [
            ("/", "/"),
            ("*", "*"),
            ("", ""),
            ("/api/v1/pods", "/api/v1/pods"),
            ("/api/v1/pods?", "/api/v1/pods?"),
            ("/api/v1/pods?watch", "/api/v1/pods?watch"),
            (
                "/api/v1/pods?watch=1&resourceVersion=12&labelSelector=a%3Db",
                "/api/v1/pods?watch=1&resourceVersion=12&labelSelector=a%3Db",
            ),
            ("/api/v1/pods?continue=eyJ2IjoibWV0", "/api/v1/pods?continue=***"),
            ("/x?token=abc", "/x?token=***"),
            ("/x?access_token=abc&watch=1", "/x?access_token=***&watch=1"),
            ("/x?ACCESS_TOKEN=abc", "/x?ACCESS_TOKEN=***"),
            ("/x?password=a=b", "/x?password=***"),
            ("/x?%74oken=abc", "/x?%74oken=***"),
            ("/x?token=", "/x?token="),
            ("/x?hunter2", "/x?***"),
            ("/x?a=1?token=2", "/x?a=***"),
            ("/x?watch=Bearer%20abc", "/x?watch=***"),
            ("/x?watch=%42earer+abc", "/x?watch=***"),
            ("/x?bearer.abc=", "/x?***"),
            (
                "/api/v1/namespaces/d/pods/p/exec?command=mysql&command=-psecret&stdin=true",
                "/api/v1/namespaces/d/pods/p/exec?command=***&command=***&stdin=true",
            ),
            ("/a/base64url.bearer.authorization.k8s.io.QUJD/b", "/a/***/b"),
            ("/a/eyJhbGciOi.eyJzdWIi.sig?watch=1", "/a/***?watch=1"),
            ("/x?watch=%", "/x?watch=%"),
            ("/x?&&watch=1", "/x?&&watch=1"),
        ];
        for (input, expected) in table {
            assert_eq!(redact_path(input), expected, "{input}");
        }
    }

    #[test]
    fn redact_path_shortens_at_a_character_boundary() {
        let long = format!("/{}", "é".repeat(2000));
        let shown = redact_path(&long);
        assert!(shown.len() <= MAX_PATH + '…'.len_utf8());
        assert!(shown.ends_with('…'));
        assert!(redact_path(&format!("/{}?token=x", "a".repeat(5000))).len() < 1100);
    }

    #[test]
    fn redact_path_without_secrets_borrows() {
        assert!(matches!(redact_path("/api/v1/nodes?limit=500"), Cow::Borrowed(_)));
    }
}
