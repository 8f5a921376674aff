//! Finds and merges the kubeconfig files of a user, by the rules of kubectl.
//!
//! | source | files | a file that does not exist |
//! |---|---|---|
//! | the command line names a file | that file | is an error |
//! | `$KUBECONFIG` names at least one | its list, separated by colons | is skipped; an error if none exists |
//! | neither | `~/.kube/config` | is an error |
//!
//! Each cluster, user and context, and each other top-level key such as `current-context`, is taken from
//! the first file that contains it. Relative paths in a file are relative to its directory (client-go,
//! `tools/clientcmd/loader.go`).

use std::path::{Path, PathBuf};

use super::context::{ContextError, ResolvedContext};
use super::error::{ContentError, KubeconfigError};
use super::file::{KubeconfigFile, find_cluster};
use crate::model::Kubeconfig;

/// The places that name kubeconfig files: the command line, `$KUBECONFIG` and the home directory.
#[derive(Debug, Clone, Default)]
pub struct KubeconfigPaths {
    command_line: Option<PathBuf>,
    kubeconfig_variable: Option<String>,
    home: Option<PathBuf>,
    /// Whether sudo runs this process.
    is_sudo: bool,
}

impl KubeconfigPaths {
    /// The places for this process. `command_line` is the file that the command line names.
    pub fn from_env(command_line: Option<PathBuf>) -> Self {
        let variable = std::env::var_os("KUBECONFIG");
        Self {
            command_line,
            kubeconfig_variable: variable.map(|value| value.to_string_lossy().into_owned()),
            home: std::env::var_os("HOME").map(PathBuf::from),
            is_sudo: std::env::var_os("SUDO_USER").is_some(),
        }
    }

    /// Each file with its content, which is `None` for one that does not exist.
    ///
    /// # Errors
    /// No place names a file.
    pub fn each(&self) -> Result<Vec<(PathBuf, KubeconfigContent)>, KubeconfigError> {
        let mut paths = self.listed();
        if paths.is_empty() {
            let default = self.home.as_ref().map(|home| home.join(".kube/config"));
            paths.push(self.command_line.clone().or(default).ok_or(KubeconfigError::NoneNamed)?);
        }
        Ok(paths.into_iter().map(|path| (path.clone(), KubeconfigFile::read(&path))).collect())
    }

    /// The list in `$KUBECONFIG`, unless the command line names a file.
    fn listed(&self) -> Vec<PathBuf> {
        match (&self.command_line, &self.kubeconfig_variable) {
            (None, Some(variable)) => {
                variable.split(':').filter(|part| !part.is_empty()).map(PathBuf::from).collect()
            }
            _ => Vec::new(),
        }
    }
}

/// The content of a listed file; `None` if it does not exist.
pub type KubeconfigContent = Result<Option<KubeconfigFile>, KubeconfigError>;

/// The kubeconfig files of a user in the order of precedence; at least one.
#[derive(Debug, Clone)]
pub struct KubeconfigFiles(Vec<KubeconfigFile>);

impl KubeconfigFiles {
    /// Reads the files.
    ///
    /// # Errors
    /// A required file does not exist, or a file cannot be read or parsed.
    pub fn load(paths: &KubeconfigPaths) -> Result<Self, KubeconfigError> {
        let listed = paths.listed();
        if listed.is_empty() {
            let default = paths.home.as_ref().map(|home| home.join(".kube/config"));
            let path = paths.command_line.clone().or(default);
            let path = path.ok_or(KubeconfigError::NoneNamed)?;
            let is_default = paths.command_line.is_none();
            let missing = if is_default && paths.is_sudo {
                KubeconfigError::MissingOfSudo
            } else {
                KubeconfigError::Missing
            };
            let file = KubeconfigFile::read(&path)?.ok_or(missing(path))?;
            return Ok(Self(vec![file]));
        }
        let mut files: Vec<KubeconfigFile> = Vec::new();
        for path in &listed {
            if let Some(file) = KubeconfigFile::read(path)?
                && !files.iter().any(|known| known.path() == file.path())
            {
                files.push(file);
            }
        }
        if files.is_empty() {
            return Err(KubeconfigError::NoneExists(listed));
        }
        Ok(Self(files))
    }

    /// The first file, to which kubectl writes new entries.
    pub fn first(&self) -> &KubeconfigFile {
        &self.0[0]
    }

    /// The files in the order of precedence.
    pub fn iter(&self) -> impl Iterator<Item = &KubeconfigFile> {
        self.0.iter()
    }

