//! The result of `jackstay kubeconfig`, in the formats of `-o`.

use serde::Serialize;

use crate::kubeconfig::rewrite::KeyChange;

/// The result in JSON and YAML.
#[derive(Debug, Default, Serialize)]
pub(super) struct KubeconfigReport {
    /// Whether the command succeeded.
    pub(super) ok: bool,
    /// Why it failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) error: Option<String>,
    /// The files in the order in which they were written.
    pub(super) files: Vec<ReportedFile>,
    /// The context that now points at jackstay; none for `--revert`.
    #[serde(flatten)]
    pub(super) context: Option<ReportedContext>,
    pub(super) clusters: Vec<ReportedCluster>,
    /// Endpoints at which no apiserver responds.
    pub(super) warnings: Vec<String>,
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
    pub(super) description: &'static str,
    /// False if it had this content already.
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
    /// The report as text, without the error, which goes to stderr.
    pub(super) fn text(&self) -> String {
        let mut lines: Vec<String> = Vec::new();
        for file in &self.files {
            let action = if file.written { "wrote" } else { "unchanged" };
            lines.push(format!("{action} {}: {}", file.path, file.description));
        }
        for cluster in &self.clusters {
            let context =
                self.context.as_ref().map(|reported| format!(" of context {:?}", reported.context));
            lines.push(format!("cluster {:?}{}:", cluster.name, context.unwrap_or_default()));
            lines.extend(cluster.changes.iter().map(|change| format!("  {change}")));
            if cluster.changes.is_empty() {
                lines.push("  unchanged".to_owned());
            }
        }
        if let Some(ReportedContext { user, credential, .. }) = &self.context {
            lines.push(format!("user {user:?} is unchanged ({credential})"));
        }
        lines.extend(self.warnings.iter().map(|warning| format!("warning: {warning}")));
        lines.extend(self.notes.iter().map(|note| format!("note: {note}")));
        if !self.next.is_empty() {
            lines.push("next:".to_owned());
            lines.extend(self.next.iter().map(|command| format!("  {command}")));
        }
        lines.extend(self.revert.iter().map(|command| format!("to revert: {command}")));
        lines.into_iter().map(|line| line + "\n").collect()
    }
}
