//! The pieces in which the bytes of a watch leave.

use std::collections::VecDeque;

use bytes::Bytes;

use crate::proxy::admission::response_reserve::MAX_WATCH_PIECE;

/// Takes the next piece for the client. A slice longer than [`MAX_WATCH_PIECE`] leaves in several pieces.
///
/// The queue is freed with its last piece: most watches are idle most of the time, and it would keep 128 bytes.
pub(super) fn next_piece(out: &mut VecDeque<Bytes>) -> Option<Bytes> {
    match out.front_mut()? {
        front if front.len() > MAX_WATCH_PIECE => Some(front.split_to(MAX_WATCH_PIECE)),
        _ if out.len() == 1 => std::mem::take(out).pop_front(),
        _ => out.pop_front(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