    /// Resolves a context of the merged content; `None` is the current context.
    ///
    /// # Errors
    /// An entry is missing or invalid. The error of a value of a wrong type names its file, line and key.
    pub fn resolve(&self, context: Option<&str>) -> Result<ResolvedContext, ResolveError> {
        let merged = self.merged(None).map_err(ResolveError::File)?;
        ResolvedContext::resolve(&merged, context).map_err(|error| match &error {
            ContextError::Broken { list, name } => {
                let mistake = |file: &KubeconfigFile| {
                    let mistake = file.mistake(list, name)?.clone();
                    Some(KubeconfigError::invalid(file.path(), mistake))
                };
                let mistake = self.0.iter().find_map(mistake);
                mistake.map_or(ResolveError::Context(error), ResolveError::File)
            }
            _ => ResolveError::Context(error),
        })
    }

    /// The first file that contains the cluster of that name.
    pub fn file_of_cluster(&self, name: &str) -> Option<&KubeconfigFile> {
        self.0.iter().find(|file| find_cluster(file.config(), name).is_some())
    }

    /// The first file that contains the user of that name.
    pub fn file_of_user(&self, name: &str) -> Option<&KubeconfigFile> {
        self.0.iter().find(|file| file.config().auth_infos.iter().any(|user| user.name == name))
    }

    /// The merged content. Relative paths become absolute, except those in files of `directory`, which
    /// stay valid when the result is written to that directory.
    ///
    /// # Errors
    /// The files have different versions.
    pub fn merged(&self, directory: Option<&Path>) -> Result<Kubeconfig, KubeconfigError> {
        let mut merged = Kubeconfig::default();
        for file in &self.0 {
            let mut config = if directory.is_some() && directory == file.path().parent() {
                file.config().clone()
            } else {
                file.with_absolute_paths()
            };
            // kubectl treats an empty value as absent.
            for value in [&mut config.current_context, &mut config.kind, &mut config.api_version] {
                value.take_if(|text| text.is_empty());
            }
            let versions = (&merged.api_version, &config.api_version);
            if let (Some(first), Some(version)) = versions
                && first != version
            {
                let error = ContentError::OtherVersion(version.clone());
                return Err(KubeconfigError::invalid(file.path(), error));
            }
            merged.merge(config);
        }
        Ok(merged)
    }
}

