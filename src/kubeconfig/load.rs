//! Finds and reads the user's kubeconfig by kubectl's rules.
//!
//! | source | files | one that is missing |
//! |---|---|---|
//! | a file that was named | that file | an error |
//! | `$KUBECONFIG` | its list, separated by colons | is skipped |
//! | neither | `~/.kube/config` | an error |
//!
//! Of several files the first one that says something wins: each cluster, user and context by its
//! name, `current-context` and the rest by their keys. Relative paths in a file are relative to it
//! (client-go, `tools/clientcmd/loader.go`).

use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};

use super::tree::{self, Node};

/// Largest kubeconfig read: certificates of a few thousand clusters.
const MAX_FILE: u64 = 16 << 20;

/// The lists of named entries.
const LISTS: [(&str, &str); 3] =
    [("clusters", "cluster"), ("users", "user"), ("contexts", "context")];

/// Keys of a cluster that hold paths.
const CLUSTER_PATHS: [&str; 1] = ["certificate-authority"];
/// Keys of a user that hold paths.
const USER_PATHS: [&str; 3] = ["client-certificate", "client-key", "tokenFile"];

/// What is wrong with a kubeconfig: a sentence for people that names the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error(String);

impl Error {
    /// An error about `path`.
    pub fn at(path: &Path, message: impl fmt::Display) -> Self {
        Self(format!("{}: {message}", path.display()))
    }
}

impl From<String> for Error {
    fn from(message: String) -> Self {
        Self(message)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Error {}

/// Where to look.
#[derive(Debug, Clone, Default)]
pub struct KubeconfigPaths {
    /// The file that was named.
    pub file: Option<PathBuf>,
    /// `$KUBECONFIG`.
    pub variable: Option<String>,
    /// The home directory.
    pub home: Option<PathBuf>,
}

impl KubeconfigPaths {
    /// What this process's environment says, unless a file was named.
    pub fn from_env(file: Option<PathBuf>) -> Self {
        let variable = std::env::var_os("KUBECONFIG");
        Self {
            file,
            variable: variable.map(|value| value.to_string_lossy().into_owned()),
            home: std::env::var_os("HOME").map(PathBuf::from),
        }
    }
}

/// One file as it was read.
#[derive(Debug, Clone)]
pub struct Source {
    /// Where it is, absolute.
    pub path: PathBuf,
    /// What it says.
    pub tree: Node,
    /// Whether it has comments, which writing it anew would lose.
    pub has_comments: bool,
}

/// The files a kubeconfig is made of, first the one that wins.
#[derive(Debug, Clone)]
pub struct KubeconfigFiles(Vec<Source>);

impl KubeconfigFiles {
    /// Reads the files.
    ///
    /// # Errors
    /// A file that must exist does not, or one cannot be read or understood.
    pub fn load(places: &KubeconfigPaths) -> Result<Self, Error> {
        let default = places.home.as_ref().map(|home| home.join(".kube/config"));
        let listed: Vec<PathBuf> = match (&places.file, &places.variable) {
            (None, Some(variable)) => {
                variable.split(':').filter(|part| !part.is_empty()).map(PathBuf::from).collect()
            }
            _ => Vec::new(),
        };
        if listed.is_empty() {
            let file = places.file.clone().or(default);
            let file = file.ok_or_else(|| {
                Error("no kubeconfig: name one with --in, or set $KUBECONFIG or $HOME".to_owned())
            })?;
            return Ok(Self(vec![read(&file)?.ok_or_else(|| {
                Error(format!("cannot read {}: no such file", file.display()))
            })?]));
        }
        let mut sources: Vec<Source> = Vec::new();
        for file in &listed {
            if let Some(source) = read(file)?
                && !sources.iter().any(|known| known.path == source.path)
            {
                sources.push(source);
            }
        }
        if sources.is_empty() {
            let listed: Vec<_> = listed.iter().map(|file| file.display().to_string()).collect();
            return Err(Error(format!("$KUBECONFIG: none of {} exists", listed.join(", "))));
        }
        Ok(Self(sources))
    }

    /// The first file: where kubectl would write.
    pub fn first(&self) -> &Source {
        &self.0[0]
    }

    /// Every file.
    pub fn iter(&self) -> impl Iterator<Item = &Source> {
        self.0.iter()
    }

    /// The file whose cluster of that name wins.
    pub fn file_of_cluster(&self, name: &str) -> Option<&Source> {
        self.0.iter().find(|source| entry(&source.tree, "clusters", name).is_some())
    }

    /// All files as one, with paths that are right in `directory`: those of files that are not
    /// in it become absolute.
    pub fn merged(&self, directory: Option<&Path>) -> Node {
        let mut all = self.0.iter().map(|source| {
            let mut tree = source.tree.clone();
            let home = source.path.parent().unwrap_or(Path::new("/"));
            if directory != Some(home) {
                make_absolute(&mut tree, home);
            }
            tree
        });
        let mut merged = all.next().unwrap_or_else(Node::map);
        for tree in all {
            let Node::Map(entries) = tree else { continue };
            for (key, value) in entries {
                merge(&mut merged, &key, value);
            }
        }
        merged
    }
}

/// Adds what `merged` does not say yet.
fn merge(merged: &mut Node, key: &str, value: Node) {
    let named = LISTS.iter().any(|(list, _)| *list == key);
    match (merged.get_mut(key), value) {
        (Some(Node::List(known)), Node::List(items)) if named => {
            for item in items {
                let name = item.str("name").map(ToOwned::to_owned);
                if !known.iter().any(|k| k.str("name") == name.as_deref()) {
                    known.push(item);
                }
            }
        }
        (Some(old), value) if old.is_empty() || old.as_str() == Some("") => *old = value,
        (Some(Node::Text(old)), value) if old.is_empty() => merged.set(key, value),
        (Some(_), _) => {}
        (None, value) => merged.set(key, value),
    }
}

/// An entry of one of the lists, by name: what stands below `cluster`, `user` or `context`.
pub fn entry<'a>(tree: &'a Node, list: &str, name: &str) -> Option<&'a Node> {
    let body = LISTS.iter().find(|(l, _)| *l == list).map(|(_, body)| *body)?;
    tree.items(list).iter().find(|item| item.str("name") == Some(name))?.get(body)
}

