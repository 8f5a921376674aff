//! Tests of the gzip decoder: any members in any chunks, and input that is no gzip.

use std::io::{Read as _, Write as _};
use std::time::Instant;

use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use http::{HeaderMap, HeaderValue, header};
use proptest::prelude::*;

use super::super::gzip::{ContentCoding, GzipDecoder, GzipError, PIECE, STATE};
use crate::admission::{ByteAccount, ByteBudget, MemoryBudget, MemoryKind};
use crate::credential_class::ClientRank;

/// One member.
fn member(data: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(data).unwrap();
    encoder.finish().unwrap()
}

/// One member that is flushed after each part.
fn flushed(parts: &[&[u8]]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    for part in parts {
        encoder.write_all(part).unwrap();
        encoder.flush().unwrap();
    }
    encoder.finish().unwrap()
}

fn decoder() -> GzipDecoder {
    GzipDecoder::new(ByteAccount::unmetered(usize::MAX))
}

/// Decodes a chunk and returns what it contains.
fn decode(decoder: &mut GzipDecoder, chunk: &[u8]) -> Result<Vec<u8>, GzipError> {
    decoder.push(Bytes::copy_from_slice(chunk));
    let mut out = Vec::new();
    while let Some(piece) = decoder.next_piece()? {
        assert!((1..=PIECE).contains(&piece.len()));
        out.extend(piece);
    }
    Ok(out)
}

fn decode_whole(body: &[u8]) -> Result<Vec<u8>, GzipError> {
    decode(&mut decoder(), body)
}

/// A header with each optional field.
fn long_header(name_len: usize) -> Vec<u8> {
    let mut header = vec![0x1f, 0x8b, 8, 0b1_1110, 0, 0, 0, 0, 0, 3];
    header.extend([3, 0, 1, 2, 3]);
    header.extend(vec![b'n'; name_len]);
    header.extend(b"\0comment\0");
    let mut checksum = flate2::Crc::new();
    checksum.update(&header);
    header.extend(&checksum.sum().to_le_bytes()[..2]);
    header
}

#[derive(Debug, Clone)]
enum Member {
    Whole(Vec<u8>),
    Flushed(Vec<Vec<u8>>),
    LongHeader(Vec<u8>),
}

impl Member {
    fn encode(&self) -> Vec<u8> {
        match self {
            Self::Whole(data) => member(data),
            Self::Flushed(parts) => flushed(&parts.iter().map(Vec::as_slice).collect::<Vec<_>>()),
            Self::LongHeader(data) => [long_header(9), member(data)[10..].to_vec()].concat(),
        }
    }

    fn data(&self) -> Vec<u8> {
        match self {
            Self::Whole(data) | Self::LongHeader(data) => data.clone(),
            Self::Flushed(parts) => parts.concat(),
        }
    }
}

fn data() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        Just(Vec::new()),
        prop::collection::vec(any::<u8>(), 0..300),
        (0..200_usize, "[a-z]{1,20}").prop_map(|(times, text)| text.repeat(times).into_bytes()),
        (0..4 * PIECE).prop_map(|len| vec![b' '; len]),
    ]
}

fn members() -> impl Strategy<Value = Vec<Member>> {
    let member = prop_oneof![
        data().prop_map(Member::Whole),
        prop::collection::vec(data(), 0..4).prop_map(Member::Flushed),
        data().prop_map(Member::LongHeader),
    ];
    prop::collection::vec(member, 0..6)
}

