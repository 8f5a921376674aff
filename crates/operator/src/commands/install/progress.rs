//! What `jackstay install` and `jackstay uninstall` print: lines while they work, and the result in the formats of
//! `-o`.

use jackstay_sys::files::PRIVATE;
use serde::Serialize;

use crate::VERSION;
use crate::install::steps::Step;
use crate::install::undo::Undone;
use crate::kubeconfig::setup::OutputFile;
use crate::options::OutputFormat;

/// What the command has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Outcome {
    /// Nothing, and the node is as it was, or an error says what it is.
    Failed,
    /// Nothing: `--dry-run`.
    Planned,
    /// jackstay is beside kubelet.
    Installed,
    /// This version was installed and runs.
    Unchanged,
    /// Another version was installed before.
    Upgraded,
    /// An interrupted or failed change was undone.
    Undone,
    /// jackstay is removed.
    Removed,
    /// There was no installation to remove.
    NotInstalled,
}

/// The result in JSON and YAML. A field is not renamed or removed within a major version.
#[derive(Debug, Serialize)]
pub(super) struct InstallReport {
    /// Whether the command succeeded.
    ok: bool,
    outcome: Outcome,
    /// Why it failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    /// The version of this program.
    version: &'static str,
    /// The name of the node's object; null if it is not known yet.
    node: Option<String>,
    /// In their order: those that were carried out, or all with `--dry-run`.
    steps: Vec<ReportedStep>,
    /// Files that are kept because they have changed since the installation.
    kept: Vec<String>,
    warnings: Vec<String>,
    notes: Vec<String>,
}

/// One step. A field that the action does not have is absent.
#[derive(Debug, Serialize)]
struct ReportedStep {
    /// `write`, `remove`, `restore`, `pin`, `systemctl` or `wait`.
    action: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    path: Option<String>,
    /// Permissions of a written file in octal, as `0644`.
    #[serde(skip_serializing_if = "Option::is_none")]
    mode: Option<String>,
    /// The text of a written file with `--dry-run`, unless only its owner may read it.
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
    /// The command, the purpose of a file, or what is waited for.
    description: String,
}

/// The output of one command.
#[derive(Debug)]
pub(super) struct Progress {
    format: OutputFormat,
    report: InstallReport,
}

impl Progress {
    pub(super) fn new(format: OutputFormat) -> Self {
        let report = InstallReport {
            ok: false,
            outcome: Outcome::Failed,
            error: None,
            version: VERSION,
            node: None,
            steps: Vec::new(),
            kept: Vec::new(),
            warnings: Vec::new(),
            notes: Vec::new(),
        };
        Self { format, report }
    }

    /// Prints a line at once: on stdout, or on stderr if stdout is for the result.
    pub(super) fn line(&self, text: &str) {
        match self.format {
            OutputFormat::Text => println!("{text}"),
            OutputFormat::Json | OutputFormat::Yaml => eprintln!("{text}"),
        }
    }

    /// Names the node.
    pub(super) fn node(&mut self, name: &str) {
        self.report.node = Some(name.to_owned());
    }

    /// What the command has done so far.
    pub(super) fn outcome(&mut self, outcome: Outcome) {
        self.report.outcome = outcome;
    }

    /// What the user should know.
    pub(super) fn note(&mut self, note: &str) {
        self.line(&format!("note: {note}"));
        self.report.notes.push(note.to_owned());
    }

    /// What may be wrong.
    pub(super) fn warning(&mut self, warning: &str) {
        self.line(&format!("warning: {warning}"));
        self.report.warnings.push(warning.to_owned());
    }

    /// A step that begins.
    pub(super) fn step(&mut self, step: &Step<'_>) {
        if !matches!(step, Step::Enter(_)) {
            self.line(&step.to_string());
        }
        self.report.steps.extend(reported(step, false));
    }

    /// A step of `--dry-run`, with what it would write.
    pub(super) fn planned(&mut self, step: &Step<'_>, more: &[String]) {
        self.line(&step.to_string());
        if let (Step::Write(file), OutputFormat::Text) = (step, self.format) {
            print!("{}", shown_content(file));
        }
        for line in more {
            self.line(&format!("    {line}"));
        }
        self.report.steps.extend(reported(step, true));
    }

