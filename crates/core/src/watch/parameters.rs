//! Which apiservers may continue a watch whose query or `Accept` has parameters that not every apiserver honours.
//!
//! kube-apiserver ignores a query parameter that it does not know, and one whose feature gate is off. A watch of a shard
//! (`shardSelector`, KEP-5866) that continues on such a server receives the events of all objects, and nothing shows it.
//! It treats the parameters of media ranges in the same way (`acceptMediaTypeOptions` in
//! `endpoints/handlers/negotiation/negotiate.go` collects unrecognized ones and goes on): one that does not know
//! `drop=metadata.managedFields` (KEP-5958) sends whole objects. So a watch continues only on a server that is known to
//! honour the same parameters as the first one:
//!
//! | parameters of the query and of the media ranges | must be equal |
//! |---|---|
//! | those that every supported version honours | nothing |
//! | also `shardSelector` | whether the servers honour it |
//! | also `drop=metadata.managedFields` | whether the servers honour it |
//! | both of these, or an unknown one | build and feature gates |
//!
//! A [`Capability`] of a process of an apiserver is compared. While it is read, the watch waits; if no endpoint can have an
//! equal one, the watch ends.

use crate::endpoint_condition::EndpointCondition;
use crate::endpoint_state::EndpointState;
use crate::pool::EndpointKey;
use crate::request::info::{first_value, pairs};

/// The parameters of a list or watch that every apiserver honours, or refuses with an error (`ListOptions` in
/// apimachinery; `pretty`, `includeObject` and `timeout` in the handlers of kube-apiserver).
const COMMON: [&str; 13] = [
    "allowWatchBookmarks",
    "continue",
    "fieldSelector",
    "includeObject",
    "labelSelector",
    "limit",
    "pretty",
    "resourceVersion",
    "resourceVersionMatch",
    "sendInitialEvents",
    "timeout",
    "timeoutSeconds",
    "watch",
];
/// The parameter of a sharded list or watch (gate `ShardedListAndWatch`, alpha in 1.36).
const SHARD_SELECTOR: &str = "shardSelector";

/// The parameters of media ranges that every supported version honours (`acceptMediaTypeOptions`), and `charset`, which none
/// does.
const MEDIA_RANGE: [&str; 10] =
    ["as", "charset", "export", "g", "pretty", "profile", "q", "stream", "sv", "v"];
/// The parameter of a media range without fields of the objects (gate `ManagedFieldsOptOut`, alpha in 1.38).
const DROP: (&str, &str) = ("drop", "metadata.managedFields");

/// The parameters of a watch, by the apiservers that honour them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Parameters {
    /// Every apiserver.
    #[default]
    Common,
    /// An apiserver that serves shards.
    Sharded,
    /// An apiserver that leaves out `metadata.managedFields`.
    ManagedFields,
    /// At least one is unknown, or there are several of these kinds.
    Unknown,
}

/// What is known about a capability of one process of an apiserver.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Capability {
    /// It has not been read yet.
    #[default]
    Unread,
    /// It cannot be read, for example because the credential of the prober does not permit it.
    Unavailable,
    /// A number that is equal for equal capabilities.
    Known(u64),
}

/// An endpoint that may be asked to continue a watch.
#[derive(Debug, Clone, Copy)]
pub struct Candidate {
    /// The endpoint.
    pub condition: EndpointCondition,
    /// What is known about its process.
    pub capability: Capability,
}

/// Whether an endpoint may be asked now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    /// At least one may, except those of [`unequal`].
    Ask,
    /// It is known when a capability has been read.
    Wait,
    /// It is known when a total outage has ended.
    Hold,
    /// No endpoint can continue the watch.
    None,
}

impl Parameters {
    /// The parameters of a query, and of the media ranges in the values of `Accept`.
    pub fn of<'a>(query: &str, accept: impl Iterator<Item = &'a str>) -> Self {
        let ranges = accept.flat_map(|value| value.split(','));
        let parameters = ranges.flat_map(|range| range.split(';').skip(1));
        parameters.map(Self::of_media_range).fold(Self::of_query(query), Self::and)
    }

    fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Common, one) | (one, Self::Common) => one,
            (one, same) if one == same => one,
            _ => Self::Unknown,
        }
    }

    fn of_media_range(parameter: &str) -> Self {
        let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
        let (name, value) = (name.trim(), value.trim());
        if (name, value) == DROP {
            Self::ManagedFields
        } else if name.is_empty() || MEDIA_RANGE.contains(&name) {
            Self::Common
        } else {
            Self::Unknown
        }
    }

    fn of_query(query: &str) -> Self {
        let is_known = |name: &str| name == SHARD_SELECTOR || COMMON.contains(&name);
        if pairs(query).any(|(name, _)| !is_known(&name)) {
            return Self::Unknown;
        }
        let is_sharded = first_value(query, SHARD_SELECTOR).is_some_and(|value| !value.is_empty());
        if is_sharded { Self::Sharded } else { Self::Common }
    }
}

