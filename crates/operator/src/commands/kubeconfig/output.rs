//! The files that `jackstay kubeconfig` writes: their paths, the protection of existing files, and the check
//! of the configuration before the first file changes.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use jackstay_config::{self as config, ConfigErrors, describe_io_error};
use jackstay_kubeconfig::{KubeconfigFiles, ResolvedContext};
use jackstay_sys::files;
use jackstay_sys::files::{PRIVATE, StagedFile};
use serde_json::Value;

use super::args::KubeconfigArgs;
use super::report::{KubeconfigReport, ReportedFile};
use crate::commands::check;
use crate::kubeconfig::setup::OutputFile;

/// The description of a kubeconfig among the files.
const KUBECONFIG: &str = "the kubeconfig";

/// Why the command fails.
#[derive(Debug)]
pub(in crate::commands) enum Failure {
    /// The input cannot be used.
    Input(String),
    /// A file cannot be written.
    Write(String),
}

impl Failure {
    /// The input cannot be used, for this reason.
    pub(in crate::commands) fn input(why: impl Into<String>) -> Self {
        Self::Input(why.into())
    }
}

/// An error that a command does not handle is one of its input.
impl<E: Error> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::Input(error.to_string())
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
    ) -> Result<Self, Failure> {
        let absolute = |path: &Path| {
            let failed = |error| Failure::Input(format!("{}: {error}", path.display()));
            std::path::absolute(path).map_err(failed)
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
        refuse_descriptor(args, files.first().path())?;
        let config = match (&args.config_out, args.mode) {
            (Some(file), _) => Some(absolute(file)?),
            (None, Some(_)) => Some(directory_beside(&kubeconfig).join("jackstay.yaml")),
            (None, None) => None,
        };
        let is_default_for_kubectl = args.in_place && args.input.is_none();
        Ok(Self { kubeconfig, config, is_default_for_kubectl })
    }
}

/// Fails if the output would replace an input that is no file, or would be beside it.
fn refuse_descriptor(args: &KubeconfigArgs, input: &Path) -> Result<(), Failure> {
    let is_file = std::fs::metadata(input).is_ok_and(|found| found.is_file());
    let is_descriptor = input.starts_with("/dev") || input.starts_with("/proc");
    if args.out.is_some() || is_file && !is_descriptor {
        return Ok(());
    }
    let input = input.display();
    Err(Failure::Input(if args.in_place {
        format!(
            "--in-place: {input} is not a file that can be changed: --out FILE writes another kubeconfig"
        )
    } else {
        format!("{input} is not in a directory of files: --out FILE names the kubeconfig to write")
    }))
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
) -> Result<(), Failure> {
    if let Some(obstacle) = files.iter().find_map(|file| obstacle(&file.path)) {
        let hint = "--out and --config-out set other paths";
        return Err(Failure::Input(format!("nothing written: {obstacle}; {hint}")));
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
    Err(Failure::Input(format!(
        "nothing written: {subject} with other content; --force replaces existing files{hint}"
    )))
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

/// Files whose new content is on the disk under temporary names, so that a full disk or a missing permission is
/// found before the first file changes. Dropping it removes the temporary files and the directories that
/// were created for them.
pub(super) struct StagedOutput<'a> {
    /// The files in the order of the commit; `None` if a file has its content already.
    files: Vec<(&'a OutputFile, Option<StagedFile>)>,
    /// The created directories, each before those in it.
    directories: Vec<PathBuf>,
}

/// Stages files in the order in which they are to be replaced.
pub(super) fn stage<'a>(
    files: impl IntoIterator<Item = &'a OutputFile>,
    args: &KubeconfigArgs,
) -> Result<StagedOutput<'a>, Failure> {
    let mut output = StagedOutput { files: Vec::new(), directories: Vec::new() };
    for file in files {
        let staged = output.stage(file).map_err(|error| {
            let (path, reason) = (file.path.display(), describe_io_error(&error));
            let remedy = remedy(file, args);
            Failure::Write(format!("nothing written: cannot write {path}: {reason}{remedy}"))
        })?;
        output.files.push((file, staged));
    }
    Ok(output)
}

