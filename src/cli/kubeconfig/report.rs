//! What `jackstay kubeconfig` did, in the format of `-o`.

use serde::Serialize;

use crate::kubeconfig::rewrite::KeyChange;

/// The result in JSON and YAML.
#[derive(Debug, Default, Serialize)]
pub(super) struct KubeconfigReport {
    /// Whether the command succeeded.
    pub(super) ok: bool,
    /// Why not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) error: Option<String>,
    /// The files in the order in which they were written.
    pub(super) files: Vec<ReportedFile>,
    /// The context that now leads to jackstay; none for `--revert`.
    #[serde(flatten)]
    pub(super) context: Option<ReportedContext>,
    pub(super) clusters: Vec<ReportedCluster>,
    /// Messages to the user.
    pub(super) notes: Vec<String>,
    /// The commands to run next.
    pub(super) next: Vec<String>,
    /// The command that restores the kubeconfig.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) revert: Option<String>,
}

#[derive(Debug, Serialize)]
pub(super) struct ReportedFile {
    pub(super) path: String,
    /// Its purpose.
    pub(super) what: &'static str,
    /// Whether it was written; else it had this content already.
    pub(super) written: bool,
}

#[derive(Debug, Serialize)]
pub(super) struct ReportedContext {
    pub(super) context: String,
    pub(super) user: String,
    /// The kind of the user's credential.
    pub(super) credential: &'static str,
}

#[derive(Debug, Serialize)]
pub(super) struct ReportedCluster {
    pub(super) name: String,
    pub(super) changes: Vec<KeyChange>,
}

impl KubeconfigReport {
    /// The report for people. The error is not in it: it goes to stderr.
    pub(super) fn text(&self) -> String {
        let mut lines: Vec<String> = Vec::new();
        for file in &self.files {
            let action = if file.written { "wrote" } else { "unchanged" };
            lines.push(format!("{action} {}: {}", file.path, file.what));
        }
        for cluster in &self.clusters {
            let context = self.context.as_ref().map(|of| format!(" of context {:?}", of.context));
            lines.push(format!("cluster {:?}{}:", cluster.name, context.unwrap_or_default()));
            lines.extend(cluster.changes.iter().map(|change| format!("  {change}")));
            if cluster.changes.is_empty() {
                lines.push("  as before".to_owned());
            }
        }
        if let Some(ReportedContext { user, credential, .. }) = &self.context {
            lines.push(format!("user {user:?} stays as it is ({credential})"));
        }
        lines.extend(self.notes.iter().map(|note| format!("note: {note}")));
        if !self.next.is_empty() {
            lines.push("next:".to_owned());
            lines.extend(self.next.iter().map(|command| format!("  {command}")));
        }
        lines.extend(self.revert.iter().map(|command| format!("to go back: {command}")));
        lines.into_iter().map(|line| line + "\n").collect()
    }
}
