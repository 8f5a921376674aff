//! mimalloc by its short way: nearly everything that Rust allocates is aligned as `malloc` aligns
//! it anyway, and need not be asked for by alignment.
//!
//! A request makes some twenty allocations; the general entry of mimalloc costs three times the
//! instructions of its plain one (measured with callgrind, 40 instructions each).

use std::alloc::{GlobalAlloc, Layout};

use libmimalloc_sys::{mi_free, mi_malloc, mi_realloc, mi_zalloc};
use mimalloc::MiMalloc;

/// Largest alignment that plain `mi_malloc` gives to whatever is at least as large as its own
/// alignment (`MI_MAX_ALIGN_SIZE`, `mi_malloc_is_naturally_aligned` in mimalloc's source).
const NATURAL: usize = 16;

/// The allocator of the program.
#[derive(Debug, Clone, Copy)]
pub struct Allocator;

fn is_natural(align: usize, size: usize) -> bool {
    align <= NATURAL && align <= size
}

// SAFETY: each method keeps the contract of `GlobalAlloc` by passing its arguments on to mimalloc,
// whose functions return memory of that size or null, and free whatever any of them returned. The
// plain ones are called only where they align as asked (see `NATURAL`).
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for Allocator {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if is_natural(layout.align(), layout.size()) {
            // SAFETY: `mi_malloc` takes any size.
            unsafe { mi_malloc(layout.size()).cast() }
        } else {
            // SAFETY: the caller's promise, passed on.
            unsafe { MiMalloc.alloc(layout) }
        }
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if is_natural(layout.align(), layout.size()) {
            // SAFETY: `mi_zalloc` takes any size.
            unsafe { mi_zalloc(layout.size()).cast() }
        } else {
            // SAFETY: the caller's promise, passed on.
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
        if is_natural(layout.align(), size) {
            // SAFETY: the caller promises that `memory` came from this allocator; what it becomes
            // is as aligned as what `mi_malloc` returns.
            unsafe { mi_realloc(memory.cast(), size).cast() }
        } else {
            // SAFETY: the caller's promise, passed on.
            unsafe { MiMalloc.realloc(memory, layout, size) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every size and alignment that a program may ask for, each way in.
    #[test]
    #[allow(unsafe_code)]
    fn everything_is_aligned_as_asked() {
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
}
