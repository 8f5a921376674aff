//! The global allocator: mimalloc, called through its plain functions wherever they align as required.
//!
//! The plain functions suffice for nearly every allocation. mimalloc's aligned functions take three times the
//! instructions (40 more for each call, measured with callgrind), and a request makes about twenty allocations.

use std::alloc::{GlobalAlloc, Layout};

use libmimalloc_sys::{mi_free, mi_malloc, mi_realloc, mi_zalloc};
use mimalloc::MiMalloc;

use crate::simulation;

/// Largest alignment that `mi_malloc` guarantees, for sizes of at least the alignment: the start of a page
/// and the block sizes from 16 bytes are multiples of it (`MI_MAX_ALIGN_SIZE`, `MI_ALIGN2W` in the source
/// of mimalloc v3).
const MAX_NATURAL_ALIGNMENT: usize = 16;

// Part of mimalloc's stable interface (`mimalloc.h`). The crate declares it only with its feature
// `extended`, which adds a dependency.
#[allow(unsafe_code)]
unsafe extern "C" {
    fn mi_collect(force: bool);
}

/// Which free memory to return to the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Release {
    /// What was freed longer ago than mimalloc's purge delay (1 s), in the pages of the calling thread's heap that
    /// are not full.
    Expired,
    /// All of the calling thread's heap, and all free pages of the process. Only this releases pages whose purge
    /// mimalloc has lost: it takes no lock when it records that a purge is due, so a page that one thread frees
    /// while another one purges may not be recorded (`mi_arena_schedule_purge` and `mi_arenas_try_purge` in its
    /// source).
    All,
}

/// Returns free memory to the kernel.
///
/// mimalloc purges by itself only when a thread frees or fills a page of its heap (64 KiB of blocks of one
/// size), or has taken its slow path 10,000 times (`_mi_page_free`, `_mi_page_abandon` and
/// `_mi_malloc_generic` in its source). A process that is idle after a burst does none of these and
/// would keep the memory of the burst.
///
/// A simulated run keeps its memory, because seconds take it microseconds.
pub fn release_free_memory(release: Release) {
    if simulation::is_running() {
        return;
    }
    // SAFETY: any thread may call it at any time. Blocks in use are left alone.
    #[allow(unsafe_code)]
    unsafe {
        mi_collect(release == Release::All);
    }
}

/// The global allocator of the `jackstay` program.
#[derive(Debug, Clone, Copy)]
pub struct Allocator;

fn is_naturally_aligned(align: usize, size: usize) -> bool {
    align <= MAX_NATURAL_ALIGNMENT && align <= size
}

// SAFETY: each method passes its arguments on to mimalloc, whose functions return null or memory of the
// requested size, and `mi_free` accepts memory of every one of them. The plain functions are called only
// for alignments that they guarantee (`MAX_NATURAL_ALIGNMENT`).
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for Allocator {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if is_naturally_aligned(layout.align(), layout.size()) {
            // SAFETY: `mi_malloc` takes any size.
            unsafe { mi_malloc(layout.size()).cast() }
        } else {
            // SAFETY: the caller upholds the contract of this method, which is the same.
            unsafe { MiMalloc.alloc(layout) }
        }
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if is_naturally_aligned(layout.align(), layout.size()) {
            // SAFETY: `mi_zalloc` takes any size.
            unsafe { mi_zalloc(layout.size()).cast() }
        } else {
            // SAFETY: the caller upholds the contract of this method, which is the same.
            unsafe { MiMalloc.alloc_zeroed(layout) }
        }
    }

    #[inline]
    unsafe fn dealloc(&self, memory: *mut u8, _: Layout) {
        // SAFETY: the caller promises that `memory` came from this allocator.
        unsafe { mi_free(memory.cast()) }
    }

    #[inline]
    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if is_naturally_aligned(layout.align(), size) {
            // SAFETY: the caller promises that `memory` came from this allocator. `mi_realloc` aligns
            // its result as `mi_malloc` does.
            unsafe { mi_realloc(memory.cast(), size).cast() }
        } else {
            // SAFETY: the caller upholds the contract of this method, which is the same.
            unsafe { MiMalloc.realloc(memory, layout, size) }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use jackstay_testkit::wait::until_ok_blocking;

    #[test]
    #[allow(unsafe_code)]
    fn allocations_have_the_requested_alignment() {
        for align in [1, 2, 4, 8, 16, 32, 64, 4096] {
            for size in (1..200).chain([1000, 5000, 70_000, 3 << 20]) {
                let layout = Layout::from_size_align(size, align).unwrap();
                // SAFETY: the layout's size is not zero, each block is freed with its last layout,
                // and only bytes inside of it are touched.
                unsafe {
                    for memory in [Allocator.alloc(layout), Allocator.alloc_zeroed(layout)] {
                        assert!(!memory.is_null() && memory.addr().is_multiple_of(align));
                        memory.write(7);
                        let larger = Allocator.realloc(memory, layout, size * 2 + 1);
                        assert!(!larger.is_null() && larger.addr().is_multiple_of(align));
                        assert_eq!(larger.read(), 7);
                        let layout = Layout::from_size_align(size * 2 + 1, align).unwrap();
                        Allocator.dealloc(larger, layout);
                    }
                }
            }
        }
    }

    /// How many of `blocks` begin on a page that is resident.
    #[allow(unsafe_code)]
    fn count_resident(blocks: &[*mut u8]) -> usize {
        const PAGE: usize = 4096;
        let is_resident = |block: &&*mut u8| {
            let mut state = 0;
            let page = block.map_addr(|address| address & !(PAGE - 1));
            // SAFETY: mincore(2) writes one byte, to `state`, and does not access the page.
            let result = unsafe { libc::mincore(page.cast(), 1, &raw mut state) };
            result == 0 && state & 1 == 1
        };
        blocks.iter().filter(is_resident).count()
    }

    /// Allocates, writes and frees blocks, and returns where they were.
    #[allow(unsafe_code)]
    fn freed_burst() -> Vec<*mut u8> {
        let layout = Layout::from_size_align(1_792, 8).unwrap();
        let burst: Vec<*mut u8> = (0..4_000)
            // SAFETY: the layout's size is not zero, and only the block's own bytes are written.
            .map(|_| unsafe {
                let block = Allocator.alloc(layout);
                assert!(!block.is_null());
                block.write_bytes(7, layout.size());
                block
            })
            .collect();
        assert_eq!(count_resident(&burst), burst.len());
        for &block in &burst {
            // SAFETY: allocated above with the same layout, and freed once.
            unsafe { Allocator.dealloc(block, layout) };
        }
        burst
    }

    /// Releases free memory. An error if more than a tenth of the freed blocks is resident: other tests may reuse
    /// some of the memory.
    fn release_freed_blocks(release: Release, burst: &[*mut u8]) -> Result<(), String> {
        release_free_memory(release);
        let resident = count_resident(burst);
        if resident <= burst.len() / 10 { Ok(()) } else { Err(format!("{resident} are resident")) }
    }

    #[test]
    fn release_free_memory_after_purge_delay_returns_freed_blocks_to_the_kernel() {
        let burst = freed_burst();
        until_ok_blocking(Duration::from_secs(20), "the freed blocks are not resident", || {
            release_freed_blocks(Release::Expired, &burst)
        });
    }

    #[test]
    fn release_of_all_free_memory_does_not_wait_for_the_purge_delay() {
        // Several times, because mimalloc skips a purge while another thread makes one.
        let released = (0..10).any(|_| release_freed_blocks(Release::All, &freed_burst()).is_ok());
        assert!(released);
    }
}