/// Why a context of the kubeconfig files cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ResolveError {
    /// A file cannot be used.
    #[error("{0}")]
    File(#[source] KubeconfigError),
    /// The context cannot be used.
    #[error("{0}")]
    Context(#[source] ContextError),
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(dir: &Path, name: &str, text: &str) -> PathBuf {
        let path = dir.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, text).unwrap();
        path
    }

    fn load(
        command_line: Option<PathBuf>,
        variable: Option<&str>,
        home: &Path,
    ) -> Result<KubeconfigFiles, KubeconfigError> {
        let kubeconfig_variable = variable.map(ToOwned::to_owned);
        let home = Some(home.to_owned());
        let paths = KubeconfigPaths { command_line, kubeconfig_variable, home, is_sudo: false };
        KubeconfigFiles::load(&paths)
    }

    #[test]
    fn load_prefers_the_command_line_then_the_variable_then_the_home_directory() {
        let dir = tempfile::tempdir().unwrap();
        let home = dir.path();
        let error = load(None, None, home).unwrap_err().to_string();
        assert!(error.ends_with(".kube/config: no such file"), "{error}");
        let default = write(home, ".kube/config", "current-context: default\n");
        let other = write(home, "other", "current-context: other\n");
        let current_context = |file: Option<PathBuf>, variable: Option<&str>| {
            load(file, variable, home).unwrap().merged(None).unwrap().current_context
        };
        assert_eq!(current_context(None, None).as_deref(), Some("default"));
        assert_eq!(current_context(None, Some("")).as_deref(), Some("default"));
        let list = format!("{}/none::{}", home.display(), other.display());
        assert_eq!(current_context(None, Some(&list)).as_deref(), Some("other"));
        assert_eq!(current_context(Some(default), Some(&list)).as_deref(), Some("default"));
        let error = load(None, Some("/none/a:/none/b"), home).unwrap_err();
        assert_eq!(error.to_string(), "$KUBECONFIG: none of /none/a, /none/b exists");
        assert!(load(Some("/none".into()), None, home).is_err());
    }

    #[test]
    fn merged_takes_each_entry_from_the_first_file_and_keeps_paths_valid() {
        let dir = tempfile::tempdir().unwrap();
        let home = dir.path();
        write(
            home,
            "a/config",
            "clusters:\n- name: one\n  cluster: {server: https://a, certificate-authority: ca.crt}\n\
             users:\n- name: u\n  user: {client-certificate: ../u.crt, client-key: /k, \
             exec: {command: ./plugin, args: [x]}, odd: 1}\ncurrent-context: ''\n",
        );
        write(
            home,
            "b/config",
            "clusters:\n- name: one\n  cluster: {server: https://b}\n- name: two\n  cluster: \
             {server: https://b2}\nusers:\n- name: v\n  user: {tokenFile: t, exec: {command: aws}}\n\
             current-context: c\n",
        );
        let list = format!("{0}/a/config:{0}/b/config", home.display());
        let files = load(None, Some(&list), home).unwrap();
        let merged = files.merged(Some(&home.join("a"))).unwrap();
        assert_eq!(merged.current_context.as_deref(), Some("c"));
        let one = find_cluster(&merged, "one").unwrap();
        assert_eq!(one.server.as_deref(), Some("https://a"));
        assert_eq!(one.certificate_authority.as_deref(), Some("ca.crt"));
        assert!(find_cluster(&merged, "two").is_some() && merged.clusters.len() == 2);
        let absolute = |name: &str| home.join(name).display().to_string();
        let user = |config: &Kubeconfig, name: &str| {
            let named = config.auth_infos.iter().find(|named| named.name == name).unwrap();
            named.auth_info.clone().unwrap()
        };
        let v = user(&merged, "v");
        assert_eq!(v.token_file, Some(absolute("b/t")));
        assert_eq!(v.exec.unwrap().command.as_deref(), Some("aws"));
        let u = user(&files.merged(None).unwrap(), "u");
        assert_eq!(u.client_certificate, Some(absolute("a/../u.crt")));
        assert_eq!(u.client_key.as_deref(), Some("/k"));
        assert_eq!(u.exec.unwrap().command, Some(absolute("a/./plugin")));
        assert_eq!(u.other["odd"], 1);
        assert_eq!(files.file_of_cluster("two").unwrap().path(), home.join("b/config"));
    }

    #[test]
    fn merged_treats_an_empty_kind_and_version_as_absent() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "a", "kind: ''\napiVersion: ''\n");
        write(dir.path(), "b", "kind: Config\napiVersion: v1\n");
        let other = write(dir.path(), "c", "kind: Config\napiVersion: v2\n");
        let merged = |files: [&str; 2]| {
            let list = files.map(|name| dir.path().join(name).display().to_string()).join(":");
            load(None, Some(&list), dir.path()).unwrap().merged(None)
        };
        assert_eq!(merged(["a", "b"]).unwrap().api_version.as_deref(), Some("v1"));
        let error = load(Some(other), None, dir.path()).unwrap_err();
        assert!(matches!(error, KubeconfigError::Invalid(_, ContentError::OtherVersion(_))));
    }

    #[test]
    fn load_invalid_file_error_has_line_and_key_path_and_no_secret() {
        let dir = tempfile::tempdir().unwrap();
        let bomb = (1..9).fold("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned(), |text, i| {
            let aliases = vec![format!("*a{}", i - 1); 10].join(", ");
            format!("{text}a{i}: &a{i} [{aliases}]\n")
        });
        for (text, expected) in [
            ("s3cret", "it must be a map of keys"),
            ("kind: Pod\n", "its kind is \"Pod\""),
            ("clusters: []\nusers: s3cret\n", "line 2: users: expected a list"),
            ("users: [{name: a}, {name: a}]\n", "users[1]: the name \"a\" appears twice"),
            ("users:\n- s3cret\n", "line 2: users[0]: expected a map of keys"),
            ("users: [{name: [s3cret]}]\n", "line 1: users[0].name: expected text"),
            ("users: [{name: u, user: {token: s3cret", "not valid YAML"),
            ("a: 1\n\tb: s3cret\n", "line 2: not valid YAML: a tab in the indentation"),
            ("a: *s3cret\n", "a YAML alias (*name) without its anchor"),
            (&bomb, "too many YAML aliases"),
            (&format!("a: {}{}", "[".repeat(100), "]".repeat(100)), "nested more than 32 deep"),
            ("a: \u{0}", "not a text file"),
        ] {
            let path = write(dir.path(), "c", text);
            let error = load(Some(path.clone()), None, dir.path()).unwrap_err().to_string();
            assert!(error.starts_with(&path.display().to_string()), "{error}");
            assert!(error.contains(expected), "{text:.60}: {error}");
            assert!(!error.contains("s3cret"), "{error}");
        }
        assert!(load(Some(dir.path().to_owned()), None, dir.path()).is_err());
        let large = write(dir.path(), "large", &"#".repeat((16 << 20) + 1));
        let error = load(Some(large), None, dir.path()).unwrap_err();
        assert!(matches!(error, KubeconfigError::Invalid(_, ContentError::TooLarge)));
    }
}
