//! Reads the resource version of a response while its body is forwarded. At most [`MAX_HEAD`] bytes are copied. A
//! compressed body is inflated as far as that takes: to its beginning for most bodies, as a whole for a list of custom
//! resources, whose metadata follows its items. Nothing else is delayed for it.

use std::io::Read as _;

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, header, response};
use jackstay_core::admission::ByteAccount;
use jackstay_core::reads::ReadForm;
use jackstay_core::watch::codec::Encoding as Format;
use jackstay_core::watch::codec::head::{
    cbor_head, cbor_tail, is_status, json_head, json_tail, protobuf_head,
};
use jackstay_core::watch::codec::version::HeadVersion;
use jackstay_core::watch::gzip::GzipDecoder;

/// Bytes of a body that are copied at most, if its first piece does not contain the version.
const MAX_HEAD: usize = 64 * 1024;
/// Bytes at the end of a list that contain its metadata: a version, a remaining count and a continue token of some
/// hundred bytes.
const TAIL: usize = 2048;
/// Bytes of the prefix of a compressed body that are inflated at most.
const MAX_INFLATED: u64 = 4096;
/// Pieces of 16 KiB to which one chunk may inflate. Those of objects have a tenth of that.
const MAX_PIECES: usize = 512;

/// How a body is encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Encoding {
    format: Format,
    is_gzip: bool,
}

impl Encoding {
    fn of(headers: &HeaderMap) -> Option<Self> {
        let text = |name| headers.get(name).map(|value: &http::HeaderValue| value.as_bytes());
        let is_gzip = match text(header::CONTENT_ENCODING) {
            None => false,
            Some(b"gzip") => true,
            Some(_) => return None,
        };
        let content_type = text(header::CONTENT_TYPE)?;
        let essence = content_type.split(|&byte| byte == b';').next()?.trim_ascii();
        let format = match &*essence.to_ascii_lowercase() {
            b"application/json" => Format::Json,
            b"application/vnd.kubernetes.protobuf" => Format::Protobuf,
            b"application/cbor" => Format::Cbor,
            _ => return None,
        };
        Some(Self { format, is_gzip })
    }

    /// The version at the beginning of a body that is not compressed.
    fn head_version(self, bytes: &[u8]) -> HeadVersion {
        match self.format {
            Format::Json => json_head(bytes),
            Format::Protobuf => protobuf_head(bytes),
            Format::Cbor => cbor_head(bytes),
        }
    }
}

/// The version of one response.
#[derive(Debug)]
pub struct BodyVersion {
    encoding: Encoding,
    /// `None` if the body is not compressed.
    gzip: Option<GzipDecoder>,
    /// The beginning, as far as it has arrived; `None` once it is known to have no version.
    head: Option<BytesMut>,
    /// The body answers a write, so it may be a Status instead of an object.
    may_be_status: bool,
    /// The latest bytes of a list in JSON or CBOR, whose metadata may follow its items.
    tail: Option<Vec<u8>>,
}

/// What the bytes of a body that have arrived show.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadProgress {
    /// The version.
    Version(u64),
    /// The version of a Status that answers a write, or of a body whose kind has not arrived before it.
    StatusVersion(u64),
    /// More bytes are needed.
    Unknown,
    /// There is none.
    None,
}

impl BodyVersion {
    /// Reads a body with this head, which answers a request of this form; `None` if it cannot be read. `account` bounds
    /// what the decoder of a compressed body holds.
    pub fn new(head: &response::Parts, form: ReadForm, account: &ByteAccount) -> Option<Self> {
        let encoding = Encoding::of(&head.headers)?;
        let may_be_status = form == ReadForm::Write;
        let tail = (form.is_list() && encoding.format != Format::Protobuf).then(Vec::new);
        let gzip = encoding.is_gzip.then(|| GzipDecoder::new(account.clone()));
        Some(Self { encoding, gzip, head: Some(BytesMut::new()), may_be_status, tail })
    }

    /// The version in the first part of a body with this head.
    pub fn of_prefix(head: &response::Parts, prefix: &[u8]) -> Option<u64> {
        let encoding = Encoding::of(&head.headers)?;
        let mut inflated = Vec::new();
        if encoding.is_gzip {
            // The body may be incomplete or invalid: what was inflated before the error is read.
            let mut gzip = flate2::read::GzDecoder::new(prefix).take(MAX_INFLATED);
            let _ = gzip.read_to_end(&mut inflated);
        }
        match encoding.head_version(if encoding.is_gzip { &inflated } else { prefix }) {
            HeadVersion::Version(version) => Some(version),
            HeadVersion::Incomplete | HeadVersion::None => None,
        }
    }

