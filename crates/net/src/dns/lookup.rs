//! One lookup of a name.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::pin::pin;
use std::time::Duration;

use futures_util::future::{Either, select};
use futures_util::stream::{self, StreamExt as _};
use hickory_resolver::TokioResolver;
use hickory_resolver::lookup::Lookup;
use hickory_resolver::net::NetError;
use hickory_resolver::proto::rr::{Name, RecordType};
use jackstay_sys::clock;
use tokio::time::timeout;

use super::lookup_error::{LookupError, QUERY_LIMIT};
use super::settings::ResolverFiles;

/// Bounds of the time between two lookups of a name: a TTL of 0 must not cause a flood of queries,
/// and a TTL of a day must not hide a change for a day.
pub const TTL_MIN: Duration = Duration::from_secs(5);
/// See [`TTL_MIN`].
pub const TTL_MAX: Duration = Duration::from_secs(300);
/// Limit of the query for the second family, once the first one has addresses.
pub const OTHER_FAMILY: Duration = Duration::from_secs(1);
/// Number of names that are asked for at the same time, from the second one of the search list on: each name may take
/// [`QUERY_LIMIT`], and a search list has up to 32 domains in Kubernetes.
const CONCURRENT_NAMES: usize = 4;

/// The addresses of a name.
#[derive(Debug, Clone)]
pub struct Found {
    /// The IPv4 addresses, or why their query failed. Not both families are empty.
    pub v4: Result<Vec<IpAddr>, LookupError>,
    /// The IPv6 addresses, or why their query failed.
    pub v6: Result<Vec<IpAddr>, LookupError>,
    /// The name of the search list that has them; `None` if no name server was asked.
    pub name: Option<String>,
    /// Why it is not known whether a name before it in the search list has addresses.
    pub doubt: Option<LookupError>,
    /// How long the addresses are valid, in [`TTL_MIN`] to [`TTL_MAX`].
    pub ttl: Duration,
    /// These are all addresses of the name, and not a subset of them.
    pub complete: bool,
}

impl Found {
    /// Addresses that no name server has given.
    fn local(v4: Vec<IpAddr>, v6: Vec<IpAddr>) -> Self {
        Self { v4: Ok(v4), v6: Ok(v6), name: None, doubt: None, ttl: TTL_MAX, complete: true }
    }
}

/// Looks up the addresses of both families of `host`.
///
/// # Errors
/// No name of the search list has an address. A failed query counts more than names that do not exist.
pub async fn look_up(host: &str, system: &ResolverFiles) -> Result<Found, LookupError> {
    if host.trim_end_matches('.').ends_with(".localhost") {
        return Ok(Found::local(
            vec![Ipv4Addr::LOCALHOST.into()],
            vec![Ipv6Addr::LOCALHOST.into()],
        ));
    }
    if let Some((v4, v6)) = system.in_hosts_file(host) {
        return Ok(Found::local(v4, v6));
    }
    let settings = system.settings()?;
    let servers = NameServers {
        resolvers: settings.resolvers().map_err(LookupError::Query)?,
        attempts: settings.attempts,
        with_aaaa: settings.with_aaaa,
    };
    let names = settings.search.names(host);
    let ask = |name: String| servers.ask_for(name);
    let mut outcome = Outcome::default();
    let (first, others) = names.split_first().ok_or(LookupError::NoSuchName)?;
    if let Some(found) = outcome.take(ask(first.clone()).await) {
        return Ok(found);
    }
    let answers = stream::iter(others.iter().cloned()).map(ask).buffered(CONCURRENT_NAMES);
    let mut answers = pin!(answers);
    while let Some(answer) = answers.next().await {
        if let Some(found) = outcome.take(answer) {
            return Ok(found);
        }
    }
    Err(outcome.error())
}

/// What the names so far have shown, none of which has an address.
#[derive(Debug, Default)]
struct Outcome {
    failed: Option<LookupError>,
    /// A name exists, and has no address.
    has_name: bool,
}

impl Outcome {
    /// Takes in the answer about the next name; returns its addresses if it has any.
    fn take(&mut self, answer: Found) -> Option<Found> {
        let has_any =
            |family: &Result<Vec<IpAddr>, _>| family.as_ref().is_ok_and(|all| !all.is_empty());
        if has_any(&answer.v4) || has_any(&answer.v6) {
            return Some(Found { doubt: self.failed.take(), ..answer });
        }
        for family in [answer.v4, answer.v6] {
            match family {
                Ok(_) => self.has_name = true,
                Err(LookupError::NoSuchName) => {}
                Err(why) => drop(self.failed.get_or_insert(why)),
            }
        }
        None
    }