/// The same, to change it.
pub fn entry_mut<'a>(tree: &'a mut Node, list: &str, name: &str) -> Option<&'a mut Node> {
    let body = LISTS.iter().find(|(l, _)| *l == list).map(|(_, body)| *body)?;
    let items = tree.items_mut(list);
    items.iter_mut().find(|item| item.str("name") == Some(name))?.get_mut(body)
}

/// The names in one of the lists.
pub fn names<'a>(tree: &'a Node, list: &str) -> Vec<&'a str> {
    tree.items(list).iter().filter_map(|item| item.str("name")).collect()
}

fn make_absolute(tree: &mut Node, home: &Path) {
    let absolute = |node: Option<&mut Node>| {
        if let Some(node) = node
            && let Some(path) = node.as_str()
        {
            *node = Node::text(home.join(path).to_string_lossy());
        }
    };
    for item in tree.items_mut("clusters") {
        let Some(cluster) = item.get_mut("cluster") else { continue };
        for key in CLUSTER_PATHS {
            absolute(cluster.get_mut(key));
            absolute(super::moved::original_mut(cluster).and_then(|was| was.get_mut(key)));
        }
    }
    for item in tree.items_mut("users") {
        let Some(user) = item.get_mut("user") else { continue };
        for key in USER_PATHS {
            absolute(user.get_mut(key));
        }
        // A command without a slash is looked up in $PATH.
        let command = user.get_mut("exec").and_then(|exec| exec.get_mut("command"));
        absolute(command.filter(|c| c.as_str().is_some_and(|c| c.contains('/'))));
    }
}