/// The endpoints whose capability is not known to be equal to that of the process that served the watch `first`.
pub fn unequal(first: Capability, candidates: &[Candidate]) -> Vec<EndpointKey> {
    let is_equal =
        |one: &Candidate| matches!(first, Capability::Known(_)) && one.capability == first;
    let unequal = candidates.iter().filter(|one| !is_equal(one));
    unequal.map(|one| one.condition.key).collect()
}

/// The endpoints that cannot continue a watch, whatever is read about the others.
pub fn different(first: Capability, candidates: &[Candidate]) -> Vec<EndpointKey> {
    use Capability::{Known, Unavailable};
    let is_different = |one: &&Candidate| match (first, one.capability) {
        (Unavailable, _) | (_, Unavailable) => true,
        (Known(first), Known(other)) => first != other,
        _ => false,
    };
    candidates.iter().filter(is_different).map(|one| one.condition.key).collect()
}

/// Whether an endpoint may be asked to continue a watch. `is_current`: the process that served it `first` has not ended, so
/// that an unread capability will be read. Endpoints in `excluded` are not asked for another reason.
///
/// In a total outage nothing is known about the servers that will return.
pub fn choose(
    (first, is_current): (Capability, bool),
    candidates: &[Candidate],
    excluded: &[EndpointKey],
    is_outage: bool,
) -> Choice {
    use EndpointState::{Ejected, Leaving, NoH2, Unverified};
    let is_usable = |one: &&Candidate| {
        !matches!(one.condition.state, Unverified | Ejected | NoH2 | Leaving)
            && !excluded.contains(&one.condition.key)
    };
    let has_usable =
        |capability| candidates.iter().filter(is_usable).any(|one| one.capability == capability);
    match first {
        Capability::Known(_) if has_usable(first) => Choice::Ask,
        Capability::Known(_) if is_outage => Choice::Hold,
        Capability::Known(_) if has_usable(Capability::Unread) => Choice::Wait,
        Capability::Unread if is_current => Choice::Wait,
        _ => Choice::None,
    }
}

/// Whether an endpoint is not ready and its capability not read. It is read when `/readyz` was answered, which may take
/// longer than a watch waits at a time.
pub fn has_starting(candidates: &[Candidate]) -> bool {
    use EndpointState::{Connecting, Degraded, Suspect};
    let is_starting = |one: &Candidate| {
        let state = one.condition.state;
        one.capability == Capability::Unread && matches!(state, Connecting | Suspect | Degraded)
    };
    candidates.iter().any(is_starting)
}

#[cfg(test)]
mod tests {
    use super::*;
    use Capability::{Known, Unavailable, Unread};
    use EndpointState::{Connecting, Degraded, Ejected, Ready};

    #[test]
    fn parameters_of_a_query() {
        for (query, expected) in [
            ("", Parameters::Common),
            (
                "watch=1&allowWatchBookmarks=true&&resourceVersion=5&timeoutSeconds=300",
                Parameters::Common,
            ),
            ("watch&pretty&limit=500&label%53elector=a%3Db", Parameters::Common),
            ("%zz=1&watch=1", Parameters::Common),
            ("watch=1&shardSelector=", Parameters::Common),
            (
                "watch=1&shardSelector=shardRange(object.metadata.uid,'0x0','0x8')",
                Parameters::Sharded,
            ),
            ("shard%53elector=x&watch=1", Parameters::Sharded),
            ("watch=1&follow", Parameters::Unknown),
            ("watch=1&ShardSelector=x", Parameters::Unknown),
            ("other=1&shardSelector=x&watch=1", Parameters::Unknown),
            // kube-apiserver drops malformed pairs, and takes the first value.
            ("watch=1&shardSelector=a;b&x=%zz", Parameters::Common),
            ("shardSelector=&shardSelector=x", Parameters::Common),
        ] {
            assert_eq!(Parameters::of(query, [].into_iter()), expected, "{query}");
        }
    }

    #[test]
    fn parameters_of_media_ranges() {
        let shard = "watch=1&shardSelector=x";
        let table = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json; q=0.9";
        let drop = "application/json;drop=metadata.managedFields";
        for (query, accept, expected) in [
            ("", &[""][..], Parameters::Common),
            ("", &["*/*", table], Parameters::Common),
            ("", &["application/json; charset=utf-8;"], Parameters::Common),
            ("", &["application/vnd.kubernetes.protobuf;stream=watch"], Parameters::Common),
            ("", &[drop], Parameters::ManagedFields),
            (
                "",
                &["application/json", "*/*; drop = metadata.managedFields"],
                Parameters::ManagedFields,
            ),
            ("", &[table, drop], Parameters::ManagedFields),
            (shard, &["application/json"], Parameters::Sharded),
            (shard, &[drop], Parameters::Unknown),
            ("follow=1", &[drop], Parameters::Unknown),
            ("", &["application/json;drop=status"], Parameters::Unknown),
            ("", &["application/json;Drop=metadata.managedFields"], Parameters::Unknown),
            ("", &["application/json;keep=metadata"], Parameters::Unknown),
            ("", &["application/json;terse"], Parameters::Unknown),
        ] {
            assert_eq!(Parameters::of(query, accept.iter().copied()), expected, "{accept:?}");
        }
    }

