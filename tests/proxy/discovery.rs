//! Tests of endpoint discovery: which set results, and that no request fails meanwhile.

mod bootstrap;
mod endpoint_set;
mod endpoint_slices;
mod endpoints_file;
mod host_faults;
mod names;
mod preference;
mod readyz_token;
mod stress;
mod traffic;
