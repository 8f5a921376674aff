use proptest::prelude::*;

use super::*;
use crate::http2_frames::END_HEADERS;

/// `:path` as a literal with indexing, "/ab" as it is or as a Huffman code. The entry has 40 bytes.
const PATH: &[u8] = &[0x44, 3, b'/', b'a', b'b'];
const CODED_PATH: &[u8] = &[0x44, 0x83, 0x60, 0x71, 0xff];

fn frame(table: &mut HeaderTable, frame_type: u8, flags: u8, payload: &[u8]) {
    table.frame(FrameHeader { length: payload.len() as u32, frame_type, flags, stream: 1 });
    table.payload(payload);
}

/// Sends a block in one frame.
fn block(table: &mut HeaderTable, block: &[u8]) {
    frame(table, frame_type::HEADERS, END_HEADERS, block);
}

/// A field without indexing whose name is that of a constant.
fn field(length: u32) -> Vec<u8> {
    let mut field = vec![0x0f, 0x00];
    string(&mut field, length, false);
    field
}

fn string(block: &mut Vec<u8>, length: u32, is_coded: bool) {
    let rest = length - 127;
    block.extend([if is_coded { 0xff } else { 0x7f }, rest as u8 | 0x80, (rest >> 7) as u8 | 0x80]);
    block.push((rest >> 14) as u8);
    block.extend(vec![b'x'; length as usize]);
}

#[test]
fn entries_of_frames_keep_what_was_received_since_the_last_one() {
    let mut table = HeaderTable::default();
    block(&mut table, &[PATH, &field(16_000)].concat());
    let one = table.kept();
    assert_eq!(one, PATH.len() + field(16_000).len() + HEADER_LENGTH);
    for _ in 1..102 {
        block(&mut table, &[PATH, &field(16_000)].concat());
    }
    assert_eq!(table.kept(), 102 * one, "4,096 bytes have room for 102 entries of 40 bytes");
    block(&mut table, &[PATH, &field(16_000)].concat());
    assert_eq!(table.kept(), 102 * one);
    // DATA is read into the same buffers; an entry keeps at most two.
    (0..3).for_each(|_| frame(&mut table, frame_type::DATA, 0, &[0; 16 << 10]));
    block(&mut table, PATH);
    assert_eq!(table.kept(), 101 * one + READ_BUFFER as usize);
}

#[test]
fn only_values_that_are_not_copied_keep_their_buffer() {
    let name = |name: &[u8], first: u8| [&[first, name.len() as u8], name, b"\x01a"].concat();
    let cases: &[(&[u8], bool)] = &[
        (PATH, true),
        (&[0x41, 1, b'a'], true),
        (&[0x46, 1, b'a'], true),
        (&name(b":protocol", 0x40), true),
        (&[0x40, 0x82, 0xb8, 0xff, 1, b'a'], true), // a coded colon
        (&[0x7e, 1, b'a'], true),                   // the name of an entry
        (&[0x42, 1, b'a'], false),                  // `:method`
        (&[0x5f, 1, b'a'], false),                  // `content-type`
        (&name(b"x-name", 0x40), false),
        (&name(b":protocol", 0x00), false), // without indexing
        (&[0x04, 1, b'a'], false),
        (&[0x14, 1, b'a'], false), // never indexed
        (&[0x84, 0xbe, 0x3f, 0xe1, 0x1f, 0x20], false),
    ];
    for (bytes, keeps) in cases {
        let mut table = HeaderTable::default();
        block(&mut table, bytes);
        assert_eq!(table.kept() > 0, *keeps, "{bytes:x?}");
        // The representation has ended, and another one is found.
        let mut table = HeaderTable::default();
        block(&mut table, &[bytes, PATH].concat());
        assert!(table.kept() > 0, "{bytes:x?}");
    }
}

#[test]
fn last_entry_of_a_frame_keeps_its_buffer_after_the_others_are_evicted() {
    let mut table = HeaderTable::default();
    block(&mut table, &[&field(16_000), PATH, PATH].concat());
    let kept = table.kept();
    // An entry of 4,055 bytes leaves room for one of the two.
    let mut large = vec![0x5f];
    string(&mut large, 4_055 - 32 - 3, false);
    block(&mut table, &large);
    assert_eq!(table.kept(), kept);
    block(&mut table, &large);
    assert_eq!(table.kept(), 0);
}

