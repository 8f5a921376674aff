//! Columns of text, as wide as what stands in them, and notes below a row.
//!
//! A character counts as one column: names, addresses and reasons are plain text. Control characters
//! become spaces here, since a reason may quote what a peer has sent.

/// How to draw.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Style {
    /// Whether escape sequences for colours are understood.
    pub(super) colour: bool,
    /// Columns of the terminal; `None`: lines may be as long as they like.
    pub(super) width: Option<usize>,
}

/// What a cell says beside its text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Tone {
    /// Nothing.
    #[default]
    Plain,
    /// All is well.
    Good,
    /// Look at it.
    Warn,
    /// It hurts.
    Bad,
    /// Less important.
    Dim,
    /// A heading.
    Strong,
}

impl Tone {
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
    /// `text` in a colour, if there are any.
    pub(super) fn paint(self, text: &str, tone: Tone) -> String {
        match tone.code() {
            Some(code) if self.colour && !text.is_empty() => format!("\x1b[{code}m{text}\x1b[0m"),
            _ => text.to_owned(),
        }
    }
}

/// One cell.
#[derive(Debug, Clone, Default)]
pub(super) struct Cell {
    text: String,
    tone: Tone,
    right: bool,
}

impl Cell {
    /// Text, to the left.
    pub(super) fn text(text: impl AsRef<str>) -> Self {
        Self { text: clean(text.as_ref()), ..Self::default() }
    }

    /// A number, to the right.
    pub(super) fn number(text: impl AsRef<str>) -> Self {
        Self { right: true, ..Self::text(text) }
    }

    /// The same in a tone.
    pub(super) fn tone(self, tone: Tone) -> Self {
        Self { tone, ..self }
    }
}

/// A table under construction.
#[derive(Debug, Default)]
pub(super) struct Grid {
    rows: Vec<(Vec<Cell>, Vec<Cell>)>,
}

impl Grid {
    /// With these headings.
    pub(super) fn new(heads: &[Cell]) -> Self {
        let heads = heads.iter().map(|cell| cell.clone().tone(Tone::Dim)).collect();
        Self { rows: vec![(heads, Vec::new())] }
    }

    /// A row, and lines below it.
    pub(super) fn row(&mut self, cells: Vec<Cell>, notes: Vec<Cell>) {
        self.rows.push((cells, notes));
    }

    /// The lines, indented by two, without trailing spaces.
    pub(super) fn draw(&self, style: Style, out: &mut String) {
        let columns = self.rows.iter().map(|(cells, _)| cells.len()).max().unwrap_or(0);
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|(cells, _)| cells.get(column));
            cells.map(|cell| cell.text.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        for (cells, notes) in &self.rows {
            let mut line = String::new();
            for (column, cell) in cells.iter().enumerate() {
                let pad = " ".repeat(widths[column] - cell.text.chars().count());
                let text = style.paint(&cell.text, cell.tone);
                line.push_str("  ");
                line.push_str(&if cell.right { pad + &text } else { text + &pad });
            }
            out.push_str(line.trim_end());
            out.push('\n');
            for note in notes {
                let room = style.width.map_or(usize::MAX, |width| width.saturating_sub(6).max(20));
                out.push_str("      ");
                out.push_str(&style.paint(&cut(&note.text, room), note.tone));
                out.push('\n');
            }
        }
    }
}

/// Without control characters, which could move the cursor or forge a line.
fn clean(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// At most `width` columns of a line, with `…` where something is missing. Escape sequences take no
/// column, and colours end with the line.
pub(super) fn cut(line: &str, width: usize) -> String {
    let visible = |line: &str| {
        let mut escape = false;
        let counts = |c: char| {
            let shown = !escape && c != '\x1b';
            escape = (escape || c == '\x1b') && c != 'm';
            shown
        };
        line.chars().map(counts).collect::<Vec<bool>>()
    };
    let shown = visible(line);
    if shown.iter().filter(|shown| **shown).count() <= width {
        return line.to_owned();
    }
    let (mut out, mut left) = (String::new(), width.saturating_sub(1));
    let mut coloured = false;
    for (c, shown) in line.chars().zip(shown) {
        if shown {
            if left == 0 {
                break;
            }
            left -= 1;
        } else {
            coloured = true;
        }
        out.push(c);
    }
    if width > 0 {
        out.push('…');
    }
    if coloured {
        out.push_str("\x1b[0m");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_what_stands_in_them() {
        let mut grid = Grid::new(&[Cell::text("NAME"), Cell::number("N"), Cell::text("WHY")]);
        grid.row(vec![Cell::text("a"), Cell::number("100"), Cell::text("")], vec![]);
        let note = Cell::text("over\nthere");
        grid.row(vec![Cell::text("longer"), Cell::number("1"), Cell::text("x")], vec![note]);
        let mut out = String::new();
        grid.draw(Style::default(), &mut out);
        assert_eq!(out, "  NAME      N  WHY\n  a       100\n  longer    1  x\n      over there\n");
    }

    #[test]
    fn colours_take_no_room_and_end_with_the_line() {
        let style = Style { colour: true, width: None };
        let text = style.paint("ejected", Tone::Bad);
        assert_eq!(text, "\x1b[1;31mejected\x1b[0m");
        assert_eq!(cut(&text, 7), text);
        assert_eq!(cut(&text, 4), "\x1b[1;31meje…\x1b[0m");
        assert_eq!(cut("plain", 3), "pl…");
        assert_eq!(cut("plain", 0), "");
    }
}