    fn error(self) -> LookupError {
        let no_address =
            if self.has_name { LookupError::NoAddress } else { LookupError::NoSuchName };
        self.failed.unwrap_or(no_address)
    }
}

/// The records of one family; none if the name has no address of it.
#[derive(Debug)]
struct Records {
    addresses: Vec<IpAddr>,
    ttl: Duration,
}

type Family = Result<Records, LookupError>;

/// The name servers of one lookup.
struct NameServers {
    /// One for each, in the order in which they are asked.
    resolvers: Vec<TokioResolver>,
    attempts: usize,
    with_aaaa: bool,
}

impl NameServers {
    /// Asks for both families of a fully qualified name at the same time.
    async fn ask_for(&self, name: String) -> Found {
        let (v4, v6) = match Name::from_ascii(&name) {
            Ok(parsed) => self.ask_families(&parsed).await,
            Err(error) => {
                let error = LookupError::InvalidName(error);
                (Err(error.clone()), Err(error))
            }
        };
        let ttl = [&v4, &v6].into_iter().flatten().map(|found| found.ttl).min().unwrap_or(TTL_MAX);
        let (v4, v6) = (v4.map(|found| found.addresses), v6.map(|found| found.addresses));
        // A broken name server may say that the name of an address of the other family does not exist.
        let (v4, v6) = match (v4, v6) {
            (Ok(v4), Err(LookupError::NoSuchName)) => (Ok(v4), Ok(Vec::new())),
            (Err(LookupError::NoSuchName), Ok(v6)) => (Ok(Vec::new()), Ok(v6)),
            both => both,
        };
        let ttl = ttl.clamp(TTL_MIN, TTL_MAX);
        Found { v4, v6, name: Some(name), doubt: None, ttl, complete: false }
    }

    async fn ask_families(&self, name: &Name) -> (Family, Family) {
        let v4 = self.ask_family(name, RecordType::A);
        if !self.with_aaaa {
            return (v4.await, Ok(Records { addresses: Vec::new(), ttl: TTL_MAX }));
        }
        let v6 = self.ask_family(name, RecordType::AAAA);
        match select(pin!(v4), pin!(v6)).await {
            Either::Left((v4, v6)) => {
                let v6 = timeout(other_limit(&v4), v6).await.unwrap_or(Err(LookupError::TimedOut));
                (v4, v6)
            }
            Either::Right((v6, v4)) => {
                let v4 = timeout(other_limit(&v6), v4).await.unwrap_or(Err(LookupError::TimedOut));
                (v4, v6)
            }
        }
    }

    async fn ask_family(&self, name: &Name, kind: RecordType) -> Family {
        let lookup = timeout(QUERY_LIMIT, self.ask_one_after_another(name, kind)).await;
        match lookup.map_err(|_| LookupError::TimedOut)? {
            Ok(lookup) => Ok(Records {
                addresses: lookup
                    .answers()
                    .iter()
                    .filter_map(|record| record.data.ip_addr())
                    .collect(),
                ttl: lookup.valid_until().saturating_duration_since(clock::now()),
            }),
            Err(error) if error.is_nx_domain() => Err(LookupError::NoSuchName),
            Err(error) if error.is_no_records_found() => {
                Ok(Records { addresses: Vec::new(), ttl: TTL_MAX })
            }
            Err(error) => Err(LookupError::Query(error)),
        }
    }

    /// The answer of the first name server that has one. A denial (NXDOMAIN, NODATA) is an answer; after SERVFAIL,
    /// REFUSED or silence the next server is asked (glibc `resolv/res_send.c`, Go `net/dnsclient_unix.go`,
    /// `tryOneName`).
    async fn ask_one_after_another(
        &self,
        name: &Name,
        kind: RecordType,
    ) -> Result<Lookup, NetError> {
        let mut failed = NetError::NoConnections;
        for _ in 0..self.attempts {
            for resolver in &self.resolvers {
                match resolver.lookup(name.clone(), kind).await {
                    Err(error) if !error.is_no_records_found() => failed = error,
                    answer => return answer,
                }
            }
        }
        Err(failed)
    }
}

/// How long the query of the other family may still take.
fn other_limit(first: &Family) -> Duration {
    let has_any = first.as_ref().is_ok_and(|found| !found.addresses.is_empty());
    if has_any { OTHER_FAMILY } else { QUERY_LIMIT }
}