/// Reads one file; `None` if it does not exist.
fn read(path: &Path) -> Result<Option<Source>, Error> {
    let fail = |error: &std::io::Error| {
        let reason = error.to_string();
        let reason = reason.split(" (os error").next().unwrap_or_default().to_owned();
        Error(format!("cannot read {}: {reason}", path.display()))
    };
    let metadata = match std::fs::metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(fail(&error)),
        Ok(metadata) => metadata,
    };
    if metadata.is_dir() {
        return Err(Error::at(path, "is a directory, not a kubeconfig"));
    }
    let mut bytes = Vec::new();
    std::fs::File::open(path)
        .and_then(|file| file.take(MAX_FILE + 1).read_to_end(&mut bytes))
        .map_err(|error| fail(&error))?;
    if bytes.len() as u64 > MAX_FILE {
        return Err(Error::at(path, "larger than 16 MiB: not a kubeconfig"));
    }
    let text = String::from_utf8(bytes).ok().filter(|text| !text.contains('\0'));
    let text = text.ok_or_else(|| Error::at(path, "not a text file in UTF-8"))?;
    let tree = tree::parse(&text).map_err(|error| Error::at(path, error))?;
    let tree = tree.unwrap_or_else(Node::map);
    check(&tree).map_err(|error| Error::at(path, error))?;
    let has_comments = text.lines().any(|line| line.trim_start().starts_with('#'));
    // The link itself may be replaced, the directory is what relative paths are relative to.
    let path = std::path::absolute(path).map_err(|error| fail(&error))?;
    Ok(Some(Source { path, tree, has_comments }))
}

