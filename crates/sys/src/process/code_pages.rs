//! Releases the resident memory of code that runs only at startup, and of the constants that only such code reads.
//!
//! Parsing the command line, the configuration and certificates executes half of the program's code once, and
//! the kernel maps 16 pages around each page that is touched. Such code would be most of the resident memory
//! of an idle process, and its constants another MiB. What is used again is mapped again from the page cache. The
//! page cache itself is not changed; the kernel evicts from it under memory pressure.

use std::fs;
use std::io;

/// Start address and length in bytes.
type Range = (usize, usize);

/// Unmaps the pages of all mapped code and constants, which the kernel maps again as they are used. Returns the size of the
/// mappings in bytes, the maximum that can have been resident.
///
/// # Errors
/// What `madvise(2)` returns. The memory then stays resident.
pub fn release_startup_code() -> io::Result<usize> {
    let mut bytes = 0;
    for (start, length) in unmodified_pages(&fs::read_to_string("/proc/self/smaps")?) {
        // SAFETY: the range is a private, read-only mapping of a file without modified pages. After
        // `MADV_DONTNEED` the kernel maps the same bytes of the file at the next access (madvise(2)),
        // also while other threads execute this code.
        #[allow(unsafe_code)]
        let result =
            unsafe { libc::madvise(start as *mut libc::c_void, length, libc::MADV_DONTNEED) };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        bytes += length;
    }
    Ok(bytes)
}

/// The read-only mappings of files, executable or not, of which no page was modified: `Anonymous` is 0
/// (`proc_pid_smaps(5)`).
fn unmodified_pages(smaps: &str) -> Vec<Range> {
    let mut found = Vec::new();
    let mut current = None;
    for line in smaps.lines() {
        let mut words = line.split_ascii_whitespace();
        let (first, second) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        if let Some((start, end)) = first.split_once('-') {
            let address = |text| usize::from_str_radix(text, 16).ok();
            let range = address(start).zip(address(end)).filter(|(start, end)| start < end);
            let is_file = words.nth(3).is_some_and(|name| name.starts_with('/'));
            current = range.filter(|_| matches!(second, "r-xp" | "r--p") && is_file);
        } else if first == "Anonymous:"
            && let Some((start, end)) = current.take()
            && second == "0"
        {
            found.push((start, end - start));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
55d0a0000000-55d0a0010000 r--p 00000000 fe:00 12 /usr/bin/jackstay
Anonymous:             0 kB
55d0a0010000-55d0a0030000 r-xp 00010000 fe:00 12 /usr/bin/jackstay
Rss:                 128 kB
Anonymous:             0 kB
55d0a0030000-55d0a0040000 rw-p 00030000 fe:00 12 /usr/bin/jackstay
Anonymous:            64 kB
7f0000000000-7f0000001000 r-xp 00000000 00:00 0
Anonymous:             0 kB
7f0000010000-7f0000020000 r-xp 00000000 fe:00 13 /usr/lib/traced.so
Anonymous:             4 kB
7ffd00000000-7ffd00001000 r-xp 00000000 00:00 0 [vdso]
Anonymous:             0 kB
";

    #[test]
    fn unmodified_pages_finds_read_only_file_mappings_without_anonymous_pages() {
        assert_eq!(
            unmodified_pages(SMAPS),
            [(0x55d0_a000_0000, 0x1_0000), (0x55d0_a001_0000, 0x2_0000)]
        );
        assert_eq!(unmodified_pages("nonsense - 1-2\n\nff-00 r-xp 0 0 0 /x\nAnonymous: 0 kB"), []);
    }

    /// `tests/program/cli.rs` measures the effect on the resident memory.
    #[test]
    fn release_startup_code_does_not_disturb_running_code() {
        for _ in 0..3 {
            assert!(release_startup_code().unwrap() > 0);
            assert_eq!(unmodified_pages(SMAPS).len(), 2);
        }
    }
}
