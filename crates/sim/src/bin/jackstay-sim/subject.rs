//! What can be run by its name.

use std::io;

use jackstay_sim::scenario::Scenario;
use jackstay_sim::scripts::script::{self, Script};
use jackstay_sim::scripts::testbed::Figure;
use jackstay_sim::{scenarios, scripts, shell};

/// A scenario or a script.
#[derive(Debug, Clone, Copy)]
pub enum Subject {
    Scenario(&'static Scenario),
    Script(&'static Script),
}

/// What the run of a seed has shown.
pub struct Report {
    /// One line, or more.
    pub findings: String,
    pub packets: u64,
    /// The hash of the log.
    pub hash: u64,
    pub log: String,
    /// The promises that it breaks.
    pub broken: Vec<String>,
}

impl Subject {
    /// All that the program as it ships runs.
    pub fn all() -> Vec<Self> {
        let scenarios = scenarios::all().map(Self::Scenario);
        scenarios.chain(scripts::ALL.iter().map(Self::Script)).collect()
    }

    pub fn by_name(name: &str) -> Option<Self> {
        let script = || scripts::by_name(name).map(Self::Script);
        scenarios::by_name(name).map(Self::Scenario).or_else(script)
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Scenario(scenario) => scenario.name,
            Self::Script(script) => script.name,
        }
    }

    pub fn about(self) -> &'static str {
        match self {
            Self::Scenario(scenario) => scenario.about,
            Self::Script(script) => script.about,
        }
    }

    /// Runs a seed in this process.
    pub fn run(self, seed: u64, trace: bool) -> io::Result<Report> {
        let (run, findings, broken) = match self {
            Self::Scenario(scenario) => {
                let run = shell::run(&(scenario.sim)(seed), scenario.time, trace)?;
                let broken = scenario.promises.broken_by(&run.findings);
                let findings = run.findings.to_string();
                (run, findings, broken)
            }
            Self::Script(script) => {
                let script::ScriptRun { run, figures, lasted } = script::run(script, seed, trace)?;
                let broken = run.findings.violations.clone();
                let figures = figures.into_iter().map(|(name, Figure { took, promise })| {
                    format!("\n  {name}: {took:.3?}, promised {promise:?}")
                });
                let figures: String = figures.collect();
                (run, format!("ended after {lasted:.3?}{figures}"), broken)
            }
        };
        let (packets, hash, log) = (run.packets, run.hash, run.log);
        Ok(Report { findings, packets, hash, log, broken })
    }
}
