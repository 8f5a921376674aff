//! Removes secrets from request paths before they are logged.
//!
//! Path segments, and with them the names of objects, are logged; a segment that looks like a token is
//! masked. A query value is logged only if its key is in an allow-list of keys that Kubernetes reads and
//! that contain no secret. The value of any other key may be a secret, such as a password in `command=` of
//! an exec.

use std::borrow::Cow;

use percent_encoding::percent_decode_str;

/// Maximum length of a path in a log line, in bytes, without the `…` of a shortened one.
const MAX_PATH_BYTES: usize = 1024;

/// Replacement for a secret.
const MASK: &str = "***";

/// Query keys whose values are logged, as Kubernetes spells them.
const ALLOWED_QUERY_KEYS: &[&str] = &[
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

/// Masks secret values and tokens in a path with its query, and shortens it to [`MAX_PATH_BYTES`] bytes. Borrows
/// if nothing changes, which is the usual case.
pub fn redact_path(path_and_query: &str) -> Cow<'_, str> {
    let (path, query) = path_and_query
        .split_once('?')
        .map_or((path_and_query, None), |(path, query)| (path, Some(query)));
    let path_unchanged = !path.split('/').any(looks_like_token);
    let query_unchanged = query.is_none_or(|query| query.split('&').all(is_pair_allowed));
    if path_unchanged && query_unchanged {
        return shorten(path_and_query, MAX_PATH_BYTES);
    }

    let segments = path.split('/').map(|part| if looks_like_token(part) { MASK } else { part });
    let mut out = segments.collect::<Vec<_>>().join("/");
    let pairs = query.into_iter().flat_map(|query| query.split('&'));
    let pairs = pairs.map(|pair| match pair.split_once('=') {
        _ if is_pair_allowed(pair) => Cow::Borrowed(pair),
        Some((key, _)) if !looks_like_token(key) => Cow::Owned(format!("{key}={MASK}")),
        // No `=`, or a key that looks like a secret: mask the whole pair.
        _ => Cow::Borrowed(MASK),
    });
    for (index, pair) in pairs.enumerate() {
        out.push(if index == 0 { '?' } else { '&' });
        out.push_str(&pair);
    }
    Cow::Owned(shorten(&out, MAX_PATH_BYTES).into_owned())
}

/// Whether a pair of the query is logged unchanged: an allowed key, spelled literally, whose value does not
/// look like a token; or an empty value with any key that does not look like one.
fn is_pair_allowed(pair: &str) -> bool {
    match pair.split_once('=') {
        Some((key, value)) => {
            value.is_empty() && !looks_like_token(key)
                || ALLOWED_QUERY_KEYS.contains(&key) && !looks_like_token(value)
        }
        None => pair.is_empty() || ALLOWED_QUERY_KEYS.contains(&pair),
    }
}

/// Whether `text`, percent-decoded, contains `bearer` or begins like a JWT.
fn looks_like_token(text: &str) -> bool {
    const BEARER: &[u8] = b"bearer";
    // Borrows if nothing is encoded.
    let decoded: Cow<'_, [u8]> = percent_decode_str(text).into();
    // A JWT begins with the base64url of `{"` and a letter.
    decoded.starts_with(b"eyJ")
        || decoded.windows(BEARER.len()).any(|window| window.eq_ignore_ascii_case(BEARER))
}

/// `text`, or its first `max` bytes up to a character boundary and `…`.
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
        assert!(shown.len() <= MAX_PATH_BYTES + '…'.len_utf8());
        assert!(shown.ends_with('…'));
        assert!(redact_path(&format!("/{}?token=x", "a".repeat(5000))).len() < 1100);
    }

    #[test]
    fn redact_path_without_secrets_borrows() {
        assert!(matches!(redact_path("/api/v1/nodes?limit=500"), Cow::Borrowed(_)));
    }
}
