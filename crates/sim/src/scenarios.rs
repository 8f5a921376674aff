//! The scenarios that have names. Their promises are those of the table in the README at the top.

mod apiservers;
mod balancers;
mod common;
mod groups;
mod lines;
mod processes;
mod variants;

use crate::scenario::Scenario;

/// All scenarios.
pub fn all() -> impl Iterator<Item = &'static Scenario> {
    let of_apiservers = apiservers::SCENARIOS.iter().chain(groups::SCENARIOS);
    let of_apiservers = of_apiservers.chain(balancers::SCENARIOS);
    let of_apiservers = of_apiservers.chain(lines::SCENARIOS);
    of_apiservers.chain(processes::SCENARIOS).chain(variants::SCENARIOS)
}

/// The scenario of this name.
pub fn by_name(name: &str) -> Option<&'static Scenario> {
    all().find(|scenario| scenario.name == name)
}
