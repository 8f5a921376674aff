//! What the user asked for: the schema, the layers it is read from, and every rule it must meet.
//!
//! `model` holds the validated configuration that the rest of the program is built from, `load`
//! merges the layers (defaults < file < environment < flags) and `validate` walks the merged tree
//! so that all errors are reported together, each with its key path. Nothing below this module
//! reads a file or a variable that says how to behave.

mod address;
mod destination;
mod effective;
mod errors;
mod listener;
mod load;
pub mod model;
mod node;
mod rules;
mod units;
mod validate;
mod yaml;

pub use address::collide;
pub use destination::Destination;
pub use effective::effective;
pub use errors::{ConfigError, ConfigErrors};
pub use load::{
    Draft, Loaded, Overrides, draft, draft_from_flags, environment, from_flags, load, validate_text,
};
pub use model::*;
pub use units::{format_duration, format_size, parse_duration, parse_size};
pub use yaml::syntax_error;
