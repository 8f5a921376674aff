//! Which endpoints an upstream has: [`merge`] joins what the sources offer, [`debounce`] decides when a change is applied.

pub mod address;
pub mod debounce;
pub mod merge;
pub mod own_addresses;
pub mod search_list;
pub mod source;
