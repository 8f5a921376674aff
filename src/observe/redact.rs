//! Removes secrets from request paths before they are logged.
//!
//! Object names are logged. Query values are logged only for keys that Kubernetes reads and that never
//! contain a secret. This is an allow-list, because the value of any other key may be a secret, such as
//! `command=` of an exec with a password.

use std::borrow::Cow;

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
    let (path, query) = match path_and_query.split_once('?') {
        Some((path, query)) => (path, Some(query)),
        None => (path_and_query, None),
    };
    let path_is_clean = !path.split('/').any(looks_secret);
    let query_is_clean = query.is_none_or(|query| query.split('&').all(pair_is_clean));
    if path_is_clean && query_is_clean {
        return shorten(path_and_query, MAX_PATH);
    }

    let mut out = String::with_capacity(path_and_query.len());
    for (index, segment) in path.split('/').enumerate() {
        if index > 0 {
            out.push('/');
        }
        out.push_str(if looks_secret(segment) { MASK } else { segment });
    }
    for (index, pair) in query.into_iter().flat_map(|query| query.split('&')).enumerate() {
        out.push(if index == 0 { '?' } else { '&' });
        if pair_is_clean(pair) {
            out.push_str(pair);
        } else if let Some((key, _)) = pair.split_once('=').filter(|(key, _)| !looks_secret(key)) {
            out.push_str(key);
            out.push('=');
            out.push_str(MASK);
        } else {
            // No `=`, or a key that looks like a secret: mask the whole pair.
            out.push_str(MASK);
        }
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
        let decoded = percent_decoded(text);
        return contains(&decoded) || decoded.starts_with(b"eyJ");
    }
    // Every JWT begins with base64url of `{"`.
    text.starts_with("eyJ") || contains(text.as_bytes())
}

fn percent_decoded(text: &str) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, tail)) = rest.split_first() {
        let hex = |at: usize| tail.get(at).and_then(|b| char::from(*b).to_digit(16));
        if let (b'%', Some(high), Some(low)) = (byte, hex(0), hex(1)) {
            out.push((high * 16 + low) as u8);
            rest = &tail[2..];
        } else {
            out.push(byte);
            rest = tail;
        }
    }
    out
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
