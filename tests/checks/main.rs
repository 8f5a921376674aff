//! Checks without jackstay's data plane: rules of the source tree, error messages of the configuration, reference tables,
//! and fuzz targets.

mod architecture;
mod config;
mod fuzz;
mod reference;
