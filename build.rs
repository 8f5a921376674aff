//! Notes the commit that is built, for `--version`, as `JACKSTAY_COMMIT`.
//!
//! Read from git's own files, so that neither a `git` program nor its opinion of who owns the
//! checkout matters. Outside of a checkout (a source archive, a registry) the variable of that name
//! may say it, and otherwise it is unknown; the build never fails for it. No clock is read: the same
//! commit gives the same binary.

use std::fs;
use std::path::{Path, PathBuf};

/// Characters of a commit that are shown.
const SHOWN: usize = 12;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=JACKSTAY_COMMIT");
    // A debug build after each commit would build everything again, for a version that is not asked for.
    if std::env::var("PROFILE").is_ok_and(|profile| profile == "debug") {
        println!("cargo::rustc-env=JACKSTAY_COMMIT=debug build");
        return;
    }
    let said = std::env::var("JACKSTAY_COMMIT").ok();
    let commit = said.or_else(|| commit(&git_directory()?)).unwrap_or_default();
    let commit: String = commit.trim().chars().take(SHOWN).collect();
    let known = !commit.is_empty() && commit.chars().all(|c| c.is_ascii_hexdigit());
    println!("cargo::rustc-env=JACKSTAY_COMMIT={}", if known { &commit } else { "unknown commit" });
}

/// Where git keeps this checkout: `.git`, or what it points to in a linked worktree.
fn git_directory() -> Option<PathBuf> {
    let root = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR")?);
    let path = root.join(".git");
    if path.is_dir() {
        return Some(path);
    }
    let pointer = fs::read_to_string(path).ok()?;
    Some(root.join(pointer.strip_prefix("gitdir:")?.trim()))
}

/// The commit that HEAD means.
fn commit(git: &Path) -> Option<String> {
    let head = watched(&git.join("HEAD"))?;
    let Some(name) = head.trim().strip_prefix("ref: ") else { return Some(head) };
    // Branches of a linked worktree are kept by the main one.
    let common = fs::read_to_string(git.join("commondir"))
        .map_or_else(|_| git.to_owned(), |path| git.join(path.trim()));
    watched(&common.join(name)).or_else(|| {
        let packed = watched(&common.join("packed-refs"))?;
        let line = packed.lines().find(|line| line.ends_with(&format!(" {name}")))?;
        line.split(' ').next().map(str::to_owned)
    })
}

/// The text of a file; the build script runs again when it changes.
fn watched(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    println!("cargo::rerun-if-changed={}", path.display());
    Some(text)
}
