//! Rule for versions of apiservers that are too far apart.

use super::finding::{Cause, Finding, problem};
use crate::doctor::observations::Observations;

/// Versions of apiservers further apart than one minor version, which the version skew policy of Kubernetes does not
/// support (kubernetes.io/releases/version-skew-policy).
pub(super) fn version_skew(observations: &Observations) -> Option<Finding> {
    let known = || observations.endpoints.iter().filter_map(|e| Some((e, e.version.as_ref()?)));
    let oldest = known().min_by_key(|(_, version)| version.minor)?;
    let newest = known().max_by_key(|(_, version)| version.minor)?;
    if oldest.1.minor.distance(newest.1.minor).is_some_and(|distance| distance <= 1) {
        return None;
    }
    let finding = problem(
        Cause::VersionSkew,
        format!(
            "The versions of {} and {} are more than one minor version apart.",
            oldest.0.address, newest.0.address
        ),
        format!("{} and {} at /version", oldest.1.git_version, newest.1.git_version),
        "Kubernetes supports apiservers one minor version apart: upgrade the older ones, or check that all \
         belong to one cluster.",
    );
    Some(Finding { endpoints: vec![oldest.0.address.clone(), newest.0.address.clone()], ..finding })
}