proptest! {
    #[test]
    fn members_are_decoded_in_any_chunks(members in members(), cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12)) {
        let body: Vec<_> = members.iter().flat_map(Member::encode).collect();
        let expected: Vec<_> = members.iter().flat_map(Member::data).collect();
        let mut offsets: Vec<_> = cuts.iter().map(|cut| cut.index(body.len() + 1)).collect();
        offsets.extend([0, body.len()]);
        offsets.sort_unstable();
        let mut decoder = decoder();
        let mut out = Vec::new();
        for chunk in offsets.windows(2) {
            out.extend(decode(&mut decoder, &body[chunk[0]..chunk[1]]).unwrap());
        }
        prop_assert_eq!(out, expected);
        prop_assert!(decoder.is_between_members());
    }

    /// What has been flushed is inflated although its member goes on, in as few bytes as have arrived.
    #[test]
    fn flushed_parts_do_not_wait_for_the_next(parts in prop::collection::vec(data(), 1..5)) {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        let mut decoder = decoder();
        for part in &parts {
            encoder.write_all(part).unwrap();
            encoder.flush().unwrap();
            let chunk = std::mem::take(encoder.get_mut());
            prop_assert_eq!(&decode(&mut decoder, &chunk).unwrap(), part);
        }
    }

    #[test]
    fn any_bytes_are_decoded_as_by_flate2_or_refused(mut bytes in members().prop_map(|m| m.iter().flat_map(Member::encode).collect::<Vec<_>>()), changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..3)) {
        for (at, byte) in changes {
            if !bytes.is_empty() {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
        }
        let mut expected = Vec::new();
        let is_valid = bytes.is_empty()
            || flate2::read::MultiGzDecoder::new(&bytes[..]).read_to_end(&mut expected).is_ok();
        let mut decoder = decoder();
        let decoded = decode(&mut decoder, &bytes);
        if is_valid {
            prop_assert_eq!(decoded, Ok(expected));
            prop_assert!(decoder.is_between_members());
        } else {
            prop_assert!(decoded.is_err() || !decoder.is_between_members());
        }
    }
}

#[test]
fn single_bytes_are_decoded_as_they_arrive() {
    let body = [member(b"first"), member(b""), long_header(0), member(b"second")[10..].to_vec()];
    let mut decoder = decoder();
    let mut out = Vec::new();
    for byte in body.concat() {
        out.extend(decode(&mut decoder, &[byte]).unwrap());
    }
    assert_eq!(out, b"firstsecond");
    assert!(decoder.is_between_members());
}

fn changed_checksum() -> Vec<u8> {
    let mut header = long_header(1);
    *header.last_mut().unwrap() ^= 1;
    header
}

#[test]
fn invalid_members_have_a_reason() {
    let whole = member(b"data of a member");
    let changed = |at: usize, byte: u8| {
        let mut body = whole.clone();
        let at = if at < 100 { at } else { whole.len() + at - 200 };
        body[at] = byte;
        body
    };
    for (body, reason) in [
        (b"{\"type\":\"ADDED\"}".to_vec(), "bytes that are no gzip member"),
        ([&whole[..], b"\0"].concat(), "bytes that are no gzip member"),
        ([&whole[..], b"{}"].concat(), "bytes that are no gzip member"),
        (changed(1, 0), "bytes that are no gzip member"),
        (changed(2, 7), "a gzip member that is not deflated"),
        (changed(3, 0x20), "a gzip member with unknown flags"),
        (changed(10, 0xff), "the data of a gzip member is corrupt"),
        (changed(199, !whole[whole.len() - 1]), "the checksum of a gzip member is wrong"),
        (changed(192, !whole[whole.len() - 8]), "the checksum of a gzip member is wrong"),
        (changed_checksum(), "the checksum of a gzip header is wrong"),
        (long_header(5000), "a gzip member with a long header"),
    ] {
        assert_eq!(decode_whole(&body), Err(GzipError::Invalid(reason)), "{body:x?}");
    }
}

#[test]
fn truncated_member_is_no_end() {
    let body = member(b"data of a member");
    for len in 1..body.len() {
        let mut decoder = decoder();
        decode(&mut decoder, &body[..len]).unwrap();
        assert!(!decoder.is_between_members(), "{len}");
    }
}

#[test]
fn bomb_is_refused_before_it_is_inflated() {
    let zeros = member(&vec![0; 40 << 20]);
    let many = member(&vec![0; 1 << 20]).repeat(40);
    for body in [zeros, many] {
        let mut decoder = decoder();
        decoder.push(body.into());
        let mut inflated = 0;
        let error = loop {
            match decoder.next_piece() {
                Ok(piece) => inflated += piece.expect("the bomb was accepted").len(),
                Err(error) => break error,
            }
        };
        assert_eq!(error, GzipError::Ratio);
        assert_eq!(inflated, 32 << 20);
    }
}

/// Objects of repeated text have a high ratio. So few of them are no bomb.
#[test]
fn large_objects_of_repeated_text_are_accepted() {
    let body = member(&vec![b'a'; 8 << 20]);
    assert_eq!(decode_whole(&body).unwrap().len(), 8 << 20);
}

