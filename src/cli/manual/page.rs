//! A manual page with the sections of man-pages(7). `clap_mangen` puts the text after the help of a command into
//! one section, EXTRA; here each of its paragraphs goes to the section that readers look for.

use std::io::{self, Write};
use std::path::Path;

use clap::Command;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};
use jackstay_operator::options::DEFAULT_CONFIG;

use crate::observe::build;

/// Files of the commands that read a configuration.
const FILES: [(&str, &str); 2] = [
    (DEFAULT_CONFIG, "The configuration that is read without --config."),
    (
        "/var/lib/jackstay",
        "The default of state_dir: known endpoints, and the socket of takeovers.",
    ),
];
/// Variables of the same commands.
const ENVIRONMENT: [(&str, &str); 1] = [(
    "JACKSTAY__SECTION__KEY",
    "Overrides a key of the configuration outside lists, for example JACKSTAY__LOG__LEVEL.",
)];

/// Writes the page of `command`.
pub(super) fn write(command: Command, out: &mut dyn Write) -> io::Result<()> {
    Page::new(command).write(out)
}

/// Writes the pages of `command` and of its visible subcommands into a directory, which is created if it is
/// missing.
pub(super) fn write_all(command: Command, directory: &Path) -> io::Result<()> {
    std::fs::create_dir_all(directory)?;
    let mut command = command.disable_help_subcommand(true);
    command.build();
    let mut commands = vec![command];
    while let Some(command) = commands.pop() {
        commands.extend(command.get_subcommands().filter(|c| !c.is_hide_set()).cloned());
        let page = Page::new(command);
        let mut file = std::fs::File::create(directory.join(page.man.get_filename()))?;
        page.write(&mut file)?;
    }
    Ok(())
}

/// A command, prepared for its page.
struct Page {
    command: Command,
    man: Man,
}

impl Page {
    fn new(command: Command) -> Self {
        let mut command = command
            .disable_help_subcommand(true)
            .subcommand_help_heading("COMMANDS")
            .subcommand_value_name("COMMAND");
        command.build();
        let source = format!("jackstay {}", build::VERSION);
        Self { man: Man::new(command.clone()).source(source), command }
    }

    fn name(&self) -> &str {
        self.command.get_display_name().unwrap_or_else(|| self.command.get_name())
    }

    fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let text = self.command.get_after_help().map(ToString::to_string).unwrap_or_default();
        let text = HelpSections::new(&text);
        self.man.render_title(out)?;
        self.man.render_name_section(out)?;
        self.man.render_synopsis_section(out)?;
        self.man.render_description_section(out)?;
        let mut page = Roff::new();
        for paragraph in &text.other {
            page.control("PP", []).text([roman(*paragraph)]);
        }
        page.to_writer(out)?;
        if self.command.get_arguments().any(|argument| !argument.is_hide_set()) {
            self.man.render_options_section(out)?;
        }
        let mut page = Roff::new();
        let commands: Vec<_> =
            self.command.get_subcommands().filter(|command| !command.is_hide_set()).collect();
        if !commands.is_empty() {
            self.man.render_subcommands_section(out)?;
        }
        if let Some(signals) = text.signals {
            page.control("SH", ["SIGNALS"]).text([roman(signals)]);
        }
        if let Some(codes) = text.exit_codes {
            items(&mut page, "EXIT STATUS", exit_statuses(codes));
        }
        if matches!(self.name(), "jackstay" | "jackstay-run" | "jackstay-check") {
            items(&mut page, "ENVIRONMENT", ENVIRONMENT);
            items(&mut page, "FILES", FILES);
        }
        if let Some(examples) = text.examples {
            page.control("SH", ["EXAMPLES"]).control("nf", []);
            for line in examples.lines() {
                page.text([roman(line.strip_prefix("  ").unwrap_or(line))]);
            }
            page.control("fi", []);
        }
        let related: Vec<_> = match &*commands {
            [] => {
                vec!["jackstay".to_owned(), "jackstay-run".to_owned(), "jackstay-status".to_owned()]
            }
            commands => {
                commands.iter().map(|c| format!("{}-{}", self.name(), c.get_name())).collect()
            }
        };
        page.control("SH", ["SEE ALSO"]);
        let mut line = Vec::new();
        for name in related.iter().filter(|name| *name != self.name()) {
            if !line.is_empty() {
                line.push(roman(", "));
            }
            line.extend([bold(name), roman("(1)")]);
        }
        page.text(line);
        page.to_writer(out)
    }
}

/// Adds a section of names with their meanings.
fn items<'a>(page: &mut Roff, title: &str, items: impl IntoIterator<Item = (&'a str, &'a str)>) {
    page.control("SH", [title]);
    for (name, meaning) in items {
        page.control("TP", []).text([bold(name)]).text([roman(meaning)]);
    }
}

/// The paragraphs of the text after a help.
#[derive(Debug, Default, PartialEq, Eq)]
struct HelpSections<'a> {
    exit_codes: Option<&'a str>,
    signals: Option<&'a str>,
    examples: Option<&'a str>,
    other: Vec<&'a str>,
}

impl<'a> HelpSections<'a> {
    fn new(text: &'a str) -> Self {
        let mut sections = Self::default();
        for paragraph in text.split("\n\n").filter(|paragraph| !paragraph.trim().is_empty()) {
            if let Some(codes) = paragraph.strip_prefix("Exit codes: ") {
                sections.exit_codes = Some(codes);
            } else if let Some(signals) = paragraph.strip_prefix("Signals: ") {
                sections.signals = Some(signals);
            } else if let Some(examples) = paragraph.strip_prefix("Examples:\n") {
                sections.examples = Some(examples);
            } else {
                sections.other.push(paragraph);
            }
        }
        sections
    }
}

/// Splits `0 valid, 2 errors, or bad usage.` before each code.
fn exit_statuses(text: &str) -> Vec<(&str, &str)> {
    let bytes = text.as_bytes();
    let starts_code = |&at: &usize| {
        let before = at == 0 || at >= 2 && bytes[at - 2] == b',';
        before && bytes[at].is_ascii_digit() && bytes.get(at + 1) == Some(&b' ')
    };
    let mut starts: Vec<usize> = (0..bytes.len()).filter(starts_code).collect();
    starts.push(text.len());
    let codes = starts.windows(2).map(|range| {
        let (code, meaning) = text[range[0]..range[1]].split_once(' ').unwrap_or_default();
        (code, meaning.trim_end_matches([' ', '\n', ',', '.']))
    });
    codes.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_statuses_have_one_item_for_each_code() {
        assert_eq!(
            exit_statuses("0 valid, 1 one of\n3 files,\n2 errors, or bad\nusage."),
            [("0", "valid"), ("1", "one of\n3 files"), ("2", "errors, or bad\nusage")]
        );
        assert_eq!(exit_statuses("see above"), []);
    }

    #[test]
    fn help_sections_keep_every_paragraph() {
        let text = "Text.\n\nSignals: A b.\n\nExit codes: 0 ok.\n\nExamples:\n  x\n  y";
        let expected = HelpSections {
            exit_codes: Some("0 ok."),
            signals: Some("A b."),
            examples: Some("  x\n  y"),
            other: vec!["Text."],
        };
        assert_eq!(HelpSections::new(text), expected);
    }
}
