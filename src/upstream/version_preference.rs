//! Which of several Kubernetes versions a request prefers while the apiservers of an upstream differ, as during an
//! upgrade of the control plane.
//!
//! | request | prefers |
//! |---|---|
//! | of a client whose User-Agent names a version of Kubernetes, with `version_preference: newest` | endpoints at least as new |
//! | another new request, with `canary: N%` | for `N` % of them the newest version, else the older ones |
//! | that continues a watch | endpoints at least as new as every one that has served the watch; with `canary` otherwise the older versions |
//! | any other | none |
//!
//! A preference ranks endpoints of the same state. It never leaves a request without an endpoint: if no other is ready,
//! any version is used. A client may be newer than every apiserver for a moment, but an old apiserver does not know the
//! fields of a new client and drops them.
//!
//! Endpoints of unknown version count as older than every known one. Without two known versions there is no
//! preference.

use std::sync::Arc;

use http::HeaderValue;
use jackstay_config::{Percent, VersionPreference};
use jackstay_core::kubernetes_version::{MinorVersion, of_user_agent};
use jackstay_core::pool::{EndpointKey, VersionSide};

use super::endpoint::{Endpoint, EndpointState};
use super::shared::Upstream;

/// The versions that a request prefers; none by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PreferredVersions {
    at_least: Option<MinorVersion>,
    side: Option<CanarySide>,
}

/// Which versions a request prefers because of the canary. Both hold the newest version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CanarySide {
    Newest(MinorVersion),
    Older(MinorVersion),
}

impl PreferredVersions {
    /// How an endpoint of this version ranks; lower is better.
    pub fn rank(self, version: Option<MinorVersion>) -> u8 {
        let is_too_old = self.at_least.is_some_and(|least| version.is_none_or(|v| v < least));
        let is_other_side = self.side.is_some_and(|side| match side {
            CanarySide::Newest(newest) => version != Some(newest),
            CanarySide::Older(newest) => version.is_some_and(|version| version >= newest),
        });
        u8::from(is_too_old) << 1 | u8::from(is_other_side)
    }

    /// How an endpoint ranks; lower is better. Reads the version only if there is a preference.
    pub fn rank_of(self, endpoint: &Endpoint) -> u8 {
        if self == Self::default() { 0 } else { self.rank(endpoint.minor_version()) }
    }
}

/// The oldest and the newest version of the ready endpoints, if they differ.
fn ready_versions(endpoints: &[Arc<Endpoint>]) -> Option<(MinorVersion, MinorVersion)> {
    let mut range: Option<(MinorVersion, MinorVersion)> = None;
    for endpoint in endpoints.iter().filter(|e| e.state() == EndpointState::Ready) {
        let Some(version) = endpoint.minor_version() else { continue };
        let (oldest, newest) = range.unwrap_or((version, version));
        range = Some((oldest.min(version), newest.max(version)));
    }
    range.filter(|(oldest, newest)| oldest != newest)
}

/// The preference of a new request by the table of this module. `client` is the version of its client, and
/// `takes_newest` asks whether it is one of the canary's share.
fn of_new_request(
    (oldest, newest): (MinorVersion, MinorVersion),
    client: Option<MinorVersion>,
    takes_newest: Option<impl FnOnce() -> bool>,
) -> PreferredVersions {
    let at_least = client.filter(|client| *client > oldest);
    // A client that needs the newest version gets it, and does not count in the share.
    let takes_newest = takes_newest.filter(|_| at_least.is_none_or(|least| least < newest));
    let side = takes_newest.map(|takes_newest| {
        if takes_newest() { CanarySide::Newest(newest) } else { CanarySide::Older(newest) }
    });
    PreferredVersions { at_least, side }
}

/// The preference of a new request with this User-Agent.
pub fn preferred_versions(
    upstream: &Upstream,
    user_agent: Option<&HeaderValue>,
) -> PreferredVersions {
    let (preference, share) = {
        let config = upstream.config();
        (config.version_preference, config.canary)
    };
    if preference == VersionPreference::None && share == Percent::ZERO {
        return PreferredVersions::default();
    }
    let Some(range) = ready_versions(&upstream.endpoints()) else {
        return PreferredVersions::default();
    };
    let takes_newest = (share != Percent::ZERO).then_some(|| upstream.canary.next(share));
    of_new_request(range, client_version(preference, user_agent), takes_newest)
}

/// The preference of a request that continues a watch, which endpoints up to version `served_by` have served.
pub fn preferred_versions_of_resume(
    upstream: &Upstream,
    user_agent: Option<&HeaderValue>,
    served_by: Option<MinorVersion>,
) -> PreferredVersions {
    let (preference, share) = {
        let config = upstream.config();
        (config.version_preference, config.canary)
    };
    let Some(range) = ready_versions(&upstream.endpoints()) else {
        return PreferredVersions::default();
    };
    let least = served_by.max(client_version(preference, user_agent));
    // A watch that loses its old apiserver must not raise the share of the newest version.
    of_new_request(range, least, (share != Percent::ZERO).then_some(|| false))
}