/// A client that takes one piece and then stalls holds the state, too.
#[test]
fn state_is_charged_between_two_pieces_of_a_chunk() {
    let budget = ByteBudget::new(MemoryKind::WatchFrames, 3 * STATE);
    let memory = MemoryBudget::new(100 << 20);
    let mut decoder = GzipDecoder::new(budget.account(&memory.source(1), ClientRank::Identity));
    decoder.push(member(&vec![7; 3 * PIECE]).into());
    decoder.next_piece().unwrap().unwrap();
    assert_eq!(budget.held(), STATE);
    while decoder.next_piece().unwrap().is_some() {}
    assert_eq!(budget.held(), 0);
}

#[test]
fn state_is_charged_while_a_member_is_incomplete() {
    let memory = MemoryBudget::new(100 << 20);
    let budget = ByteBudget::new(MemoryKind::WatchFrames, 3 * STATE);
    let account = || budget.account(&memory.source(1), ClientRank::Identity);
    let body = member(b"an event");
    let mut one = GzipDecoder::new(account());
    decode(&mut one, &body).unwrap();
    assert_eq!(budget.held(), 0);
    decode(&mut one, &body[..5]).unwrap();
    assert_eq!(budget.held(), 0, "a header needs no state");
    decode(&mut one, &body[5..15]).unwrap();
    assert_eq!(budget.held(), STATE);
    let mut others: Vec<_> = (0..3).map(|_| GzipDecoder::new(account())).collect();
    let results: Vec<_> = others.iter_mut().map(|other| decode(other, &body[..15])).collect();
    assert_eq!(results[2], Err(GzipError::Memory));
    assert!(results[0].is_ok() && results[1].is_ok());
    drop(others);
    decode(&mut one, &body[15..]).unwrap();
    assert_eq!(budget.held(), 0);
}

#[test]
fn coding_follows_the_header() {
    for (values, coding) in [
        (&[][..], Some(ContentCoding::Identity)),
        (&["gzip"], Some(ContentCoding::Gzip)),
        (&["GZIP"], Some(ContentCoding::Gzip)),
        (&["x-gzip"], Some(ContentCoding::Gzip)),
        (&["identity"], Some(ContentCoding::Identity)),
        (&["zstd"], None),
        (&["gzip, gzip"], None),
        (&["gzip", "gzip"], None),
        (&[""], None),
    ] {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(header::CONTENT_ENCODING, HeaderValue::from_static(value));
        }
        assert_eq!(ContentCoding::of(&headers), coding, "{values:?}");
    }
}

/// What inflating costs beside the figures of `cost_of_an_event_by_encoding`. A third of each event differs from the others.
#[test]
#[ignore = "a measurement: cargo test --release -p jackstay-core -- --ignored --nocapture cost_of_a_compressed"]
fn cost_of_a_compressed_event() {
    const EVENTS: u32 = 2_000;
    for size in [300, 3_000] {
        let event = |n: u32| {
            let hex = |seed: u32, len: usize| -> String {
                let words = (0..).map(|n: u32| (n ^ seed).wrapping_mul(2_654_435_761));
                words
                    .flat_map(|word| format!("{word:08x}").into_bytes())
                    .take(len)
                    .map(char::from)
                    .collect()
            };
            format!("{}{}\n", hex(0, size * 2 / 3), hex(n << 8, size / 3))
        };
        for (kind, batch) in
            [("a member for each event", 1), ("a member for 32 KiB", (32 << 10) / size as u32)]
        {
            let events: Vec<_> = (0..EVENTS).map(event).collect();
            let members =
                events.chunks(batch as usize).map(|batch| member(batch.concat().as_bytes()));
            let body = Bytes::from(members.collect::<Vec<_>>().concat());
            let run = |_| {
                let begun = Instant::now();
                let mut decoder = decoder();
                for at in (0..body.len()).step_by(16 << 10) {
                    decoder.push(body.slice(at..body.len().min(at + (16 << 10))));
                    while decoder.next_piece().unwrap().is_some() {}
                }
                begun.elapsed().as_nanos() / u128::from(EVENTS)
            };
            let cost = (0..100).map(run).min().unwrap_or_default();
            let share = body.len() * 100 / events.concat().len();
            println!("{size} bytes, {kind}: {cost} ns an event, {share} % of the bytes");
        }
    }
}
