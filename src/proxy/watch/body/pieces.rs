//! The pieces in which the bytes of a watch leave.

use std::cell::RefCell;
use std::collections::VecDeque;

use bytes::Bytes;

use flate2::{Compress, Compression, Crc, FlushCompress};

use crate::proxy::admission::response_reserve::MAX_WATCH_PIECE;

/// The level of kube-apiserver (`responsewriters`, `defaultGzipContentEncodingLevel`).
const LEVEL: Compression = Compression::fast();
/// The header of a gzip member without time, name and system (RFC 1952, section 2.3).
const MEMBER_HEADER: [u8; 10] = [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255];

thread_local!(static DEFLATE: RefCell<Compress> = RefCell::new(Compress::new(LEVEL, false)));

/// Takes what the client receives next: a piece, or `with_gzip` a gzip member with the pieces that wait.
pub(super) fn next_output(out: &mut VecDeque<Bytes>, with_gzip: bool) -> Option<Bytes> {
    if with_gzip { next_member(out) } else { next_piece(out) }
}

/// Compresses the pieces that wait, at most [`MAX_WATCH_PIECE`] bytes, as one member. It ends with them, so that their
/// events do not wait for the next.
fn next_member(out: &mut VecDeque<Bytes>) -> Option<Bytes> {
    let mut data = Vec::from(next_piece(out)?);
    while out.front().is_some_and(|next| data.len() + next.len() <= MAX_WATCH_PIECE)
        && let Some(next) = next_piece(out)
    {
        data.extend_from_slice(&next);
    }
    let mut checksum = Crc::new();
    checksum.update(&data);
    let mut member = Vec::with_capacity(MEMBER_HEADER.len() + data.len() / 2 + 64);
    member.extend(MEMBER_HEADER);
    DEFLATE.with_borrow_mut(|deflate| {
        deflate.reset();
        let consumed = |deflate: &Compress| deflate.total_in() as usize;
        while let Ok(flate2::Status::Ok | flate2::Status::BufError) =
            deflate.compress_vec(&data[consumed(deflate)..], &mut member, FlushCompress::Finish)
        {
            member.reserve(data.len() / 2 + 64);
        }
    });
    member.extend(checksum.sum().to_le_bytes());
    member.extend(checksum.amount().to_le_bytes());
    Some(member.into())
}

/// Takes the next piece for the client. A slice longer than [`MAX_WATCH_PIECE`] leaves in several pieces.
///
/// The queue is freed with its last piece: most watches are idle most of the time, and it would keep 128 bytes.
fn next_piece(out: &mut VecDeque<Bytes>) -> Option<Bytes> {
    match out.front_mut()? {
        front if front.len() > MAX_WATCH_PIECE => Some(front.split_to(MAX_WATCH_PIECE)),
        _ if out.len() == 1 => std::mem::take(out).pop_front(),
        _ => out.pop_front(),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use flate2::read::GzDecoder;

    use super::*;

    #[test]
    fn members_contain_the_pieces_that_wait() {
        let random: Vec<u8> = (0..2 * MAX_WATCH_PIECE + 7)
            .map(|n| (n as u32).wrapping_mul(2_654_435_761).to_be_bytes()[0])
            .collect();
        let pieces = [b"{}\n".to_vec(), b"{\"a\":1}\n".to_vec(), random.clone(), b"{}".to_vec()];
        let mut out: VecDeque<_> = pieces.clone().map(Bytes::from).into();
        let mut members = Vec::new();
        while let Some(member) = next_output(&mut out, true) {
            let mut decoder = GzDecoder::new(&member[..]);
            let mut data = Vec::new();
            decoder.read_to_end(&mut data).unwrap();
            assert!(decoder.into_inner().is_empty(), "one member");
            members.push(data);
        }
        assert_eq!(members.concat(), pieces.concat());
        assert_eq!(members[0], b"{}\n{\"a\":1}\n");
        assert_eq!(members.len(), 4);
    }

    #[test]
    fn next_piece_splits_long_slices_and_frees_the_empty_queue() {
        let lengths = [10, 2 * MAX_WATCH_PIECE + 1, 20];
        let mut out: VecDeque<_> = lengths.map(|len| Bytes::from(vec![0; len])).into();
        let pieces: Vec<_> = std::iter::from_fn(|| next_piece(&mut out)).collect();
        let lengths: Vec<_> = pieces.iter().map(Bytes::len).collect();
        assert_eq!(lengths, [10, MAX_WATCH_PIECE, MAX_WATCH_PIECE, 1, 20]);
        assert_eq!(out.capacity(), 0);
    }
}
