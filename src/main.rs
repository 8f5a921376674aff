//! The `jackstay` program. The library contains the implementation.

use std::process::ExitCode;

use jackstay_sys::process::allocator::Allocator;

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

fn main() -> ExitCode {
    jackstay::cli::main()
}
