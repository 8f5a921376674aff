//! A bearer token in a file, as Kubernetes mounts it: it rotates, so it is read again and again.

use std::path::Path;

use http::HeaderValue;

use super::bounded_file;

/// Largest token read, in bytes: the apiserver takes no header above 1 MiB.
pub const MAX_TOKEN: u64 = 64 << 10;

/// The value of the `authorization` header for the token in a file.
///
/// # Errors
/// The file cannot be read, or what is in it is no token, with its path and without any of it.
pub fn read(path: &Path) -> Result<HeaderValue, String> {
    let text = bounded_file::read_text(path, MAX_TOKEN).map_err(|error| error.to_string());
    text.and_then(|text| bearer(&text)).map_err(|why| format!("{}: {why}", path.display()))
}

/// The same for a token as it is written.
///
/// # Errors
/// It is no token; never a part of it.
pub fn bearer(text: &str) -> Result<HeaderValue, String> {
    let token = text.trim();
    if token.is_empty() {
        return Err("it is empty".into());
    }
    if token.len() as u64 > MAX_TOKEN {
        return Err(format!("a token of more than {MAX_TOKEN} bytes"));
    }
    let mut value = HeaderValue::from_str(&format!("Bearer {token}"))
        .map_err(|_| "it holds what no token holds".to_owned())?;
    value.set_sensitive(true);
    Ok(value)
}
