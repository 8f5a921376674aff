//! The configuration: its layers, its schema, and the rules between its values.
//!
//! `load` merges the layers (defaults < file < environment < flags), `schema` reads the merged tree
//! into typed values, and `rules` compares them. All mistakes are reported together, each with its
//! key path. The program gets its settings from the [`Config`] alone.
//!
//! [`api_root`] is where the API of an upstream begins, and [`endpoints_file`] reads the file of endpoints.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::too_many_lines))]
#![warn(clippy::disallowed_methods)]

pub mod api_root;
pub mod endpoints_file;

mod address;
mod destination;
mod errors;
mod heartbeat;
mod layers;
mod listener;
mod load;
mod logging;
mod model;
mod node;
mod report;
mod rules;
mod sandbox;
mod schema;
mod serialize;
mod units;
mod value_error;
mod yaml;

pub use address::collide;
pub use destination::{Destination, DestinationError};
pub use errors::{ConfigError, ConfigErrors, KeyLines, describe_io_error};
pub use heartbeat::HeartbeatResource;
pub use layers::Overrides;
pub use listener::*;
pub use load::{
    ConfigDraft, LoadedConfig, draft, draft_from_flags, environment, load, validate_text,
};
pub use logging::{AccessLog, Level, Log, LogFormat};
pub use model::*;
pub use sandbox::{Sandbox, Seccomp, Switch};
pub use units::{
    OutOfRange, Percent, Quantity, UnitError, format_duration, format_size, parse_duration,
    parse_size,
};
pub use value_error::ValueError;
pub use yaml::describe_yaml_error;
