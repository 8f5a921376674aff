//! Decodes responses as Go's HTTP client does: member by member, as far as they have arrived.

use std::io::Write as _;

use bytes::Bytes;
use flate2::write::MultiGzDecoder;

use super::connection::Failure;

/// A compressed body.
#[derive(Debug)]
pub(super) struct GzipBody(MultiGzDecoder<Vec<u8>>);

impl GzipBody {
    /// A body of which nothing has arrived.
    pub fn new() -> Self {
        Self(MultiGzDecoder::new(Vec::new()))
    }

    /// What a part of the body contains, as far as it can be decoded now.
    pub fn decode(&mut self, part: &[u8]) -> Result<Bytes, Failure> {
        let decoded = self.0.write_all(part).and_then(|()| self.0.flush());
        decoded.map_err(|_| Failure::Undecodable)?;
        Ok(std::mem::take(self.0.get_mut()).into())
    }

    /// The body has ended.
    pub fn end(&mut self) -> Result<(), Failure> {
        self.0.try_finish().map_err(|_| Failure::Undecodable)
    }
}

#[cfg(test)]
mod tests {
    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    fn member(text: &str) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(text.as_bytes()).unwrap();
        encoder.finish().unwrap()
    }

    #[test]
    fn decode_returns_each_member_when_it_has_arrived() {
        let (first, second) = (member("one"), member("two"));
        let mut body = GzipBody::new();
        assert_eq!(body.decode(&first[..5]), Ok(Bytes::new()));
        assert_eq!(body.decode(&first[5..]), Ok(Bytes::from("one")));
        assert_eq!(body.decode(&second), Ok(Bytes::from("two")));
        assert_eq!(body.end(), Ok(()));
    }

    #[test]
    fn end_within_a_member_is_a_failure() {
        let mut body = GzipBody::new();
        body.decode(&member("one")).unwrap();
        let second = member("two");
        body.decode(&second[..second.len() - 4]).unwrap();
        assert_eq!(body.end(), Err(Failure::Undecodable));
        assert_eq!(GzipBody::new().decode(b"no gzip at all"), Err(Failure::Undecodable));
    }
}