/// The shape that the rest relies on.
fn check(tree: &Node) -> Result<(), String> {
    if !matches!(tree, Node::Map(_)) {
        return Err("not a kubeconfig: it must be a map of keys (clusters: …, users: …)".to_owned());
    }
    match tree.str("kind") {
        None | Some("Config") => {}
        Some(other) => return Err(format!("not a kubeconfig: its kind is {other:?}")),
    }
    for (list, body) in LISTS {
        match tree.get(list) {
            None | Some(Node::List(_)) => {}
            Some(other) if other.is_empty() => {}
            Some(_) => return Err(format!("{list}: expected a list")),
        }
        let mut seen = Vec::new();
        for (i, item) in tree.items(list).iter().enumerate() {
            let Some(name) = item.str("name") else {
                return Err(format!("{list}[{i}]: has no name"));
            };
            if seen.contains(&name) {
                return Err(format!("{list}[{i}]: the name {name:?} appears twice"));
            }
            seen.push(name);
            match item.get(body) {
                Some(Node::Map(_)) | None => {}
                Some(other) if other.is_empty() => {}
                Some(_) => return Err(format!("{list}[{i}].{body}: expected a map of keys")),
            }
        }
    }
    Ok(())
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
        file: Option<PathBuf>,
        variable: Option<&str>,
        home: &Path,
    ) -> Result<KubeconfigFiles, Error> {
        let variable = variable.map(ToOwned::to_owned);
        KubeconfigFiles::load(&KubeconfigPaths { file, variable, home: Some(home.to_owned()) })
    }

    #[test]
    fn files_are_found_by_kubectls_rules() {
        let dir = tempfile::tempdir().unwrap();
        let home = dir.path();
        let error = load(None, None, home).unwrap_err().to_string();
        assert!(error.ends_with(".kube/config: no such file"), "{error}");
        let default = write(home, ".kube/config", "current-context: default\n");
        let other = write(home, "other", "current-context: other\n");
        let of = |file: Option<PathBuf>, variable: Option<&str>| {
            let sources = load(file, variable, home).unwrap();
            sources.merged(None).str("current-context").map(ToOwned::to_owned)
        };
        assert_eq!(of(None, None).as_deref(), Some("default"));
        assert_eq!(of(None, Some("")).as_deref(), Some("default"));
        let list = format!("{}/none::{}", home.display(), other.display());
        assert_eq!(of(None, Some(&list)).as_deref(), Some("other"));
        assert_eq!(of(Some(default), Some(&list)).as_deref(), Some("default"));
        let error = load(None, Some("/none/a:/none/b"), home).unwrap_err().to_string();
        assert_eq!(error, "$KUBECONFIG: none of /none/a, /none/b exists");
        assert!(load(Some("/none".into()), None, home).is_err());
    }

    #[test]
    fn the_first_file_wins_and_paths_stay_right() {
        let dir = tempfile::tempdir().unwrap();
        let home = dir.path();
        write(
            home,
            "a/config",
            "clusters:\n- name: one\n  cluster: {server: https://a, certificate-authority: ca.crt}\n\
             users:\n- name: u\n  user: {client-certificate: ../u.crt, client-key: /k, \
             exec: {command: ./plugin, args: [x]}, odd: 1}\n",
        );
        write(
            home,
            "b/config",
            "clusters:\n- name: one\n  cluster: {server: https://b}\n- name: two\n  cluster: \
             {server: https://b2}\nusers:\n- name: v\n  user: {tokenFile: t, exec: {command: aws}}\n\
             current-context: c\n",
        );
        let list = format!("{0}/a/config:{0}/b/config", home.display());
        let sources = load(None, Some(&list), home).unwrap();
        let merged = sources.merged(Some(&home.join("a")));
        assert_eq!(merged.str("current-context"), Some("c"));
        let one = entry(&merged, "clusters", "one").unwrap();
        assert_eq!(one.str("server"), Some("https://a"));
        assert_eq!(one.str("certificate-authority"), Some("ca.crt"));
        assert_eq!(names(&merged, "clusters"), ["one", "two"]);
        let absolute = |name: &str| home.join(name).display().to_string();
        let v = entry(&merged, "users", "v").unwrap();
        assert_eq!(v.str("tokenFile"), Some(absolute("b/t").as_str()));
        assert_eq!(v.get("exec").unwrap().str("command"), Some("aws"));
        let u = sources.merged(None);
        let u = entry(&u, "users", "u").unwrap();
        assert_eq!(u.str("client-certificate"), Some(absolute("a/../u.crt").as_str()));
        assert_eq!(u.str("client-key"), Some("/k"));
        assert_eq!(u.get("exec").unwrap().str("command"), Some(absolute("a/./plugin").as_str()));
        assert_eq!(u.get("odd"), Some(&Node::Plain("1".into())));
        assert_eq!(sources.file_of_cluster("two").unwrap().path, home.join("b/config"));
    }

    #[test]
    fn what_is_no_kubeconfig_is_told() {
        let dir = tempfile::tempdir().unwrap();
        for (text, expected) in [
            ("hello", "it must be a map of keys"),
            ("kind: Pod\n", "its kind is \"Pod\""),
            ("clusters: {}\nusers: 3\n", "users: expected a list"),
            ("clusters: [{cluster: {}}]\n", "clusters[0]: has no name"),
            ("users: [{name: a}, {name: a}]\n", "users[1]: the name \"a\" appears twice"),
            ("users: [{name: a, user: []}, {name: b, user: 3}]\n", "users[1].user: expected a map"),
            ("a: [", "not valid YAML"),
            ("a: \u{0}", "not a text file"),
        ] {
            let path = write(dir.path(), "c", text);
            let error = load(Some(path.clone()), None, dir.path()).unwrap_err().to_string();
            assert!(error.starts_with(&path.display().to_string()), "{error}");
            assert!(error.contains(expected), "{error}");
        }
        assert!(load(Some(dir.path().to_owned()), None, dir.path()).is_err());
    }
}
