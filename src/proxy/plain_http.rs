//! Plain HTTP that comes to a TLS port gets an answer in plain HTTP that says so, as
//! kube-apiserver tells it (Go's `net/http`, `conn.serve`).

/// What the client is sent before its connection is closed.
pub const ANSWER: &[u8] =
    b"HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTP request to an HTTPS server.\n";

/// How a request begins, with the first five bytes of each method: as much as Go looks at. No TLS
/// record begins with a letter (RFC 8446, section 5.1).
const BEGINNINGS: [&[u8]; 9] =
    [b"GET /", b"HEAD ", b"POST ", b"PUT /", b"PATCH", b"DELET", b"OPTIO", b"CONNE", b"TRACE"];

/// Whether the first bytes of a connection are an HTTP/1 request.
pub fn is_request(bytes: &[u8]) -> bool {
    BEGINNINGS.iter().any(|beginning| bytes.starts_with(beginning))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_request_knows_http_from_tls() {
        for http in ["GET / HTTP/1.1\r\n", "PUT /a HTTP/1.1\r\n", "DELETE /a", "OPTIONS *"] {
            assert!(is_request(http.as_bytes()), "{http}");
        }
        for other in [&b""[..], b"GET", b"\x16\x03\x01\x02\x00\x01", b"GETTY", b"SSH-2.0-x\r\n"] {
            assert!(!is_request(other), "{other:?}");
        }
    }
}