    /// Reads the next bytes.
    pub fn read(&mut self, data: &Bytes) -> ReadProgress {
        let Some(mut gzip) = self.gzip.take() else { return self.read_plain(data) };
        gzip.push(data.clone());
        for _ in 0..MAX_PIECES {
            match gzip.next_piece() {
                Ok(Some(piece)) => match self.read_plain(&piece) {
                    ReadProgress::Unknown => {}
                    progress => return progress,
                },
                Ok(None) => {
                    gzip.take_chunk();
                    self.gzip = Some(gzip);
                    return ReadProgress::Unknown;
                }
                Err(_) => return ReadProgress::None,
            }
        }
        ReadProgress::None
    }

    /// Whether the next bytes will be inflated.
    pub fn inflates(&self) -> bool {
        self.gzip.is_some()
    }

    fn read_plain(&mut self, data: &[u8]) -> ReadProgress {
        if let Some(head) = &mut self.head {
            let begins = head.is_empty();
            if !begins {
                head.extend_from_slice(data);
            }
            let bytes = if begins { data } else { &head[..] };
            match self.encoding.head_version(bytes) {
                HeadVersion::Version(version)
                    if self.may_be_status
                        && is_status(self.encoding.format, bytes) != Some(false) =>
                {
                    return ReadProgress::StatusVersion(version);
                }
                HeadVersion::Version(version) => return ReadProgress::Version(version),
                HeadVersion::None => return ReadProgress::None,
                // The items of a list come first, or the metadata is long.
                HeadVersion::Incomplete if data.len().max(head.len()) >= MAX_HEAD => {
                    self.head = None;
                }
                HeadVersion::Incomplete if begins => head.extend_from_slice(data),
                HeadVersion::Incomplete => {}
            }
        }
        match &mut self.tail {
            Some(tail) => {
                tail.extend_from_slice(&data[data.len().saturating_sub(TAIL)..]);
                tail.drain(..tail.len().saturating_sub(TAIL));
                ReadProgress::Unknown
            }
            None if self.head.is_none() => ReadProgress::None,
            None => ReadProgress::Unknown,
        }
    }

