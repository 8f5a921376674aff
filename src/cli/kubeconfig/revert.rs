//! `jackstay kubeconfig --revert`: the clusters of the input go back to where they were.

use super::{Failure, KubeconfigArgs, say, write};
use crate::kubeconfig::ResolvedContext;
use crate::kubeconfig::moved;
use crate::kubeconfig::setup::OutputFile;
use crate::kubeconfig::tree::emit;
use crate::kubeconfig::{KubeconfigFiles, entry_mut, names};
use crate::net::files::atomic_write::PRIVATE;

/// Moves every moved cluster back, or that of one context.
pub(super) fn run(
    args: &KubeconfigArgs,
    sources: &KubeconfigFiles,
    out: &mut Vec<u8>,
) -> Result<(), Failure> {
    let only = match &args.context {
        None => None,
        Some(context) => {
            Some(ResolvedContext::resolve(&sources.merged(None), Some(context))?.cluster)
        }
    };
    let mut moved = 0;
    for source in sources.iter() {
        let mut tree = source.tree.clone();
        let all: Vec<String> = names(&tree, "clusters").into_iter().map(Into::into).collect();
        let mut lines = Vec::new();
        for name in all.iter().filter(|name| only.as_ref().is_none_or(|only| only == *name)) {
            let Some(cluster) = entry_mut(&mut tree, "clusters", name) else { continue };
            if moved::original(cluster).is_none() {
                continue;
            }
            lines.push(format!("cluster {name:?}:"));
            lines.extend(moved::revert(cluster).iter().map(|change| format!("  {change}")));
            moved += 1;
        }
        if lines.is_empty() {
            continue;
        }
        let file = OutputFile {
            path: source.path.clone(),
            bytes: emit(&tree).into_bytes(),
            mode: PRIVATE,
            what: "the kubeconfig",
        };
        write(&file, out)?;
        for line in lines {
            say(out, &line);
        }
    }
    if moved == 0 {
        let files: Vec<_> = sources.iter().map(|s| s.path.display().to_string()).collect();
        say(out, &format!("nothing to move back in {}", files.join(", ")));
    }
    Ok(())
}
