//! Numbers with a noun in the right form.

use std::fmt::Display;

/// `1 stream`, `2 streams`, `2 watches`: a number and the regular plural of `one`.
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
    fn counted_uses_plural_except_for_one() {
        let endpoints = |number: u64| counted(number, "endpoint");
        assert_eq!([0, 1, 2].map(endpoints), ["0 endpoints", "1 endpoint", "2 endpoints"]);
        assert_eq!(counted(1_usize, "watch") + &counted(3_usize, "watch"), "1 watch3 watches");
        assert_eq!(counted(2_usize, "address"), "2 addresses");
    }
}