    /// The version in the end of the body, which is complete.
    pub fn end(&self) -> Option<u64> {
        let tail = self.tail.as_deref()?;
        if self.encoding.format == Format::Cbor { cbor_tail(tail) } else { json_tail(tail) }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;
    use ReadForm::{OtherList, Write};
    use ReadProgress::{None as NoVersion, StatusVersion, Unknown, Version};

    fn head(content_type: &str, encoding: &str) -> response::Parts {
        let mut response = http::Response::builder().header(header::CONTENT_TYPE, content_type);
        if !encoding.is_empty() {
            response = response.header(header::CONTENT_ENCODING, encoding);
        }
        response.body(()).unwrap().into_parts().0
    }

    fn new(head: &response::Parts, form: ReadForm) -> Option<BodyVersion> {
        BodyVersion::new(head, form, &ByteAccount::unmetered(1 << 20))
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(bytes).unwrap();
        gzip.finish().unwrap()
    }

    fn read(body: &mut BodyVersion, pieces: &[&[u8]]) -> ReadProgress {
        for piece in pieces {
            let progress = body.read(&Bytes::copy_from_slice(piece));
            if progress != Unknown {
                return progress;
            }
        }
        body.end().map_or(Unknown, Version)
    }

    #[test]
    fn version_is_read_from_the_head_in_any_pieces() {
        let text = br#"{"kind":"Pod","apiVersion":"v1","metadata":{"name":"a","resourceVersion":"71"},"spec":{}}"#;
        for at in 0..text.len() {
            let mut body = new(&head("application/json; charset=utf-8", ""), Write).unwrap();
            assert_eq!(read(&mut body, &[&text[..at], &text[at..]]), Version(71), "{at}");
        }
    }

    #[test]
    fn version_of_a_list_of_custom_resources_is_read_from_its_end() {
        let items = r#"{"metadata":{"resourceVersion":"4"},"spec":"x"},"#.repeat(5_000);
        let text = format!(
            r#"{{"apiVersion":"e.com/v1","items":[{items}{{}}],"kind":"FooList","metadata":{{"continue":"","resourceVersion":"9"}}}}"#
        );
        for piece in [7, 100, 16_384, 1 << 20] {
            let mut body = new(&head("application/json", ""), OtherList).unwrap();
            let pieces: Vec<_> = text.as_bytes().chunks(piece).collect();
            assert_eq!(read(&mut body, &pieces), Version(9), "{piece}");
            let mut body = new(&head("application/json", "gzip"), OtherList).unwrap();
            let bytes = gzip(text.as_bytes());
            let pieces: Vec<_> = bytes.chunks(piece).collect();
            assert_eq!(read(&mut body, &pieces), Version(9), "{piece}, compressed");
        }
    }

    #[test]
    fn version_of_cbor_is_read_from_its_head_or_its_end() {
        let head = head("application/cbor", "");
        let metadata = b"\x48metadata\xa1\x4fresourceVersion\x4271";
        let object = [b"\xd9\xd9\xf7\xa2\x44kind\x43Pod", &metadata[..]].concat();
        for at in 0..object.len() {
            let mut body = new(&head, Write).unwrap();
            assert_eq!(read(&mut body, &[&object[..at], &object[at..]]), Version(71), "{at}");
        }
        let items = b"\xa1\x48metadata\xa1\x4fresourceVersion\x414".repeat(5_000);
        let list =
            [b"\xa3\x45items\x99\x13\x88", &items[..], metadata, b"\x44kind\x47PodList"].concat();
        for piece in [7, 100, 16_384, 1 << 20] {
            let mut body = new(&head, OtherList).unwrap();
            let pieces: Vec<_> = list.chunks(piece).collect();
            assert_eq!(read(&mut body, &pieces), Version(71), "{piece}");
        }
    }

    #[test]
    fn version_of_a_status_is_read_in_any_pieces_and_encoding() {
        let json = br#"{"kind":"Status","apiVersion":"v1","metadata":{"resourceVersion":"71"},"status":"Success","code":200}"#;
        let protobuf = b"k8s\0\x0a\x0c\x0a\x02v1\x12\x06Status\x12\x11\x0a\x06\x12\x0271\x1a\0\x12\x07Success\x1a\0\x22\0";
        let cbor = b"\xd9\xd9\xf7\xa2\x44kind\x46Status\x48metadata\xa1\x4fresourceVersion\x4271";
        for (content_type, bytes) in [
            ("application/json", &json[..]),
            ("application/vnd.kubernetes.protobuf", protobuf),
            ("application/cbor", cbor),
        ] {
            let compressed = gzip(bytes);
            for (encoding, bytes) in [("", bytes), ("gzip", &compressed)] {
                let head = head(content_type, encoding);
                for at in 0..bytes.len() {
                    let mut body = new(&head, Write).unwrap();
                    let progress = read(&mut body, &[&bytes[..at], &bytes[at..]]);
                    assert_eq!(progress, StatusVersion(71), "{content_type} {encoding} {at}");
                }
            }
        }
        // A version before the kind may be that of a Status.
        let mut body = new(&head("application/cbor", ""), Write).unwrap();
        let reversed = b"\xa2\x48metadata\xa1\x4fresourceVersion\x4271\x44kind\x43Pod";
        assert_eq!(read(&mut body, &[&reversed[..30], &reversed[30..]]), StatusVersion(71));
        let mut body = new(&head("application/cbor", ""), Write).unwrap();
        assert_eq!(read(&mut body, &[reversed]), Version(71));
    }

    #[test]
    fn version_is_read_from_a_compressed_body() {
        let text = format!(
            r#"{{"kind":"PodList","apiVersion":"v1","metadata":{{"resourceVersion":"12"}},"items":[{}]}}"#,
            "1,".repeat(100_000)
        );
        let bytes = gzip(text.as_bytes());
        let head = head("application/json", "gzip");
        let mut body = new(&head, OtherList).unwrap();
        assert_eq!(read(&mut body, &[&bytes]), Version(12));
        assert_eq!(BodyVersion::of_prefix(&head, &bytes), Some(12));
        let mut broken = new(&head, OtherList).unwrap();
        assert_eq!(read(&mut broken, &[b"no gzip"]), NoVersion);
        let without_memory = &ByteAccount::unmetered(1);
        let mut body = BodyVersion::new(&head, OtherList, without_memory).unwrap();
        assert_eq!(read(&mut body, &[&bytes[..20], &bytes[20..]]), NoVersion);
    }

    #[test]
    fn body_without_a_version_is_given_up() {
        let endless = vec![b'['; 2 * MAX_HEAD];
        for (content_type, pieces) in [
            ("application/json", &[&b"ok"[..]][..]),
            ("application/json", &[br#"{"kind":"Status","metadata":{},"code":200}"#]),
            ("application/json", &[br#"{"a":"#, &endless]),
            ("application/vnd.kubernetes.protobuf", &[b"{}"]),
        ] {
            let mut body = new(&head(content_type, ""), Write).unwrap();
            assert_eq!(read(&mut body, pieces), NoVersion, "{content_type}");
        }
        for (content_type, encoding) in
            [("text/plain", ""), ("application/cbor-seq", ""), ("application/json", "br")]
        {
            assert!(new(&head(content_type, encoding), OtherList).is_none(), "{content_type}");
        }
    }
}
