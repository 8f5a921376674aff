//! Bearer tokens, as Kubernetes mounts them in files.

use std::path::Path;

use http::HeaderValue;

use super::bounded_read;

/// Maximum length of a token in bytes: the apiserver accepts no headers above 1 MiB.
const MAX_TOKEN: u64 = 64 << 10;

/// The value of the `authorization` header for the token in a file. Callers read it again as it rotates.
///
/// # Errors
/// The file cannot be read, or its content is not a token. The message names the path and shows no content.
pub fn authorization_from_file(path: &Path) -> Result<HeaderValue, String> {
    let text = bounded_read::read_text(path, MAX_TOKEN).map_err(|error| error.to_string());
    text.and_then(|text| authorization(&text)).map_err(|why| format!("{}: {why}", path.display()))
}

/// The value of the `authorization` header for a token, as client-go sends it: without surrounding white
/// space. A header cannot contain control characters (RFC 9110 section 5.5).
///
/// # Errors
/// The text is not a token. The message shows no content.
pub fn authorization(text: &str) -> Result<HeaderValue, String> {
    let token = text.trim();
    if token.is_empty() {
        return Err("it is empty".into());
    }
    if token.len() as u64 > MAX_TOKEN {
        return Err(format!("a token of more than {MAX_TOKEN} bytes"));
    }
    let mut value = HeaderValue::from_str(&format!("Bearer {token}")).map_err(|_| {
        "it holds a line break or another character that no header may hold".to_owned()
    })?;
    value.set_sensitive(true);
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn authorization_accepts_tokens_and_refuses_other_text() {
        let long = "x".repeat(MAX_TOKEN as usize + 1);
        let whole = &long[1..];
        for (text, expected) in [
            ("abc", Ok("Bearer abc")),
            (" abc\r\n\n", Ok("Bearer abc")),
            ("a b\tc", Ok("Bearer a b\tc")),
            ("a.b-c_~+/==", Ok("Bearer a.b-c_~+/==")),
            ("a\u{e9}b", Ok("Bearer a\u{e9}b")),
            (whole, Ok(whole)),
            ("", Err("it is empty")),
            (" \n", Err("it is empty")),
            ("abc\ndef", Err("a line break")),
            ("a\u{0}b", Err("no header may hold")),
            ("a\u{7f}b", Err("no header may hold")),
            (&long, Err("more than 65536 bytes")),
        ] {
            let value = authorization(text);
            let shown = value.as_ref().map(HeaderValue::as_bytes);
            match (shown, expected) {
                (Ok(shown), Ok(expected)) => {
                    assert!(shown.ends_with(expected.as_bytes()), "{text:?}");
                }
                (Err(error), Err(expected)) => {
                    assert!(error.contains(expected), "{text:?}: {error}");
                    assert!(!error.contains("abc"), "{error}");
                }
                _ => panic!("{text:?}: {value:?}"),
            }
            assert!(value.is_ok_and(|value| value.is_sensitive()) == expected.is_ok());
        }
    }
}
