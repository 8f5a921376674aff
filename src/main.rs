//! The `jackstay` command; see the library for how it is made.

use std::process::ExitCode;

use jackstay::net::process::allocator::Allocator;

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

fn main() -> ExitCode {
    jackstay::cli::main()
}
