//! A child process that is killed when dropped, with its CPU time and memory.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::Duration,
};

use crate::Result;

/// A child process whose output goes to a log file.
pub struct Process {
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts `command` with its output in `log`. Standard input is a pipe that closes when this process exits.
    pub fn start(mut command: Command, log: &Path) -> Result<Self> {
        let out = File::create(log)?;
        command.stdin(Stdio::piped()).stdout(out.try_clone()?).stderr(out);
        let child = command
            .spawn()
            .map_err(|error| format!("{}: {error}", command.get_program().display()))?;
        Ok(Self { child, log: log.to_owned() })
    }

    /// The pid.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The exit status, or `None` while the process runs.
    pub fn try_wait(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.child.try_wait()?)
    }

    /// Waits until the child exits by itself.
    pub async fn wait(&mut self, limit: Duration) -> Result<ExitStatus> {
        let poll = async {
            loop {
                if let Some(status) = self.try_wait()? {
                    return Ok(status);
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(limit, poll).await.map_err(|_| "did not exit in time")?
    }

    /// The output so far.
    pub fn output(&self) -> String {
        fs::read(&self.log)
            .map(|log| String::from_utf8_lossy(&log).into_owned())
            .unwrap_or_default()
    }

    /// CPU seconds of the whole process since its start, user and system.
    pub fn cpu_seconds(&self, ticks_per_second: f64) -> Result<f64> {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.child.id()))?;
        // The command name, field 2, may contain any character. Field 3 follows its closing parenthesis, so utime
        // (field 14) and stime (field 15) have the indexes 11 and 12 from there.
        let rest = stat.rsplit_once(')').ok_or("no command in /proc/PID/stat")?.1;
        let ticks: Vec<u64> = rest
            .split_whitespace()
            .skip(11)
            .take(2)
            .map(str::parse)
            .collect::<std::result::Result<_, _>>()?;
        Ok(ticks.iter().sum::<u64>() as f64 / ticks_per_second)
    }

    /// CPU seconds of the threads that run, exact to the nanosecond: [`Self::cpu_seconds`] counts ticks of 10 ms. A thread
    /// that has ended is not included.
    pub fn thread_cpu_seconds(&self) -> Result<f64> {
        let mut nanos = 0;
        for task in fs::read_dir(format!("/proc/{}/task", self.child.id()))? {
            // Fields of schedstat: time on a core, time in the run queue, in nanoseconds, and the number of turns.
            let stat = fs::read_to_string(task?.path().join("schedstat"))?;
            nanos += stat.split(' ').next().unwrap_or_default().parse::<u64>()?;
        }
        Ok(nanos as f64 / 1e9)
    }

    /// Resident memory in KiB.
    pub fn rss_kib(&self) -> Result<f64> {
        self.kib("status", "VmRSS:")
    }

    /// Proportional set size in KiB: shared pages are divided among the processes. The kernel counts it page by page at
    /// each read, while `VmRSS` is a counter that may lag.
    pub fn pss_kib(&self) -> Result<f64> {
        self.kib("smaps_rollup", "Pss:")
    }

    fn kib(&self, file: &str, name: &str) -> Result<f64> {
        let text = fs::read_to_string(format!("/proc/{}/{file}", self.child.id()))?;
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        let kib = line.and_then(|line| line.split_whitespace().next());
        Ok(kib.ok_or_else(|| format!("no {name} in {file}"))?.parse()?)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Clock ticks per second in `/proc/PID/stat`.
pub fn ticks_per_second() -> Result<f64> {
    let out = Command::new("getconf").arg("CLK_TCK").output()?;
    Ok(String::from_utf8_lossy(&out.stdout).trim().parse()?)
}
