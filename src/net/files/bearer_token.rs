//! A bearer token in a file, as Kubernetes mounts it: it rotates, so it is read again and again.

use std::path::Path;

use http::HeaderValue;

use super::bounded_read;

/// Largest token read, in bytes: the apiserver takes no header above 1 MiB.
const MAX_TOKEN: u64 = 64 << 10;

/// The value of the `authorization` header for the token in a file.
///
/// # Errors
/// The file cannot be read, or what is in it is no token, with its path and without any of it.
pub fn authorization_from_file(path: &Path) -> Result<HeaderValue, String> {
    let text = bounded_read::read_text(path, MAX_TOKEN).map_err(|error| error.to_string());
    text.and_then(|text| authorization(&text)).map_err(|why| format!("{}: {why}", path.display()))
}

/// The same for a token as it is written: what client-go sends as well. Blanks around it do not count,
/// any within are its own, and a control character is not for a header (RFC 9110 section 5.5).
///
/// # Errors
/// It is no token; never a part of it.
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
    fn what_a_token_is() {
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
