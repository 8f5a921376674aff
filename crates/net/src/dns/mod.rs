//! Looks names up in `/etc/hosts`, and then at the name servers of `/etc/resolv.conf`, as the resolvers of the C
//! library and of Go do.
//!
//! The table in `config/README.md`, which `tests/proxy/discovery/names.rs` checks, compares what the three find. The
//! settings:
//!
//! | | glibc 2.36 | Go | jackstay |
//! |---|---|---|---|
//! | the names of the [search list](jackstay_core::discovery::search_list) | one after another, both families of each | the same | the same; from the second on, four at a time |
//! | name servers | one after another, at most 3; the first answer, also a denial, ends the query | the same | the same |
//! | `options ndots`, `use-vc`, `rotate` | yes | yes | yes |
//! | `options timeout`, `attempts` | up to 30 s, up to 5 | yes | 1 to 2 s, 2 to 5 |
//! | `options single-request`, `single-request-reopen` | one socket, one query at a time | `single-request` | not needed: each query has a socket |
//! | `options no-aaaa` | no query for AAAA | ignored | no query for AAAA |
//! | `RES_OPTIONS`, `LOCALDOMAIN` | yes | ignored | ignored |
//!
//! While a name server fails, the search may end at a later name than usual, which belongs to another host. So
//! [`Found::doubt`] says that a name before it may have addresses, and [`Found::name`] which one was found.
//!
//! Sources: glibc `resolv/res_query.c`, `resolv/res_send.c`, `resolv/nss_dns/dns-host.c`; Go `net/dnsclient_unix.go`,
//! `net/dnsconfig_unix.go`.

mod lookup;
mod lookup_error;
mod settings;

pub use self::lookup::{Found, OTHER_FAMILY, TTL_MAX, TTL_MIN, look_up};
pub use self::lookup_error::{LookupError, QUERY_LIMIT};
pub use self::settings::{ResolverFiles, ResolverSettings, in_hosts_file};

#[cfg(test)]
mod tests;
