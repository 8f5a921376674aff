//! Runs seeds of the scenarios and the scripts with the program as it ships.

mod output;
mod runs;
mod storms;
mod subject;

use std::process::ExitCode;

use self::output::print_line;
use self::runs::Seeds;
use self::subject::Subject;

const USAGE: &str = "usage: jackstay-sim [--scenario NAME]... [--seeds N] [--first N] [--repeat N] [--until-failure], \
                     jackstay-sim --scenario NAME --seed N [--trace], \
                     jackstay-sim --storms [--nodes N] [--plots DIRECTORY] [--seed N], or jackstay-sim --list";

struct Arguments {
    /// Empty for all.
    scenarios: Vec<Subject>,
    seeds: Seeds,
    /// The first seed that fails ends the run.
    until_failure: bool,
    /// One run, in this process.
    seed: Option<u64>,
    trace: bool,
    list: bool,
}

fn parse(mut args: impl Iterator<Item = String>) -> Result<Arguments, String> {
    let mut parsed = Arguments {
        scenarios: Vec::new(),
        seeds: Seeds { first: 0, count: 100, repeat: 0 },
        until_failure: false,
        seed: None,
        trace: false,
        list: false,
    };
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or(format!("{arg} needs a value"));
        let number = |text: String| text.parse().map_err(|_| format!("{text} is no number"));
        match arg.as_str() {
            "--seeds" => parsed.seeds.count = number(value()?)?,
            "--first" => parsed.seeds.first = number(value()?)?,
            "--repeat" => parsed.seeds.repeat = number(value()?)?,
            "--seed" => parsed.seed = Some(number(value()?)?),
            "--scenario" => {
                let name = value()?;
                let found = Subject::by_name(&name)
                    .ok_or(format!("there is no scenario {name}; see --list"))?;
                parsed.scenarios.push(found);
            }
            "--until-failure" => parsed.until_failure = true,
            "--trace" => parsed.trace = true,
            "--list" => parsed.list = true,
            _ => return Err(format!("{arg} is unknown; {USAGE}")),
        }
    }
    Ok(parsed)
}

fn main() -> ExitCode {
    let all: Vec<_> = std::env::args().skip(1).collect();
    if let Some((first, rest)) = all.split_first()
        && first.starts_with("--storm")
    {
        return storms::run(first, rest);
    }
    let arguments = match parse(all.into_iter()) {
        Ok(arguments) => arguments,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(2);
        }
    };
    let scenarios =
        if arguments.scenarios.is_empty() { Subject::all() } else { arguments.scenarios };
    if arguments.list {
        for scenario in scenarios {
            print_line!("{:<20} {}", scenario.name(), scenario.about());
        }
        return ExitCode::SUCCESS;
    }
    if arguments.until_failure {
        let Some(report) = runs::first_failure(&scenarios, arguments.seeds) else {
            return ExitCode::SUCCESS;
        };
        print_line!("{report}");
        return ExitCode::FAILURE;
    }
    let mut failed = 0;
    for scenario in scenarios {
        failed += match arguments.seed {
            Some(seed) => runs::run_one(scenario, seed, arguments.trace),
            None => runs::run_many(scenario, arguments.seeds),
        };
    }
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
