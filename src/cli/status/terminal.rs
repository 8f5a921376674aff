//! What the terminal on stdout can show.

use std::io;

use super::table::Style;
use crate::cli::output::has_colour;

/// Colour and width for tables on stdout.
pub(super) fn style() -> Style {
    Style { colour: has_colour(), width: terminal_size().map(|(width, _)| width) }
}

/// Columns and rows of the terminal that stdout is.
pub(super) fn terminal_size() -> Option<(usize, usize)> {
    let (width, height) = terminal_size::terminal_size_of(io::stdout())?;
    Some((usize::from(width.0), usize::from(height.0)))
}
