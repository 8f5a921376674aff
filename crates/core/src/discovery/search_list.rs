//! The names by which the name servers are asked for a host: the search list of resolv.conf(5).
//!
//! The order is that of glibc (`resolv/res_query.c`, `__res_context_search`) and of Go (`net/dnsclient_unix.go`,
//! `nameList`). Each name is asked for both families before the next one, and the first that has an address of either
//! family ends the search.

use super::address::is_dns_name;

/// Largest value of the option `ndots` (glibc, `RES_MAXNDOTS`; Go has the same).
pub const MAX_NDOTS: usize = 15;

/// The search list of a host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SearchList {
    /// The domains of the last line `search` or `domain`, with or without a final dot.
    pub domains: Vec<String>,
    /// A name with at least so many dots is asked for as it is first, and then with the domains.
    pub ndots: usize,
}

impl SearchList {
    /// The fully qualified names for `host`, each with its final dot, in the order in which they are asked for. A host
    /// with a final dot is fully qualified. Names that are too long, and those of the root domain (`search .`), are left
    /// out, as are repeated ones.
    pub fn names(&self, host: &str) -> Vec<String> {
        if host.ends_with('.') {
            return vec![host.to_owned()];
        }
        let with_domains = self.domains.iter().map(|domain| domain.trim_end_matches('.'));
        let with_domains = with_domains.filter(|domain| !domain.is_empty());
        let mut names: Vec<String> = with_domains
            .map(|domain| format!("{host}.{domain}"))
            .filter(|name| is_dns_name(name))
            .map(|name| name + ".")
            .collect();
        let as_it_is = format!("{host}.");
        let is_first = host.matches('.').count() >= self.ndots.min(MAX_NDOTS);
        names.insert(if is_first { 0 } else { names.len() }, as_it_is);
        let mut seen = Vec::new();
        names.retain(|name| {
            !seen.contains(name) && {
                seen.push(name.clone());
                true
            }
        });
        names
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_glibc_and_go() {
        let long = "l".repeat(63);
        let long = format!("{long}.{long}.{long}");
        for (host, ndots, domains, expected) in [
            // Without a search list.
            ("api.example.com", 1, &[][..], &["api.example.com."][..]),
            ("api", 1, &[], &["api."]),
            // A final dot.
            ("api.example.com.", 5, &["corp.example"], &["api.example.com."]),
            ("api.", 1, &["corp.example"], &["api."]),
            // Enough dots: as it is first.
            (
                "api.example.com",
                1,
                &["a.test", "b.test"],
                &["api.example.com.", "api.example.com.a.test.", "api.example.com.b.test."],
            ),
            ("api.example.com", 2, &["a.test"], &["api.example.com.", "api.example.com.a.test."]),
            // Too few dots: as it is last.
            ("api", 1, &["a.test", "b.test."], &["api.a.test.", "api.b.test.", "api."]),
            ("api.example.com", 5, &["a.test"], &["api.example.com.a.test.", "api.example.com."]),
            ("api", 0, &["a.test"], &["api.", "api.a.test."]),
            // The root domain, and names twice.
            ("api", 1, &["."], &["api."]),
            ("api", 1, &["a.test", "a.test."], &["api.a.test.", "api."]),
            // A domain that makes no name.
            ("api", 1, &["-x.test", "a..b", "a.test"], &["api.a.test.", "api."]),
            ("api", 1, &[&long, "a.test"], &[&format!("api.{long}."), "api.a.test.", "api."]),
            (
                "api.of.a.rather.long.name.whose.labels.alone.have.a.length.of.sixty",
                1,
                &[&long],
                &["api.of.a.rather.long.name.whose.labels.alone.have.a.length.of.sixty."],
            ),
            // The largest value of ndots.
            (
                "a.b.c.d.e.f.g.h.i.j.k.l.m.n.o.p",
                99,
                &["a.test"],
                &["a.b.c.d.e.f.g.h.i.j.k.l.m.n.o.p.", "a.b.c.d.e.f.g.h.i.j.k.l.m.n.o.p.a.test."],
            ),
        ] {
            let domains = domains.iter().map(|&domain| domain.to_owned()).collect();
            let list = SearchList { domains, ndots };
            assert_eq!(list.names(host), expected, "{host} {ndots}");
        }
    }
}