    fn candidates(states: &[(EndpointState, Capability)]) -> Vec<Candidate> {
        let candidate = |(index, &(state, capability)): (usize, &(EndpointState, Capability))| {
            let key = EndpointKey(index);
            let condition =
                EndpointCondition { key, state, probe_fails: false, is_starting: false };
            Candidate { condition, capability }
        };
        states.iter().enumerate().map(candidate).collect()
    }

    fn keys(numbers: &[usize]) -> Vec<EndpointKey> {
        numbers.iter().copied().map(EndpointKey).collect()
    }

    #[test]
    fn watch_continues_only_on_equal_servers() {
        let known = (Known(1), false);
        for (first, states, expected, left) in [
            (known, &[(Ready, Known(1)), (Ready, Known(1))][..], Choice::Ask, &[0, 1][..]),
            (known, &[(Ready, Known(1)), (Ready, Known(0))], Choice::Ask, &[0]),
            (known, &[(Ready, Unread), (Connecting, Known(1))], Choice::Ask, &[1]),
            (known, &[(Ready, Unavailable), (Degraded, Known(1))], Choice::Ask, &[1]),
            (known, &[(Ejected, Known(1)), (Ready, Known(0))], Choice::None, &[0]),
            (known, &[(Ejected, Unread), (Ready, Known(0))], Choice::None, &[]),
            (known, &[(Ready, Unread), (Ready, Known(0))], Choice::Wait, &[]),
            (known, &[(Connecting, Unread)], Choice::Wait, &[]),
            (known, &[(Ready, Unavailable)], Choice::None, &[]),
            (known, &[], Choice::None, &[]),
            ((Unread, true), &[(Ready, Known(1))], Choice::Wait, &[]),
            ((Unread, false), &[(Ready, Known(1))], Choice::None, &[]),
            ((Unread, false), &[(Ready, Unread)], Choice::None, &[]),
            ((Unavailable, true), &[(Ready, Unavailable)], Choice::None, &[]),
        ] {
            let candidates = candidates(states);
            assert_eq!(choose(first, &candidates, &[], false), expected, "{first:?} {states:?}");
            let mut equal = keys(&(0..states.len()).collect::<Vec<_>>());
            equal.retain(|key| !unequal(first.0, &candidates).contains(key));
            assert_eq!(equal, keys(left), "{first:?} {states:?}");
        }
    }

    #[test]
    fn unread_capability_may_be_equal() {
        let states =
            [(Ready, Known(1)), (Ejected, Unread), (Ready, Known(0)), (Ready, Unavailable)];
        assert_eq!(different(Known(1), &candidates(&states)), keys(&[2, 3]));
        assert_eq!(different(Unread, &candidates(&states)), keys(&[3]));
    }

    #[test]
    fn endpoint_starts_until_it_is_ready_or_ejected_or_its_capability_is_read() {
        for (state, capability, expected) in [
            (Connecting, Unread, true),
            (EndpointState::Suspect, Unread, true),
            (Degraded, Unread, true),
            (Ready, Unread, false),
            (Ejected, Unread, false),
            (EndpointState::Leaving, Unread, false),
            (Connecting, Known(0), false),
            (Degraded, Unavailable, false),
        ] {
            let all = candidates(&[(Ready, Known(1)), (state, capability)]);
            assert_eq!(has_starting(&all), expected, "{state:?} {capability:?}");
        }
    }

    #[test]
    fn excluded_endpoints_do_not_count() {
        let two = candidates(&[(Ready, Known(1)), (Ready, Known(0))]);
        assert_eq!(choose((Known(1), false), &two, &[EndpointKey(0)], false), Choice::None);
        let unread = candidates(&[(Ready, Unread), (Ready, Known(0))]);
        assert_eq!(choose((Known(1), false), &unread, &[EndpointKey(0)], false), Choice::None);
    }

    #[test]
    fn watch_is_held_in_an_outage_if_it_can_continue_at_all() {
        let down = candidates(&[(Ejected, Unread), (Ejected, Known(1)), (Ejected, Known(0))]);
        assert_eq!(choose((Known(1), false), &down, &[], true), Choice::Hold);
        assert_eq!(choose((Unavailable, false), &down, &[], true), Choice::None);
        let one = candidates(&[(Connecting, Known(1)), (Ejected, Unread)]);
        assert_eq!(choose((Known(1), false), &one, &[], true), Choice::Ask);
    }
}
