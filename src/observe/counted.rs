//! Words that people read and that depend on a number.

use std::fmt::Display;

/// `1 stream`, `2 streams`, `2 watches`: regular plurals of what `one` names.
pub fn counted<N: Copy + Display + PartialEq + From<u8>>(number: N, one: &str) -> String {
    let end = match one {
        _ if number == N::from(1) => "",
        _ if one.ends_with("ch") || one.ends_with('s') => "es",
        _ => "s",
    };
    format!("{number} {one}{end}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_not_many() {
        let endpoints = |number: u64| counted(number, "endpoint");
        assert_eq!([0, 1, 2].map(endpoints), ["0 endpoints", "1 endpoint", "2 endpoints"]);
        assert_eq!(counted(1_usize, "watch") + &counted(3_usize, "watch"), "1 watch3 watches");
        assert_eq!(counted(2_usize, "address"), "2 addresses");
    }
}
