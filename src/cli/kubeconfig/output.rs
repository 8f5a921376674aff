//! The files that `jackstay kubeconfig` writes: their paths, the protection of existing files, and the
//! check of the written configuration.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::args::KubeconfigArgs;
use super::report::{KubeconfigReport, ReportedFile};
use crate::cli::check;
use crate::config::{self, ConfigErrors, Overrides, describe_io_error};
use crate::kubeconfig::setup::OutputFile;
use crate::kubeconfig::{KubeconfigFiles, ResolvedContext};
use crate::net::files::{self, PRIVATE};

/// Why the command fails.
pub(super) enum Failure {
    /// The input cannot be used.
    Input(String),
    /// A file cannot be written.
    Write(String),
}

impl From<String> for Failure {
    fn from(error: String) -> Self {
        Self::Input(error)
    }
}

/// The paths of the output.
pub(super) struct Destinations {
    /// The kubeconfig.
    pub(super) kubeconfig: PathBuf,
    /// The configuration of jackstay, if one is to be written.
    pub(super) config: Option<PathBuf>,
    /// Whether kubectl reads this kubeconfig without an option.
    pub(super) is_default_for_kubectl: bool,
}

impl Destinations {
    pub(super) fn new(
        args: &KubeconfigArgs,
        files: &KubeconfigFiles,
        context: &ResolvedContext,
    ) -> Result<Self, String> {
        let absolute = |path: &Path| {
            std::path::absolute(path).map_err(|error| format!("{}: {error}", path.display()))
        };
        let kubeconfig = if args.in_place {
            let file = files.file_of_cluster(&context.cluster).unwrap_or(files.first());
            file.path().to_owned()
        } else {
            match &args.out {
                Some(file) => absolute(file)?,
                None => files.first().path().with_file_name("jackstay.kubeconfig"),
            }
        };
        let config = match (&args.config_out, args.mode) {
            (Some(file), _) => Some(absolute(file)?),
            (None, Some(_)) => Some(directory_beside(&kubeconfig).join("jackstay.yaml")),
            (None, None) => None,
        };
        let is_default_for_kubectl = args.in_place && args.input.is_none();
        Ok(Self { kubeconfig, config, is_default_for_kubectl })
    }
}

/// The directory `jackstay` beside the kubeconfig, or `jackstay.d` if `jackstay` is a file, such as
/// this program.
pub(super) fn directory_beside(kubeconfig: &Path) -> PathBuf {
    let directory = kubeconfig.with_file_name("jackstay");
    let is_file = std::fs::metadata(&directory).is_ok_and(|found| !found.is_dir());
    if is_file || directory == kubeconfig { directory.with_extension("d") } else { directory }
}

/// Fails if a file exists with other content, except with `--force` and for the input of `--in-place`.
pub(super) fn refuse_to_overwrite(
    files: &[&OutputFile],
    args: &KubeconfigArgs,
    destinations: &Destinations,
) -> Result<(), String> {
    if let Some(obstacle) = files.iter().find_map(|file| obstacle(&file.path)) {
        return Err(format!("nothing written: {obstacle}; --out and --config-out set other paths"));
    }
    let differs = |file: &&&OutputFile| {
        let is_input = args.in_place && file.path == destinations.kubeconfig;
        let existing = std::fs::read(&file.path);
        !args.force && !is_input && existing.is_ok_and(|bytes| bytes != file.bytes)
    };
    let differing: Vec<String> =
        files.iter().filter(differs).map(|file| file.path.display().to_string()).collect();
    let subject = match differing.as_slice() {
        [] => return Ok(()),
        [one] => format!("{one} exists"),
        all => format!("{} exist", all.join(", ")),
    };
    let hint = if args.out.is_none() { ", --out writes another kubeconfig" } else { "" };
    Err(format!(
        "nothing written: {subject} with other content; --force replaces existing files{hint}"
    ))
}

/// Why no file can be written at `path`, even with `--force`.
fn obstacle(path: &Path) -> Option<String> {
    if path.is_dir() {
        return Some(format!("{} is a directory", path.display()));
    }
    let nearest = path.ancestors().skip(1).find(|parent| parent.exists())?;
    (!nearest.is_dir()).then(|| {
        let (file, path) = (nearest.display(), path.display());
        format!("{file} is a file, so {path} cannot be written")
    })
}

/// Writes a file unless it has this content already. Returns whether it was written.
fn write_file(file: &OutputFile) -> Result<bool, String> {
    if std::fs::read(&file.path).is_ok_and(|bytes| bytes == file.bytes) {
        return Ok(false);
    }
    let directory = file.path.parent().map_or(Ok(()), std::fs::create_dir_all);
    directory
        .and_then(|()| files::replace(&file.path, &file.bytes, file.mode))
        .map_err(|e| format!("cannot write {}: {}", file.path.display(), describe_io_error(&e)))?;
    Ok(true)
}

/// A kubeconfig with this content.
pub(super) fn kubeconfig_file(path: PathBuf, text: String) -> OutputFile {
    OutputFile { path, bytes: text.into_bytes(), mode: PRIVATE, description: "the kubeconfig" }
}

/// Writes a file unless it has this content already, and reports it.
pub(super) fn write(file: &OutputFile, report: &mut KubeconfigReport) -> Result<(), Failure> {
    let written = write_file(file).map_err(Failure::Write)?;
    let path = file.path.display().to_string();
    report.files.push(ReportedFile { path, description: file.description, written });
    Ok(())
}

/// Checks that jackstay starts with the written configuration.
pub(super) fn check_configuration(file: &Path) -> Result<(), String> {
    let fail = |errors: &ConfigErrors| {
        format!("this configuration cannot run, the kubeconfig is not written:\n{errors}")
    };
    let loaded = config::load(file, [], &Overrides::default()).map_err(|errors| fail(&errors))?;
    let findings = check::check_files(file, &loaded.config, SystemTime::now());
    if findings.errors.is_empty() { Ok(()) } else { Err(fail(&ConfigErrors(findings.errors))) }
}