    /// A step that is not one of an installation.
    pub(super) fn other(&mut self, action: &'static str, path: Option<&str>, description: &str) {
        let text = [Some(action), path, Some(description)];
        let text: Vec<&str> = text.into_iter().flatten().filter(|word| !word.is_empty()).collect();
        self.line(&text.join(" "));
        self.report.steps.push(ReportedStep {
            action,
            path: path.map(ToOwned::to_owned),
            mode: None,
            content: None,
            description: description.to_owned(),
        });
    }

    /// A file that is kept.
    pub(super) fn kept(&mut self, path: &std::path::Path) {
        let path = path.display().to_string();
        self.line(&format!("kept {path}, which has changed since the installation"));
        self.report.kept.push(path);
    }

    /// What an undo has done.
    pub(super) fn undone(&mut self, undone: &Undone) {
        if undone.kubelet_restarted {
            self.line("kubelet uses its old kubeconfig again");
        }
        for path in &undone.kept {
            self.kept(path);
        }
        for note in &undone.notes {
            self.note(note);
        }
    }

    /// Prints the result; an error goes to stderr, too.
    pub(super) fn finish(mut self, error: Option<&str>) {
        self.report.ok = error.is_none();
        self.report.error = error.map(ToOwned::to_owned);
        self.format.print(&self.report, String::new);
        if let Some(error) = error {
            eprintln!("{error}");
        }
    }
}

fn reported(step: &Step<'_>, with_content: bool) -> Option<ReportedStep> {
    let (action, file, description) = match step {
        Step::Write(file) | Step::Switch(file) => {
            ("write", Some(*file), file.description.to_owned())
        }
        Step::Systemctl(arguments) => ("systemctl", None, arguments.join(" ")),
        Step::Pin(image) => ("pin", None, (*image).to_owned()),
        Step::AwaitJackstay | Step::AwaitNode => ("wait", None, step.to_string()),
        Step::Remove(path) => {
            return Some(ReportedStep {
                action: "remove",
                path: Some(path.display().to_string()),
                mode: None,
                content: None,
                description: String::new(),
            });
        }
        Step::Enter(_) => return None,
    };
    Some(ReportedStep {
        action,
        path: file.map(|file| file.path.display().to_string()),
        mode: file.map(|file| format!("{:04o}", file.mode)),
        content: file
            .filter(|_| with_content && !matches!(step, Step::Switch(_)))
            .and_then(text_of),
        description,
    })
}

/// The text of a file that every user may read; keys and programs are not shown.
fn text_of(file: &OutputFile) -> Option<String> {
    std::str::from_utf8(&file.bytes).ok().filter(|_| file.mode != PRIVATE).map(ToOwned::to_owned)
}

/// The content of a file for `--dry-run`.
fn shown_content(file: &OutputFile) -> String {
    match text_of(file) {
        Some(text) => {
            text.lines().map(|line| format!("    {line}").trim_end().to_owned() + "\n").collect()
        }
        None => format!("    ({} bytes, not shown)\n", file.bytes.len()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn report_names_each_step_and_shows_no_key() {
        let file = |mode| OutputFile {
            path: "/etc/f".into(),
            bytes: b"secret".to_vec(),
            mode,
            description: "a file",
        };
        let (private, public) = (file(PRIVATE), file(0o644));
        let mut progress = Progress::new(OutputFormat::Json);
        progress.node("n");
        for step in [
            Step::Write(&private),
            Step::Write(&public),
            Step::Switch(&private),
            Step::Systemctl(vec!["daemon-reload"]),
            Step::Enter(crate::install::journal::Phase::Switched),
            Step::AwaitNode,
        ] {
            progress.planned(&step, &[]);
        }
        progress.outcome(Outcome::Planned);
        let value = serde_json::to_value(&progress.report).unwrap();
        assert_eq!(value["outcome"], "planned");
        assert_eq!((&value["node"], &value["kept"]), (&json!("n"), &json!([])));
        let steps = value["steps"].as_array().unwrap();
        assert_eq!(
            steps[..4],
            [
                json!({"action": "write", "path": "/etc/f", "mode": "0600", "description": "a file"}),
                json!({"action": "write", "path": "/etc/f", "mode": "0644", "content": "secret",
                       "description": "a file"}),
                json!({"action": "write", "path": "/etc/f", "mode": "0600", "description": "a file"}),
                json!({"action": "systemctl", "description": "daemon-reload"}),
            ]
        );
        assert_eq!((steps.len(), &steps[4]["action"]), (5, &json!("wait")));
    }
}
