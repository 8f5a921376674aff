//! Draws the load of a fleet as SVG: connects and lists a second, and watches, for each apiserver.

use std::fmt::Write;

use crate::fleet::{Load, Second};

const WIDTH: usize = 760;
const LEFT: usize = 60;
const PANEL: usize = 120;
const GAP: usize = 46;
const TOP: usize = 64;
/// Points of a line at most; each is the largest value of its seconds.
const POINTS: usize = 160;
/// Colours that are readable on white and on black, and distinct for the colour-blind (Okabe and Ito).
const COLOURS: [&str; 3] = ["#0072b2", "#d55e00", "#009e73"];

type Series = fn(&Second) -> &Vec<u64>;

/// The SVG of a run from `before` seconds before the fault on, which begins at the second `fault`.
pub fn draw(title: &str, load: &Load, before: usize, fault: usize) -> String {
    let seconds = &load.seconds[fault - before..];
    let panels: [(&str, Series); 3] = [
        ("connects a second", |second| &second.connects),
        ("LISTs a second", |second| &second.lists),
        ("watches", |second| &second.watches),
    ];
    let height = TOP + panels.len() * (PANEL + GAP);
    let mut svg = String::new();
    let _ = write!(
        svg,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<style>text{{fill:#777}}.a{{stroke:#888;fill:none}}.l{{fill:none;stroke-width:1.5}}</style>\n\
         <text x=\"{LEFT}\" y=\"20\" font-size=\"14\">{title}</text>\n"
    );
    for (at, colour) in COLOURS.iter().enumerate() {
        let x = LEFT + at * 120;
        let _ = writeln!(
            svg,
            "<rect x=\"{x}\" y=\"31\" width=\"16\" height=\"4\" fill=\"{colour}\"/><text x=\"{}\" y=\"38\">apiserver \
             {at}</text>",
            x + 22
        );
    }
    for (at, (name, series)) in panels.into_iter().enumerate() {
        let top = TOP + at * (PANEL + GAP);
        panel(&mut svg, top, name, seconds, series, before);
    }
    svg.push_str("</svg>\n");
    svg
}

/// Draws one panel. The fault begins `before` seconds after its first second.
fn panel(
    svg: &mut String,
    top: usize,
    name: &str,
    seconds: &[Second],
    series: Series,
    before: usize,
) {
    let bottom = top + PANEL;
    let most = seconds.iter().flat_map(|second| series(second).iter().copied()).max().unwrap_or(0);
    let most = round_up(most.max(2));
    let x = |second: usize| LEFT + second * (WIDTH - LEFT - 20) / seconds.len().max(1);
    let y = |value: u64| bottom - value as usize * PANEL / most as usize;
    let _ = writeln!(
        svg,
        "<text x=\"{LEFT}\" y=\"{}\">{name}</text><path class=\"a\" d=\"M{LEFT} {top}V{bottom}H{}\"/>",
        top - 6,
        WIDTH - 20
    );
    for value in [0, most / 2, most] {
        let at = y(value);
        let _ = writeln!(
            svg,
            "<path class=\"a\" d=\"M{} {at}H{LEFT}\"/><text x=\"{}\" y=\"{}\" text-anchor=\"end\">{value}</text>",
            LEFT - 4,
            LEFT - 8,
            at + 4
        );
    }
    let step = round_up(seconds.len() as u64 / 8) as usize;
    for second in before..seconds.len() {
        let time = second - before;
        if time.is_multiple_of(step) {
            let _ = writeln!(
                svg,
                "<path class=\"a\" d=\"M{0} {bottom}v4\"/><text x=\"{0}\" y=\"{1}\" text-anchor=\"middle\">{time} \
                 s</text>",
                x(second),
                bottom + 17
            );
        }
    }
    let bin = seconds.len().div_ceil(POINTS);
    for (server, colour) in COLOURS.iter().enumerate() {
        let mut path = String::new();
        for (number, bin_of) in seconds.chunks(bin).enumerate() {
            let value = bin_of.iter().map(|second| series(second)[server]).max().unwrap_or(0);
            let _ = write!(path, "{} {},", x(number * bin), y(value));
        }
        let _ = writeln!(
            svg,
            "<polyline class=\"l\" stroke=\"{colour}\" points=\"{}\"/>",
            path.trim_end_matches(',')
        );
    }
}

/// The next of 1, 2, 4, 6, 8, 10, 20, …
fn round_up(value: u64) -> u64 {
    let power = 10_u64.pow(value.max(1).ilog10());
    let of = [1, 2, 4, 6, 8, 10].into_iter().find(|factor| factor * power >= value);
    of.unwrap_or(10) * power
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_up_gives_labels_of_an_axis() {
        for (value, expected) in
            [(0, 1), (1, 1), (3, 4), (11, 20), (400, 400), (401, 600), (9_999, 10_000)]
        {
            assert_eq!(round_up(value), expected, "{value}");
        }
    }
}
