//! Exit codes beside 0 (success) and 1 (failure at run time).

/// Exit code for bad usage, a bad configuration or an input that cannot be used.
pub(super) const EXIT_USAGE: u8 = 2;
