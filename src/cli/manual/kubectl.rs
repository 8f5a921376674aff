//! Completion of `kubectl jackstay`: kubectl runs the program `kubectl_complete-jackstay` with the words behind `jackstay`, of
//! which the last is the one to complete, and reads candidates from its stdout in the format of cobra (kubectl 1.26 and
//! later, `staging/src/k8s.io/kubectl/pkg/cmd/plugin/plugin_completion.go`).

use std::ffi::OsString;
use std::fmt::Write;

use clap::builder::PossibleValue;
use clap::{Arg, ArgAction, Command, ValueHint};

/// What the shell offers when there is no candidate: `ShellCompDirective` of cobra.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Directive {
    /// Files.
    Files = 0,
    /// Nothing.
    Nothing = 4,
    /// Directories.
    Directories = 16,
}

/// A word that may replace the one to complete, and its description.
type Candidate = (String, String);

/// The position of the word to complete.
struct Position<'a> {
    command: &'a Command,
    /// The option whose value the word is.
    option: Option<&'a Arg>,
    /// Options of `command` that the line has already.
    used: Vec<&'a Arg>,
    /// How many positional arguments of `command` the line has already.
    positionals: usize,
    /// `--` precedes the word, so it is no option.
    is_escaped: bool,
}

/// The output of `kubectl_complete-jackstay` for `words`: a line `CANDIDATE<TAB>DESCRIPTION` for each candidate, and the
/// directive.
pub(in crate::cli) fn complete(mut command: Command, words: &[OsString]) -> String {
    command.build();
    let words: Vec<_> = words.iter().map(|word| word.to_string_lossy()).collect();
    let (last, before) = match words.split_last() {
        Some((last, before)) => (last.as_ref(), before),
        None => ("", &[][..]),
    };
    let mut position = Position::new(&command);
    for word in before {
        position.advance(word);
    }
    let (prefix, candidates, directive) = position.candidates(last);
    let mut output = String::new();
    for (word, description) in candidates.iter().filter(|(word, _)| word.starts_with(prefix)) {
        let _ = match description.lines().next().unwrap_or_default() {
            "" => writeln!(output, "{word}"),
            line => writeln!(output, "{word}\t{}", line.replace('\t', " ")),
        };
    }
    let _ = writeln!(output, ":{}", directive as u8);
    output
}

impl<'a> Position<'a> {
    fn new(command: &'a Command) -> Self {
        Self { command, option: None, used: Vec::new(), positionals: 0, is_escaped: false }
    }

    /// Moves behind `word`.
    fn advance(&mut self, word: &str) {
        if self.option.take().is_some_and(|option| takes_word(option, word)) {
            return;
        }
        match word.strip_prefix('-') {
            Some("-") if !self.is_escaped => self.is_escaped = true,
            Some(rest) if !self.is_escaped && !rest.is_empty() => self.advance_option(rest),
            _ => match self.subcommand(word) {
                Some(subcommand) => *self = Self::new(subcommand),
                None => self.positionals += 1,
            },
        }
    }

    /// Moves behind an option without its first dash.
    fn advance_option(&mut self, rest: &str) {
        if let Some(long) = rest.strip_prefix('-') {
            let (name, value) = long.split_once('=').map_or((long, None), |(n, v)| (n, Some(v)));
            if let Some(option) = self.long(name) {
                self.used.push(option);
                self.option = (value.is_none() && may_take_word(option)).then_some(option);
            }
            return;
        }
        for (index, short) in rest.char_indices() {
            let Some(option) = self.short(short) else { return };
            self.used.push(option);
            if option.get_action().takes_values() {
                let has_value = rest.len() > index + short.len_utf8();
                self.option = (!has_value && may_take_word(option)).then_some(option);
                return;
            }
        }
    }

