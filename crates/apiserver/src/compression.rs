//! Compresses large responses, as kube-apiserver does (apiserver, `endpoints/handlers/responsewriters/writers.go`,
//! `deferredResponseWriter`).

use std::io::Write as _;

use crate::body::ResponseBody;
use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, VARY};
use http::{HeaderValue, Response};

/// The largest body in bytes that is sent as it is (`defaultGzipThresholdBytes`).
const THRESHOLD: usize = 128 << 10;

/// Compresses the body of a response if it is whole, large and not compressed. The caller checks that the client
/// accepts gzip.
pub(super) fn compress(response: &mut Response<ResponseBody>) {
    let ResponseBody::Full(Some(body)) = response.body() else { return };
    if body.len() <= THRESHOLD || response.headers().contains_key(CONTENT_ENCODING) {
        return;
    }
    // `defaultGzipContentEncodingLevel` is the fastest one. Writing to a vector does not fail.
    let mut member = GzEncoder::new(Vec::new(), Compression::fast());
    let Ok(member) = member.write_all(body).and_then(|()| member.finish()) else { return };
    *response.body_mut() = ResponseBody::Full(Some(Bytes::from(member)));
    let headers = response.headers_mut();
    headers.remove(CONTENT_LENGTH);
    headers.insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    headers.append(VARY, HeaderValue::from_static("Accept-Encoding"));
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use flate2::read::GzDecoder;

    use super::*;

    #[test]
    fn compress_changes_large_bodies_only() {
        for (size, is_compressed) in [(THRESHOLD, false), (THRESHOLD + 1, true)] {
            let body = vec![b'a'; size];
            let mut response = Response::new(ResponseBody::full(body.clone()));
            compress(&mut response);
            assert_eq!(response.headers().contains_key(CONTENT_ENCODING), is_compressed, "{size}");
            let ResponseBody::Full(Some(sent)) = response.into_body() else { panic!("no body") };
            let mut received = sent.to_vec();
            if is_compressed {
                received.clear();
                GzDecoder::new(&sent[..]).read_to_end(&mut received).unwrap();
            }
            assert_eq!(received, body, "{size}");
        }
    }
}
