//! Formats a number and its noun, in the singular or plural.

use std::fmt::Display;

/// `1 stream`, `2 streams`, `2 watches`: a number and `singular`, with the ending of a regular plural if
/// the number is not 1.
pub fn quantity<N: Copy + Display + PartialEq + From<u8>>(number: N, singular: &str) -> String {
    let ending = match singular {
        _ if number == N::from(1) => "",
        _ if singular.ends_with("ch") || singular.ends_with('s') => "es",
        _ => "s",
    };
    format!("{number} {singular}{ending}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantity_uses_plural_except_for_one() {
        let endpoints = |number: u64| quantity(number, "endpoint");
        assert_eq!([0, 1, 2].map(endpoints), ["0 endpoints", "1 endpoint", "2 endpoints"]);
        assert_eq!(quantity(1_usize, "watch"), "1 watch");
        assert_eq!(quantity(3_usize, "watch"), "3 watches");
        assert_eq!(quantity(2_usize, "address"), "2 addresses");
    }
}