    fn subcommand(&self, word: &str) -> Option<&'a Command> {
        if self.positionals > 0 || self.is_escaped {
            return None;
        }
        self.command.find_subcommand(word)
    }

    fn long(&self, name: &str) -> Option<&'a Arg> {
        self.command.get_arguments().find(|option| {
            option.get_long() == Some(name)
                || option.get_all_aliases().is_some_and(|aliases| aliases.contains(&name))
        })
    }

    fn short(&self, name: char) -> Option<&'a Arg> {
        self.command.get_arguments().find(|option| {
            option.get_short() == Some(name)
                || option.get_all_short_aliases().is_some_and(|aliases| aliases.contains(&name))
        })
    }

    /// What `word` may become: the part of it that candidates begin with, the candidates, and the directive.
    fn candidates<'w>(&self, word: &'w str) -> (&'w str, Vec<Candidate>, Directive) {
        if let Some(option) = self.option.filter(|option| takes_word(option, word)) {
            let (candidates, directive) = values(option);
            return (word, candidates, directive);
        }
        if !self.is_escaped && word.starts_with('-') {
            // Cobra's scripts put what precedes the `=` before the candidates.
            if let Some((name, value)) =
                word.strip_prefix("--").and_then(|long| long.split_once('='))
            {
                let known = self.long(name).map_or((Vec::new(), Directive::Nothing), values);
                return (value, known.0, known.1);
            }
            return (word, self.options(), Directive::Nothing);
        }
        let (mut candidates, directive) = match self.command.get_positionals().nth(self.positionals)
        {
            Some(positional) => values(positional),
            None => (Vec::new(), Directive::Nothing),
        };
        if self.positionals == 0 && !self.is_escaped {
            let visible = self.command.get_subcommands().filter(|one| !one.is_hide_set());
            candidates.extend(visible.map(|one| {
                (
                    one.get_name().to_owned(),
                    one.get_about().map(ToString::to_string).unwrap_or_default(),
                )
            }));
        }
        (word, candidates, directive)
    }

    /// The options that the line may still have.
    fn options(&self) -> Vec<Candidate> {
        let may_follow = |option: &&Arg| {
            let repeats = matches!(option.get_action(), ArgAction::Append | ArgAction::Count);
            let is_used = self.used.iter().any(|used| used.get_id() == option.get_id());
            !option.is_positional() && !option.is_hide_set() && (repeats || !is_used)
        };
        let mut candidates = Vec::new();
        for option in self.command.get_arguments().filter(may_follow) {
            let help = option.get_help().map(ToString::to_string).unwrap_or_default();
            let long = option.get_long().map(|name| format!("--{name}"));
            let short = option.get_short().map(|name| format!("-{name}"));
            candidates.extend([long, short].into_iter().flatten().map(|name| (name, help.clone())));
        }
        candidates
    }
}

/// Whether the word behind `option` may be its value.
fn may_take_word(option: &Arg) -> bool {
    option.get_action().takes_values() && !option.is_require_equals_set()
}

/// Whether `word`, behind `option`, is its value: an optional value does not begin with a dash.
fn takes_word(option: &Arg, word: &str) -> bool {
    let is_optional = option.get_num_args().is_some_and(|number| number.min_values() == 0);
    !is_optional || !word.starts_with('-')
}