/// What writes the file elsewhere.
fn remedy(file: &OutputFile, args: &KubeconfigArgs) -> &'static str {
    let is_kubeconfig = file.description == KUBECONFIG;
    // `jackstay install` has a state directory and no choice of files.
    let is_fixed = args.revert || args.renew || args.state_dir.is_some();
    match (is_kubeconfig, is_fixed) {
        (_, true) => "",
        (true, false) if args.in_place => {
            "; --out FILE instead of --in-place writes another kubeconfig"
        }
        (true, false) => "; --out FILE writes the kubeconfig elsewhere",
        (false, false) => "; --config-out FILE writes the files of jackstay elsewhere",
    }
}

impl StagedOutput<'_> {
    fn stage(&mut self, file: &OutputFile) -> std::io::Result<Option<StagedFile>> {
        if std::fs::read(&file.path).is_ok_and(|bytes| bytes == file.bytes) {
            return Ok(None);
        }
        let parents = file.path.ancestors().skip(1);
        let missing = parents.take_while(|at| !at.as_os_str().is_empty() && !at.exists());
        let missing: Vec<&Path> = missing.collect();
        for directory in missing.into_iter().rev() {
            files::create_directory(directory)?;
            self.directories.push(directory.to_owned());
        }
        files::stage_update(&file.path, &file.bytes, file.mode).map(Some)
    }

    /// Checks that jackstay starts with the staged configuration and the files that it names.
    pub(super) fn check_configuration(&self, config: &OutputFile) -> Result<(), Failure> {
        let fail = |errors: &ConfigErrors| {
            Failure::Input(format!(
                "nothing written: jackstay cannot run with this configuration:\n{errors}"
            ))
        };
        let text = String::from_utf8_lossy(&config.bytes);
        config::validate_text(&config.path, &text).map_err(|errors| fail(&errors))?;
        // The same configuration with the temporary paths.
        let mut tree: Value = serde_saphyr::from_str(&text)?;
        let staged = self.files.iter().filter_map(|(file, staged)| {
            let path = staged.as_ref()?.temporary_path();
            Some((file.path.display().to_string(), path.display().to_string()))
        });
        let staged: Vec<(String, String)> = staged.collect();
        replace_texts(&mut tree, &staged);
        let loaded = config::validate_text(&config.path, &tree.to_string())
            .map_err(|errors| fail(&errors))?;
        let mut findings = check::check_files(&config.path, &loaded.config, SystemTime::now());
        for error in &mut findings.errors {
            for (path, temporary) in &staged {
                error.message = error.message.replace(temporary, path);
            }
        }
        if findings.errors.is_empty() { Ok(()) } else { Err(fail(&ConfigErrors(findings.errors))) }
    }

    /// Replaces each file, and reports it.
    pub(super) fn commit(mut self, report: &mut KubeconfigReport) -> Result<(), Failure> {
        self.directories.clear();
        for (file, staged) in std::mem::take(&mut self.files) {
            let path = file.path.display().to_string();
            let written = staged.is_some();
            if let Some(staged) = staged {
                staged.commit().map_err(|error| {
                    Failure::Write(format!("cannot write {path}: {}", describe_io_error(&error)))
                })?;
            }
            report.files.push(ReportedFile { path, description: file.description, written });
        }
        Ok(())
    }
}

impl Drop for StagedOutput<'_> {
    fn drop(&mut self) {
        self.files.clear();
        for directory in self.directories.iter().rev() {
            // A directory that another process uses by now is not empty and stays.
            let _ = std::fs::remove_dir(directory);
        }
    }
}

/// Replaces each text of the tree that equals the first of a pair by the second.
fn replace_texts(tree: &mut Value, pairs: &[(String, String)]) {
    match tree {
        Value::String(text) => {
            if let Some((_, to)) = pairs.iter().find(|(from, _)| from == text) {
                text.clone_from(to);
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| replace_texts(item, pairs)),
        Value::Object(map) => map.values_mut().for_each(|value| replace_texts(value, pairs)),
        _ => {}
    }
}

/// A kubeconfig with this content.
pub(super) fn kubeconfig_file(path: PathBuf, text: String) -> OutputFile {
    OutputFile { path, bytes: text.into_bytes(), mode: PRIVATE, description: KUBECONFIG }
}
