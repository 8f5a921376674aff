//! Counts the live allocations of the process. Every task, connection and socket allocates memory, so a leak of any of
//! them is counted.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicIsize, Ordering::Relaxed};

struct CountingAllocator;

pub static ALLOCATIONS: AtomicIsize = AtomicIsize::new(0);
pub static BYTES: AtomicIsize = AtomicIsize::new(0);
pub static TASKS: AtomicIsize = AtomicIsize::new(0);

/// 1 for a task of tokio, else 0: nothing else in this process is aligned to two cache lines.
fn task_count(layout: Layout) -> isize {
    isize::from(layout.align() == 128)
}

// SAFETY: the system allocator allocates; counting does not allocate.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Relaxed);
        BYTES.fetch_add(layout.size().cast_signed(), Relaxed);
        TASKS.fetch_add(task_count(layout), Relaxed);
        // SAFETY: the caller upholds the same contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        ALLOCATIONS.fetch_sub(1, Relaxed);
        BYTES.fetch_sub(layout.size().cast_signed(), Relaxed);
        TASKS.fetch_sub(task_count(layout), Relaxed);
        // SAFETY: the caller upholds the same contract.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;