/// The possible values of an argument.
fn values(argument: &Arg) -> (Vec<Candidate>, Directive) {
    let candidate = |value: &PossibleValue| {
        (value.get_name().to_owned(), value.get_help().map(ToString::to_string).unwrap_or_default())
    };
    let values = argument.get_possible_values();
    let candidates = values.iter().filter(|value| !value.is_hide_set()).map(candidate).collect();
    let directive = match argument.get_value_hint() {
        ValueHint::AnyPath | ValueHint::FilePath => Directive::Files,
        ValueHint::DirPath => Directive::Directories,
        _ => Directive::Nothing,
    };
    (candidates, directive)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use clap::{CommandFactory, Parser, Subcommand, ValueEnum};

    use super::*;

    #[derive(Debug, Parser)]
    #[command(name = "program", version)]
    struct Program {
        #[command(subcommand)]
        command: Commands,
    }

    #[derive(Debug, Subcommand)]
    enum Commands {
        /// Copy a file.
        #[command(alias = "cp")]
        Copy {
            source: PathBuf,
            #[arg(value_enum)]
            kind: Kind,
            /// Files that are left out.
            #[arg(short, long)]
            exclude: Vec<PathBuf>,
            /// The address.
            #[arg(long, alias = "server")]
            address: Option<String>,
            /// How to print.
            #[arg(short = 'o', long = "output")]
            output: Option<Kind>,
            #[arg(short, long)]
            quiet: bool,
            #[arg(short, long, num_args = 0..=1, require_equals = true)]
            watch: Option<String>,
            #[arg(long, value_hint = ValueHint::DirPath)]
            directory: Option<PathBuf>,
            #[arg(long, num_args = 0..=1)]
            config: Option<PathBuf>,
            #[arg(long, hide = true)]
            secret: bool,
        },
        #[command(hide = true)]
        Hidden,
    }

    #[derive(Debug, Clone, ValueEnum)]
    enum Kind {
        /// Text for terminals
        Text,
        Json,
    }

    fn complete_line(line: &str) -> String {
        let words: Vec<_> = line.split(' ').map(OsString::from).collect();
        complete(Program::command(), &words)
    }

    #[test]
    fn complete_prints_candidates_with_descriptions_and_the_directive() {
        let kinds = "text\tText for terminals\njson\n:4\n";
        for (line, expected) in [
            (
                "",
                "copy\tCopy a file\nhelp\tPrint this message or the help of the given subcommand(s)\n:4\n",
            ),
            ("c", "copy\tCopy a file\n:4\n"),
            ("x", ":4\n"),
            ("help co", "copy\tCopy a file\n:4\n"),
            ("copy ", ":0\n"),
            ("copy file ", kinds),
            ("cp file j", "json\n:4\n"),
            ("copy file text ", ":4\n"),
            // Values of options.
            ("copy -o ", kinds),
            ("copy -o t", "text\tText for terminals\n:4\n"),
            ("copy --output ", kinds),
            ("copy --output=j", "json\n:4\n"),
            ("copy -qo ", kinds),
            ("copy --exclude ", ":0\n"),
            ("copy --directory /e", ":16\n"),
            ("copy --address ", ":4\n"),
            ("copy --unknown=", ":4\n"),
            // The value of an option is no positional argument and no command.
            ("copy --address file ", ":0\n"),
            ("copy --server file ", ":0\n"),
            ("copy -ofile file ", kinds),
            ("copy -o copy file ", kinds),
            // A flag, and an option whose value needs an equals sign, take no word.
            ("copy -q file ", kinds),
            ("copy -w file ", kinds),
            ("copy --watch file ", kinds),
            // An optional value.
            ("copy --config ", ":0\n"),
            ("copy --config file file ", kinds),
            ("copy --config --out", "--output\tHow to print\n:4\n"),
            ("copy --config -q file ", kinds),
            // Behind `--` nothing is an option.
            ("copy -- -o ", kinds),
            ("copy -- -", ":0\n"),
            ("copy --out", "--output\tHow to print\n:4\n"),
            ("copy --s", ":4\n"),
        ] {
            assert_eq!(complete_line(line), expected, "{line:?}");
        }
        assert_eq!(complete(Program::command(), &[]), complete_line(""));
    }

    #[test]
    fn option_is_a_candidate_again_only_if_it_repeats() {
        let offered = |line| -> Vec<String> {
            let output = complete_line(line);
            output.lines().filter_map(|line| Some(line.split_once('\t')?.0.to_owned())).collect()
        };
        assert_eq!(
            offered("copy -"),
            ["--exclude", "-e", "--address", "--output", "-o", "--help", "-h"]
        );
        assert_eq!(offered("copy -e a -o text --server b -"), ["--exclude", "-e", "--help", "-h"]);
    }
}
