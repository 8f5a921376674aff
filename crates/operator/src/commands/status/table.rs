//! Text tables: columns as wide as their widest cell, unless the table would be wider than its [limit](Style::limit),
//! and notes below a row.
//!
//! Each character counts as one column: names, addresses and reasons are ASCII. Control characters
//! become spaces, because a reason may quote bytes that a peer has sent.

use std::io;

use crate::options::has_colour;

/// The width of the output without a terminal.
const DEFAULT_WIDTH: usize = 160;
/// The width to which a column is shortened at most.
const MIN_SHORTENED: usize = 16;
/// Indentation of a note.
const NOTE_INDENT: usize = 6;

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

    /// The columns that a table may have.
    pub(super) fn limit(self) -> usize {
        self.width.unwrap_or(DEFAULT_WIDTH)
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
        let mut widths: Vec<usize> = (0..self.align_right.len()).map(width).collect();
        self.shorten(&mut widths, style.limit());
        for (cells, notes) in &self.rows {
            let mut line = String::new();
            for (column, cell) in cells.iter().enumerate() {
                let text = cut(&cell.text, widths[column]);
                let pad = " ".repeat(widths[column] - text.chars().count());
                let text = style.paint(&text, cell.tone);
                line.push_str("  ");
                line.push_str(&if self.align_right[column] { pad + &text } else { text + &pad });
            }
            out.push_str(line.trim_end());
            out.push('\n');
            for note in notes {
                let width = style.limit().saturating_sub(NOTE_INDENT).max(MIN_SHORTENED);
                for line in wrapped(&note.text, width) {
                    out.push_str(&" ".repeat(NOTE_INDENT));
                    out.push_str(&style.paint(&cut(&line, width), note.tone));
                    out.push('\n');
                }
            }
        }
    }

    /// Shortens the widest columns of text until the table is no wider than `limit`.
    fn shorten(&self, widths: &mut [usize], limit: usize) {
        let mut excess = widths.iter().map(|width| width + 2).sum::<usize>().saturating_sub(limit);
        while excess > 0 {
            let of_text = widths.iter_mut().zip(&self.align_right).filter(|(_, right)| !**right);
            let Some((widest, _)) = of_text.max_by_key(|(width, _)| **width) else { return };
            if *widest <= MIN_SHORTENED {
                return;
            }
            *widest -= 1;
            excess -= 1;
        }
    }
}

/// The words of `text` in lines of at most `width` columns, unless a word is longer.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    let mut columns = 0;
    for word in text.split(' ') {
        let length = word.chars().count();
        if columns > 0 && columns + 1 + length > width {
            lines.push(String::new());
            columns = 0;
        }
        let Some(line) = lines.last_mut() else { break };
        if columns > 0 {
            line.push(' ');
            columns += 1;
        }
        line.push_str(word);
        columns += length;
    }
    lines
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
    fn draw_shortens_the_widest_columns_and_wraps_notes() {
        let mut table = Table::new(&["NAME", ">N", "WHY", "LAST"]);
        let (why, last) = ("w".repeat(300), "l".repeat(200));
        let note = format!("{}end", "four ".repeat(60));
        let cells = ["10.0.0.1:6443", "7", &why, &last].map(Cell::text);
        table.row(cells.to_vec(), vec![Cell::text(note)]);
        for (width, limit) in [(None, 160), (Some(100), 100)] {
            let mut out = String::new();
            table.draw(Style { colour: false, width }, &mut out);
            assert!(out.lines().all(|line| line.chars().count() <= limit), "{out}");
            let row = out.lines().nth(1).unwrap();
            assert_eq!(row.chars().count(), limit);
            assert!(row.starts_with("  10.0.0.1:6443  7  www") && row.ends_with("l…"), "{row}");
            assert_eq!(out.matches("four").count(), 60);
            assert!(out.ends_with(" end\n"), "{out}");
        }
        // What cannot be shortened stays.
        let mut table = Table::new(&[">N"]);
        table.row(vec![Cell::text("1".repeat(200))], vec![]);
        let mut out = String::new();
        table.draw(Style::default(), &mut out);
        assert_eq!(out.lines().nth(1).unwrap().len(), 202);
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
