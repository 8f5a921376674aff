//! Output for a reader that may end before the program does, as `head` in a pipe.

use std::fmt;
use std::io::{self, Write as _};
use std::process;

/// Writes to standard output, and ends the process quietly if the reader has gone.
pub fn print(text: fmt::Arguments<'_>) {
    if io::stdout().write_fmt(text).is_err() {
        process::exit(1);
    }
}

/// [`print()`] with a newline.
macro_rules! print_line {
    ($($argument:tt)*) => {
        crate::output::print(format_args!("{}\n", format_args!($($argument)*)))
    };
}
pub(crate) use print_line;
