//! `jackstay check`: validates a configuration and the files that it names without running it.

mod files;
#[cfg(test)]
mod tests;

use std::fmt::Write as _;
use std::path::Path;
use std::process::ExitCode;
use std::time::SystemTime;

use clap::Args;
use serde::Serialize;

use crate::options::{ConfigArgs, EXIT_USAGE, OutputArgs, OutputFormat, missing_default_hint};

pub use files::{FileReport, check_draft, check_files};
use jackstay_config::{self as config, ConfigError, Overrides};
use jackstay_core::quantity::quantity;
use jackstay_net::loaded_files::LoadedFiles;

const HELP: &str = "\
Exit codes: 0 valid, 2 errors, or bad usage.

Examples:
  jackstay check
  jackstay check --config jackstay.yaml -o json";

/// Arguments of `jackstay check`.
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub struct CheckArgs {
    #[command(flatten)]
    config: ConfigArgs,
    #[command(flatten)]
    overrides: Overrides,
    #[command(flatten)]
    output: OutputArgs,
}

/// The result in JSON and YAML.
#[derive(Debug, Serialize)]
struct CheckResult {
    file: String,
    ok: bool,
    errors: Vec<ConfigError>,
    /// Settings that are valid but probably a mistake, and certificates that are not valid now.
    warnings: Vec<String>,
    /// Subjects and expiry of certificates, and files that do not exist yet.
    notes: Vec<String>,
    /// Sizes of the configuration; `None` if it has no readable structure.
    counts: Option<Counts>,
}

#[derive(Debug, Serialize)]
struct Counts {
    listeners: usize,
    upstreams: usize,
    endpoints: usize,
}

/// Runs the command.
pub fn run(args: &CheckArgs) -> ExitCode {
    let result = check(&args.config.config, config::environment(), &args.overrides);
    args.output.format.print(&result, || text(&result));
    if args.output.format == OutputFormat::Text {
        for error in &result.errors {
            eprintln!("{error}");
        }
        if !result.ok {
            let (errors, warnings) = (result.errors.len(), result.warnings.len());
            let (errors, warnings) = (quantity(errors, "error"), quantity(warnings, "warning"));
            eprintln!("{}: {errors}, {warnings}", result.file);
        }
        if let Some(hint) = missing_default_hint(&args.config.config) {
            eprintln!("{hint}");
        }
    }
    if result.ok { ExitCode::SUCCESS } else { ExitCode::from(EXIT_USAGE) }
}

fn check(
    file: &Path,
    env: impl IntoIterator<Item = (String, String)>,
    overrides: &Overrides,
) -> CheckResult {
    let draft = config::draft(file, env, overrides);
    let report = check_draft(file, &draft, SystemTime::now(), &mut LoadedFiles::default());
    let errors = [report.errors, report.sources].concat();
    CheckResult {
        file: file.display().to_string(),
        ok: errors.is_empty() && draft.config.is_some(),
        errors,
        warnings: [draft.warnings, report.warnings].concat(),
        notes: [report.passed_checks, report.notes].concat(),
        counts: draft.config.map(|config| Counts {
            listeners: config.listeners.len(),
            upstreams: config.upstreams.len(),
            endpoints: config.upstreams.iter().map(|upstream| upstream.endpoints.len()).sum(),
        }),
    }
}

/// Warnings and notes, and the counts of a valid configuration. Errors go to stderr, with their number.
fn text(result: &CheckResult) -> String {
    let mut out = String::new();
    for warning in &result.warnings {
        let _ = writeln!(out, "warning: {warning}");
    }
    for note in &result.notes {
        let _ = writeln!(out, "note: {note}");
    }
    if let Some(counts) = result.counts.as_ref().filter(|_| result.ok) {
        let warnings = match result.warnings.len() {
            0 => String::new(),
            warnings => format!(", {}", quantity(warnings, "warning")),
        };
        let _ = writeln!(
            out,
            "{}: ok{warnings} ({}, {}, {})",
            result.file,
            quantity(counts.listeners, "listener"),
            quantity(counts.upstreams, "upstream"),
            quantity(counts.endpoints, "endpoint")
        );
    }
    out
}
