//! Text tables: columns as wide as their widest cell, and notes below a row.
//!
//! Each character counts as one column: names, addresses and reasons are ASCII. Control characters
//! become spaces, because a reason may quote bytes that a peer has sent.

use std::io;

use crate::cli::options::has_colour;

/// The capabilities of the output.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Style {
    /// Whether to colour with escape sequences.
    pub(super) colour: bool,
    /// Columns of the terminal; `None` if stdout is no terminal.
    pub(super) width: Option<usize>,
}

/// The meaning of a cell, shown as its colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Tone {
    /// Default colour.
    #[default]
    Plain,
    /// Healthy: green.
    Good,
    /// Needs attention: yellow.
    Warn,
    /// Failing: bold red.
    Bad,
    /// Secondary: dim.
    Dim,
    /// A heading: bold.
    Strong,
}

impl Tone {
    /// Its SGR parameters (ECMA-48 section 8.3.117).
    fn code(self) -> Option<&'static str> {
        match self {
            Self::Plain => None,
            Self::Good => Some("32"),
            Self::Warn => Some("33"),
            Self::Bad => Some("1;31"),
            Self::Dim => Some("2"),
            Self::Strong => Some("1"),
        }
    }
}

impl Style {
    /// The capabilities of stdout.
    pub(super) fn of_stdout() -> Self {
        Self { colour: has_colour(), width: terminal_size().map(|(width, _)| width) }
    }

    /// `text` in the colour of `tone`, if colours are on.
    pub(super) fn paint(self, text: &str, tone: Tone) -> String {
        match tone.code() {
            Some(code) if self.colour && !text.is_empty() => format!("\x1b[{code}m{text}\x1b[0m"),
            _ => text.to_owned(),
        }
    }
}

/// Columns and rows of stdout; `None` if it is no terminal.
pub(super) fn terminal_size() -> Option<(usize, usize)> {
    let (width, height) = terminal_size::terminal_size_of(io::stdout())?;
    Some((usize::from(width.0), usize::from(height.0)))
}

/// One cell of a table, or a note below a row.
#[derive(Debug, Clone, Default)]
pub(super) struct Cell {
    text: String,
    tone: Tone,
}

impl Cell {
    /// A cell in the default tone.
    pub(super) fn text(text: impl AsRef<str>) -> Self {
        Self { text: clean(text.as_ref()), tone: Tone::Plain }
    }

    /// Sets the tone.
    pub(super) fn tone(self, tone: Tone) -> Self {
        Self { tone, ..self }
    }
}

/// A table.
#[derive(Debug)]
pub(super) struct Table {
    /// Whether each column is aligned right.
    align_right: Vec<bool>,
    /// The cells of each row, and the notes below it.
    rows: Vec<(Vec<Cell>, Vec<Cell>)>,
}

impl Table {
    /// A table with these column headings. A column whose heading begins with `>` is aligned right.
    pub(super) fn new(headings: &[&str]) -> Self {
        let cell = |heading: &&str| Cell::text(heading.trim_start_matches('>')).tone(Tone::Dim);
        Self {
            align_right: headings.iter().map(|heading| heading.starts_with('>')).collect(),
            rows: vec![(headings.iter().map(cell).collect(), Vec::new())],
        }
    }

    /// Adds a row with a cell for each column, and the notes below it.
    pub(super) fn row(&mut self, cells: Vec<Cell>, notes: Vec<Cell>) {
        self.rows.push((cells, notes));
    }

    /// Appends the lines, indented by two columns, without trailing spaces.
    pub(super) fn draw(&self, style: Style, out: &mut String) {
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|(cells, _)| cells.get(column));
            cells.map(|cell| cell.text.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.align_right.len()).map(width).collect();
        for (cells, notes) in &self.rows {
            let mut line = String::new();
            for (column, cell) in cells.iter().enumerate() {
                let pad = " ".repeat(widths[column] - cell.text.chars().count());
                let text = style.paint(&cell.text, cell.tone);
                line.push_str("  ");
                line.push_str(&if self.align_right[column] { pad + &text } else { text + &pad });
            }
            out.push_str(line.trim_end());
            out.push('\n');
            for note in notes {
                let note_width =
                    style.width.map_or(usize::MAX, |width| width.saturating_sub(6).max(20));
                out.push_str("      ");
                out.push_str(&style.paint(&cut(&note.text, note_width), note.tone));
                out.push('\n');
            }
        }
    }
}

/// Replaces control characters, which could move the cursor or forge a line.
pub(super) fn clean(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// Shortens a line to `width` columns, the last of which is `…` if it was longer. Escape sequences take
/// no column; a shortened line ends with the default colour.
pub(super) fn cut(line: &str, width: usize) -> String {
    // Byte offset of the last column that fits.
    let mut last = 0;
    let mut columns = 0;
    let mut in_escape = false;
    for (offset, c) in line.char_indices() {
        if in_escape || c == '\x1b' {
            in_escape = c != 'm';
            continue;
        }
        columns += 1;
        if columns == width {
            last = offset;
        }
        if columns > width {
            let kept = &line[..last];
            let mark = if width > 0 { "…" } else { "" };
            let reset = if kept.contains('\x1b') { "\x1b[0m" } else { "" };
            return format!("{kept}{mark}{reset}");
        }
    }
    line.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draw_columns_are_as_wide_as_their_widest_cell() {
        let mut table = Table::new(&["NAME", ">N", "WHY"]);
        table.row(vec![Cell::text("a"), Cell::text("100"), Cell::text("")], vec![]);
        let note = Cell::text("two\nlines");
        table.row(vec![Cell::text("longer"), Cell::text("1"), Cell::text("x")], vec![note]);
        let mut out = String::new();
        table.draw(Style::default(), &mut out);
        assert_eq!(out, "  NAME      N  WHY\n  a       100\n  longer    1  x\n      two lines\n");
    }

    #[test]
    fn cut_colours_take_no_column_and_are_reset() {
        let style = Style { colour: true, width: None };
        let text = style.paint("ejected", Tone::Bad);
        assert_eq!(text, "\x1b[1;31mejected\x1b[0m");
        assert_eq!(cut(&text, 7), text);
        assert_eq!(cut(&text, 4), "\x1b[1;31meje…\x1b[0m");
        assert_eq!(cut("plain", 3), "pl…");
        assert_eq!(cut("plain", 0), "");
    }
}
