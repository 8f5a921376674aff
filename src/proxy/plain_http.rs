//! Recognises plain HTTP on a TLS port. The response says so in plain HTTP, as kube-apiserver's does
//! (Go's `net/http`, `conn.serve`).

/// The response; the connection is closed after it.
pub const ANSWER: &[u8] =
    b"HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTP request to an HTTPS server.\n";

/// The first five bytes of a request by method, as many as Go compares. No TLS record starts with a
/// letter (RFC 8446, section 5.1).
const PREFIXES: [&[u8]; 9] =
    [b"GET /", b"HEAD ", b"POST ", b"PUT /", b"PATCH", b"DELET", b"OPTIO", b"CONNE", b"TRACE"];

/// Whether a connection that starts with these bytes carries an HTTP/1 request without TLS.
pub fn is_request(bytes: &[u8]) -> bool {
    PREFIXES.iter().any(|prefix| bytes.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_request_distinguishes_http_from_tls() {
        for http in ["GET / HTTP/1.1\r\n", "PUT /a HTTP/1.1\r\n", "DELETE /a", "OPTIONS *"] {
            assert!(is_request(http.as_bytes()), "{http}");
        }
        for other in [&b""[..], b"GET", b"\x16\x03\x01\x02\x00\x01", b"GETTY", b"SSH-2.0-x\r\n"] {
            assert!(!is_request(other), "{other:?}");
        }
    }
}