fn client_version(
    preference: VersionPreference,
    user_agent: Option<&HeaderValue>,
) -> Option<MinorVersion> {
    let user_agent = user_agent.filter(|_| preference == VersionPreference::Newest)?;
    of_user_agent(user_agent.as_bytes())
}

/// The endpoints that are older than `served_by`, if a ready endpoint that is not `excluded` is not. A watch must not
/// continue on one of them.
pub fn older_endpoints(
    upstream: &Upstream,
    served_by: Option<MinorVersion>,
    excluded: &[EndpointKey],
) -> Vec<EndpointKey> {
    let Some(served_by) = served_by else { return Vec::new() };
    let endpoints = upstream.endpoints();
    let is_older = |endpoint: &&Arc<Endpoint>| {
        endpoint.minor_version().is_some_and(|version| version < served_by)
    };
    let is_new_enough = |endpoint: &Arc<Endpoint>| {
        endpoint.state() == EndpointState::Ready
            && endpoint.minor_version().is_some_and(|version| version >= served_by)
            && !excluded.contains(&endpoint.key())
    };
    if !endpoints.iter().any(|endpoint| is_older(&endpoint)) || !endpoints.iter().any(is_new_enough)
    {
        return Vec::new();
    }
    endpoints.iter().filter(is_older).map(|endpoint| endpoint.key()).collect()
}

/// Returns on which side of the preference an endpoint is, so that a class that keeps connections to a few can follow
/// it. There is no side without a preference, and for an endpoint that is not ready or of unknown version.
pub fn sides_to_keep(upstream: &Upstream) -> impl Fn(&Endpoint) -> Option<VersionSide> {
    let config = upstream.config();
    let has_preference =
        config.version_preference != VersionPreference::None || config.canary != Percent::ZERO;
    let range = has_preference.then(|| ready_versions(&upstream.endpoints())).flatten();
    move |endpoint| {
        let (_, newest) = range?;
        let version = (endpoint.state() == EndpointState::Ready).then(|| endpoint.minor_version());
        let is_newest = version.flatten()? == newest;
        Some(if is_newest { VersionSide::Newest } else { VersionSide::Older })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(minor: u16) -> MinorVersion {
        MinorVersion::new(1, minor).unwrap()
    }

    /// The versions that a preference ranks best, of 1.35, 1.36, 1.37 and unknown (0).
    fn best(preferred: PreferredVersions) -> Vec<u16> {
        let all = [35, 36, 37, 0];
        let rank = |minor: u16| preferred.rank((minor > 0).then(|| version(minor)));
        let best = all.map(rank).into_iter().min();
        all.into_iter().filter(|minor| Some(rank(*minor)) == best).collect()
    }

    #[test]
    fn new_requests_prefer_versions_by_the_table() {
        let range = (version(35), version(37));
        for (client, takes_newest, expected) in [
            (None, None, vec![35, 36, 37, 0]),
            (Some(34), None, vec![35, 36, 37, 0]),
            (Some(35), None, vec![35, 36, 37, 0]),
            (Some(36), None, vec![36, 37]),
            (Some(37), None, vec![37]),
            // Newer than every apiserver: the preference has no effect.
            (Some(38), None, vec![35, 36, 37, 0]),
            (None, Some(true), vec![37]),
            (None, Some(false), vec![35, 36, 0]),
            (Some(36), Some(true), vec![37]),
            (Some(36), Some(false), vec![36]),
            (Some(37), Some(false), vec![37]),
        ] {
            let takes = takes_newest.map(|takes| move || takes);
            let preferred = of_new_request(range, client.map(version), takes);
            assert_eq!(best(preferred), expected, "{client:?} {takes_newest:?}");
        }
        assert_eq!(best(PreferredVersions::default()), [35, 36, 37, 0]);
    }

    #[test]
    fn client_that_needs_the_newest_version_takes_no_turn_of_the_canary() {
        let mut turns = 0;
        let turn = || {
            turns += 1;
            false
        };
        of_new_request((version(36), version(37)), Some(version(37)), Some(turn));
        assert_eq!(turns, 0);
    }

    #[test]
    fn client_version_counts_only_with_the_preference_for_newest() {
        let agent = HeaderValue::from_static("kubelet/v1.37.0 (linux/amd64) kubernetes/abc");
        let client = |preference| client_version(preference, Some(&agent));
        assert_eq!(client(VersionPreference::Newest), Some(version(37)));
        assert_eq!(client(VersionPreference::None), None);
        assert_eq!(client_version(VersionPreference::Newest, None), None);
    }
}