#[test]
fn entry_larger_than_the_table_evicts_all() {
    let mut table = HeaderTable::default();
    block(&mut table, &[&field(16_000), PATH].concat());
    let mut large = vec![0x44];
    string(&mut large, 5_000, false);
    block(&mut table, &large);
    assert_eq!(table.kept(), 0);
}

#[test]
fn entries_of_huffman_codes_keep_what_was_decoded() {
    let mut table = HeaderTable::default();
    for _ in 0..3 {
        let mut coded = CODED_PATH.to_vec();
        coded.extend([0x0f, 0x00]);
        string(&mut coded, 2_000, true);
        block(&mut table, &coded);
    }
    // A buffer with 4 KiB for the string of 2,000 bytes before each entry but the first.
    assert!((8_192..8_250).contains(&table.kept()), "{}", table.kept());
    // A larger one needs a larger buffer, which stays.
    let mut coded = vec![0x0f, 0x00];
    string(&mut coded, 100_000, true);
    let before = table.kept();
    block(&mut table, &coded);
    assert_eq!(table.kept(), before + 2 * 160_001);
}

#[test]
fn paths_of_usual_requests_keep_little() {
    let mut table = HeaderTable::default();
    for _ in 0..1_000 {
        let mut coded = vec![0x82, 0x87, 0xbe, 0x44, 0xbc];
        coded.extend([b'x'; 60]);
        block(&mut table, &coded);
    }
    assert!(table.kept() < 8 << 10, "{}", table.kept());
}

#[test]
fn entries_of_a_block_in_several_frames_keep_what_h2_collects() {
    let mut table = HeaderTable::default();
    let all = [field(100_000), PATH.to_vec()].concat();
    let (first, rest) = all.split_at(16_384);
    frame(&mut table, frame_type::HEADERS, 0, first);
    let count = rest.chunks(16_384).count();
    for (n, piece) in rest.chunks(16_384).enumerate() {
        let flags = if n + 1 == count { END_HEADERS } else { 0 };
        frame(&mut table, frame_type::CONTINUATION, flags, piece);
    }
    assert_eq!(table.kept(), READ_BUFFER as usize + 2 * all.len());
    // In a frame where no representation continues, nothing is collected.
    let mut table = HeaderTable::default();
    frame(&mut table, frame_type::HEADERS, 0, &field(16_000));
    frame(&mut table, frame_type::CONTINUATION, END_HEADERS, PATH);
    assert!(table.kept() < 17_000, "{}", table.kept());
}

#[test]
fn padding_and_priority_are_no_part_of_the_block() {
    let priority = [0, 0, 0, 5, 16];
    let padded = |lead: &[u8], block: &[u8]| [&[4], lead, block, &[0x44; 4]].concat();
    for (flags, payload) in [
        (PADDED, padded(&[], PATH)),
        (PRIORITY, [&priority, PATH].concat()),
        (PADDED | PRIORITY, padded(&priority, PATH)),
    ] {
        let mut table = HeaderTable::default();
        frame(&mut table, frame_type::HEADERS, END_HEADERS | flags, &payload);
        let kept = table.kept();
        assert!(kept > 0, "{flags}");
        assert!(matches!(table.expected, Expected::Representation), "{flags}");
    }
    // h2 does not decode the block of a stream that depends on itself.
    let mut table = HeaderTable::default();
    let itself = [&[0, 0, 0, 1, 16], PATH].concat();
    frame(&mut table, frame_type::HEADERS, END_HEADERS | PRIORITY, &itself);
    assert_eq!(table.kept(), 0);
}

proptest! {
    #[test]
    fn pieces_of_any_size_give_the_same_table(
        frames in prop::collection::vec(
            (0_u8..11, any::<u8>(), prop::collection::vec(any::<u8>(), 0..200)), 0..30,
        ),
        size in 1_usize..50,
    ) {
        let (mut whole, mut pieces) = (HeaderTable::default(), HeaderTable::default());
        for (frame_type, flags, payload) in frames {
            frame(&mut whole, frame_type, flags, &payload);
            let length = payload.len() as u32;
            pieces.frame(FrameHeader { length, frame_type, flags, stream: 1 });
            payload.chunks(size).for_each(|piece| pieces.payload(piece));
            prop_assert_eq!(format!("{whole:?}"), format!("{pieces:?}"));
            let kept: u64 = whole.entries.iter().map(|(_, kept)| u64::from(*kept)).sum();
            prop_assert_eq!(kept, whole.kept as u64);
        }
    }
}
