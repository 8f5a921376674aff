//! Copies small pieces of bodies, and the heads of HTTP/1.1 and of long-running requests, so that they do not keep the
//! buffers that they were read into.
//!
//! hyper and h2 read into buffers of 8 KiB or more and return slices of them, and a slice keeps its whole buffer. hyper
//! reads an HTTP/1.1 body of unknown pace into a new buffer after each piece (`proto::h1::io::Buffered`), so a body that
//! arrives byte by byte would keep 8 KiB for each byte. h2's buffer also contains the frames between two pieces of a
//! stream. A piece that may wait is therefore copied unless it is [`LARGE`]: 8 KiB take less than half a microsecond.

use bytes::{Bytes, BytesMut};
use http::uri::{Authority, PathAndQuery};
use http::{HeaderValue, Uri, request};

/// Pieces of this size are not copied, because they fill a good part of their buffer.
const LARGE: usize = 8 << 10;
/// The largest buffer of which a large piece of HTTP/2 is a slice: h2 reserves space for a frame of 16 KiB with its head,
/// and `BytesMut` doubles its capacity if it must grow.
const READ_BUFFER: usize = 2 * ((16 << 10) + 9);
/// The head of a usual request, with a token.
const USUAL_HEAD: usize = 2 << 10;
/// Size of the buffers into which the small pieces of one body are copied, except for the first ones.
const CHUNK: usize = 16 << 10;

/// A piece that keeps no larger buffer than itself, unless it is large.
pub fn unpinned(piece: Bytes) -> Bytes {
    if piece.len() < LARGE { Bytes::copy_from_slice(&piece) } else { piece }
}

/// Copies the target and the values of the fields, those of a usual head into one buffer. hyper and h2 return slices of
/// their read buffers, and a watch keeps its head as long as it lasts. The table of h2's encoder upstream keeps some values
/// after the request, so each value of a large head is a copy of its own.
pub fn own_head(head: &mut request::Parts) {
    let values = head.headers.values().map(HeaderValue::len).sum::<usize>();
    let text = |uri: &Uri| {
        let target = uri.path_and_query().map_or("", PathAndQuery::as_str).to_owned();
        (target, uri.authority().map_or("", Authority::as_str).to_owned())
    };
    let (target, authority) = text(&head.uri);
    let length = values + target.len() + authority.len();
    let mut buffer = BytesMut::with_capacity(if length <= USUAL_HEAD { length } else { 0 });
    let mut own = |bytes: &[u8]| {
        if length > USUAL_HEAD {
            return Bytes::copy_from_slice(bytes);
        }
        buffer.extend_from_slice(bytes);
        buffer.split().freeze()
    };
    for value in head.headers.values_mut() {
        // A value of a head that was parsed is valid.
        if let Ok(mut owned) = HeaderValue::from_maybe_shared(own(value.as_bytes())) {
            owned.set_sensitive(value.is_sensitive());
            *value = owned;
        }
    }
    let mut uri = head.uri.clone().into_parts();
    uri.path_and_query = PathAndQuery::from_maybe_shared(own(target.as_bytes())).ok();
    uri.authority = Authority::from_maybe_shared(own(authority.as_bytes())).ok();
    if let Ok(uri) = Uri::from_parts(uri) {
        head.uri = uri;
    }
}

/// Copies the small pieces of one body into common buffers.
#[derive(Debug, Default)]
pub struct Compactor {
    /// The free part of the last buffer.
    free: BytesMut,
    /// Size of the last buffer.
    last: usize,
}

impl Compactor {
    /// The bytes of memory that [`Self::hold`] will take for this piece.
    pub fn cost(&self, piece: &Bytes, is_http2: bool) -> usize {
        match (Self::is_kept(piece, is_http2), piece.len()) {
            (true, length) => length.max(READ_BUFFER),
            (false, length) if length <= self.free.capacity() => 0,
            (false, length) => self.next_buffer(length),
        }
    }

    /// The piece in memory that it shares only with other held pieces; a large one of HTTP/2 as it is. HTTP/1.1 has
    /// buffers of up to 64 KiB, so all its pieces are copied.
    pub fn hold(&mut self, piece: &Bytes, is_http2: bool) -> Bytes {
        if Self::is_kept(piece, is_http2) {
            return piece.clone();
        }
        if piece.len() > self.free.capacity() {
            self.last = self.next_buffer(piece.len());
            self.free = BytesMut::with_capacity(self.last);
        }
        self.free.extend_from_slice(piece);
        self.free.split().freeze()
    }

    fn is_kept(piece: &Bytes, is_http2: bool) -> bool {
        is_http2 && piece.len() >= LARGE
    }

    /// The first buffer is exact, because most bodies have one piece. Further ones grow up to [`CHUNK`].
    fn next_buffer(&self, needed: usize) -> usize {
        (2 * self.last).min(CHUNK).max(needed)
    }
}

#[cfg(test)]
mod tests {
    use http::{Request, header};

    use super::*;

    #[test]
    fn own_head_keeps_every_value_and_no_buffer() {
        let read = Bytes::from_static(b"/api/v1/pods?watch=1|Bearer abc|one|two|a.example:6443");
        let mut parts = read.split(|&byte| byte == b'|').map(|part| read.slice_ref(part));
        let mut next = || parts.next().unwrap();
        let target = PathAndQuery::from_maybe_shared(next()).unwrap();
        let mut token = HeaderValue::from_maybe_shared(next()).unwrap();
        token.set_sensitive(true);
        let mut request = Request::new(());
        request.headers_mut().insert(header::AUTHORIZATION, token);
        for _ in 0..2 {
            let value = HeaderValue::from_maybe_shared(next()).unwrap();
            request.headers_mut().append("x-extra", value);
        }
        let authority = Authority::from_maybe_shared(next()).unwrap();
        for uri in [
            Uri::from(target.clone()),
            Uri::builder()
                .scheme("https")
                .authority(authority)
                .path_and_query(target)
                .build()
                .unwrap(),
        ] {
            *request.uri_mut() = uri;
            for is_large in [false, true] {
                let mut request = request.clone();
                if is_large {
                    let fill = HeaderValue::from_bytes(&[b'x'; USUAL_HEAD]).unwrap();
                    request.headers_mut().insert("x-fill", fill);
                }
                let (mut head, ()) = request.clone().into_parts();
                own_head(&mut head);
                assert_eq!((&head.uri, &head.headers), (request.uri(), request.headers()));
                assert!(head.headers[header::AUTHORIZATION].is_sensitive());
                let range = read.as_ptr_range();
                for value in head.headers.values() {
                    assert!(!range.contains(&value.as_bytes().as_ptr()), "{value:?}");
                }
                assert!(!range.contains(&head.uri.path().as_ptr()));
                // In a common buffer, one value follows the other.
                let values = || head.headers.values().map(|value| value.as_bytes().as_ptr_range());
                let follows = |end| values().any(|value| value.start == end);
                assert_eq!(values().any(|value| follows(value.end)), !is_large);
            }
        }
    }

    #[test]
    fn unpinned_copies_a_small_piece() {
        let buffer = Bytes::from(vec![1; 64 << 10]);
        for (length, is_copied) in [(1, true), (LARGE - 1, true), (LARGE, false), (16 << 10, false)]
        {
            let piece = unpinned(buffer.slice(..length));
            assert_eq!(piece.as_ptr() != buffer.as_ptr(), is_copied, "{length}");
            assert_eq!(piece, buffer.slice(..length));
        }
    }
}
