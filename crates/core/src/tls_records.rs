//! Finds the ends of TLS records in what a peer sends.
//!
//! A record costs a decryption, however little it carries: rustls accepts records of one byte, and 32 empty ones in a row
//! (`ConnectionCore::process_msg`). So a turn of reading counts records beside bytes.

/// Length of the head of a record, whose last two bytes are the length of the payload (RFC 8446, 5.1).
const HEAD: usize = 5;

/// Splits a stream of bytes at the ends of records. What is no TLS has ends somewhere, too.
#[derive(Debug, Default)]
pub struct RecordScanner {
    head: [u8; HEAD],
    /// Bytes of the head that have been seen.
    in_head: usize,
    /// Bytes of the payload that have not been seen.
    missing: usize,
}

/// The bytes up to an end of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scanned {
    /// Number of bytes.
    pub bytes: usize,
    /// Records that end in them.
    pub records: usize,
}

impl RecordScanner {
    /// Goes on to the end of the `max_records`-th record, or of `bytes`.
    pub fn scan(&mut self, bytes: &[u8], max_records: usize) -> Scanned {
        let (mut at, mut records) = (0, 0);
        while records < max_records && at < bytes.len() {
            if self.in_head < HEAD {
                let part = (HEAD - self.in_head).min(bytes.len() - at);
                self.head[self.in_head..][..part].copy_from_slice(&bytes[at..at + part]);
                self.in_head += part;
                at += part;
                if self.in_head < HEAD {
                    break;
                }
                self.missing = usize::from(u16::from_be_bytes([self.head[3], self.head[4]]));
            }
            let part = self.missing.min(bytes.len() - at);
            self.missing -= part;
            at += part;
            if self.missing == 0 {
                self.in_head = 0;
                records += 1;
            }
        }
        Scanned { bytes: at, records }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(payload: usize) -> Vec<u8> {
        let [high, low] = u16::try_from(payload).unwrap().to_be_bytes();
        [vec![23, 3, 3, high, low], vec![0; payload]].concat()
    }

    #[test]
    fn scan_finds_the_ends_of_records_in_any_pieces() {
        let sizes = [0, 1, 18, 300, 0, 0, 16_401, 2];
        let stream: Vec<u8> = sizes.into_iter().flat_map(record).collect();
        for piece in [1, 2, 5, 7, 4_096, stream.len()] {
            let (mut scanner, mut records) = (RecordScanner::default(), 0);
            for bytes in stream.chunks(piece) {
                let scanned = scanner.scan(bytes, usize::MAX);
                assert_eq!(scanned.bytes, bytes.len());
                records += scanned.records;
            }
            assert_eq!(records, sizes.len(), "{piece}");
        }
    }

    #[test]
    fn scan_stops_at_the_end_of_the_last_permitted_record() {
        let stream = [record(1), record(2), record(3)].concat();
        let mut scanner = RecordScanner::default();
        assert_eq!(scanner.scan(&stream, 2), Scanned { bytes: 6 + 7, records: 2 });
        assert_eq!(scanner.scan(&stream[13..], 2), Scanned { bytes: 8, records: 1 });
        assert_eq!(scanner.scan(&[], 2), Scanned { bytes: 0, records: 0 });
    }
}
