//! Renewals on a virtual clock: a machine with its files, and a kubelet that keeps the CAs which it read at its start.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use jackstay_kubeconfig::KubeconfigFile;
use jackstay_net::tls::pem_files::valid_certificates;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier;
use rustls::pki_types::{ServerName, UnixTime};

use super::*;

const DAY: Duration = Duration::from_secs(24 * 3600);
const UNIT: &str = "kubelet.service";
const NAMES: [&str; 2] = ["127.0.0.1", "node-1"];

fn day(number: u32) -> SystemTime {
    UNIX_EPOCH + DAY * (20_000 + number)
}

/// The number of seeds; in the long form of the tests more.
fn seeds(short: u64) -> u64 {
    if std::env::var_os("JACKSTAY_LONG").is_some() { 4 * short } else { short }
}

/// Days with a run of the timer: each one near a step of a renewal and in `dense`, in between each fourth one.
fn days_of(until: u32, dense: std::ops::Range<u32>) -> impl Iterator<Item = u32> {
    let is_near_step = |day: u32| {
        [243, 344, 365, 486, 587, 608, 729].iter().any(|step| day + 2 >= *step && day <= step + 16)
    };
    (0..until).filter(move |day| day % 4 == 0 || is_near_step(*day) || dense.contains(day))
}

type Cas = Vec<CertificateDer<'static>>;

/// A client that runs, such as kubelet, and has read its CAs at its start.
struct Client {
    kubeconfig: PathBuf,
    invocation: u32,
    cas: Cas,
}

/// A machine.
struct Machine {
    dir: tempfile::TempDir,
    kubeconfigs: Vec<PathBuf>,
    kubelet: Client,
    /// Whether the renewal knows the unit of kubelet.
    is_observed: bool,
    /// Whether the renewal may restart it.
    may_restart: bool,
    restarts: u32,
    switches: Vec<SystemTime>,
    alarms: u32,
    /// What was verified last, for each kind of client.
    verified: [Option<Verified>; 2],
}

/// A successful verification.
struct Verified {
    leaf: CertificateDer<'static>,
    cas: Cas,
    /// It holds from this time.
    from: SystemTime,
    /// It holds until this time, two days before the certificate expires.
    until: SystemTime,
}

impl Machine {
    /// A machine that was set up at `now`, with one kubeconfig that a running kubelet has read.
    fn new(now: SystemTime) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let created = create_pair(now);
        std::fs::write(dir.path().join("local-ca.crt"), &created.ca).unwrap();
        std::fs::write(dir.path().join("serving.pem"), &created.pair).unwrap();
        let kubeconfig = dir.path().join("kubelet.conf");
        write_kubeconfig(&kubeconfig, &created.ca);
        let cas = valid_certificates(created.ca.as_bytes());
        Self {
            kubelet: Client { kubeconfig: kubeconfig.clone(), invocation: 1, cas },
            kubeconfigs: vec![kubeconfig],
            dir,
            is_observed: true,
            may_restart: true,
            restarts: 0,
            switches: Vec::new(),
            alarms: 0,
            verified: [None, None],
        }
    }

    fn serving(&self) -> PathBuf {
        self.dir.path().join("serving.pem")
    }

    fn plan(&self, now: SystemTime, force: bool) -> RenewalPlan {
        let kubeconfigs: Vec<Listed> = self.kubeconfigs.iter().map(|path| listed(path)).collect();
        let kubelet = Reader {
            unit: UNIT.to_owned(),
            invocation: self.kubelet.invocation.to_string(),
            kubeconfigs: vec![self.kubelet.kubeconfig.clone()],
        };
        let readers: Vec<Reader> = Some(kubelet).into_iter().filter(|_| self.is_observed).collect();
        let serving = &self.serving();
        let kubeconfigs = &kubeconfigs;
        plan(&RenewalRequest { serving, kubeconfigs, readers: &readers, now, force }).unwrap()
    }

    /// A run that is killed after `limit` changes of files. Returns whether it was complete.
    fn run_until(&mut self, now: SystemTime, force: bool, limit: usize) -> bool {
        let plan = self.plan(now, force);
        self.alarms += u32::from(plan.alarm.is_some());
        let changes = changes(&plan);
        for change in changes.iter().take(limit) {
            change.apply();
        }
        if limit < changes.len() {
            return false;
        }
        if !plan.switch.is_empty() {
            self.switches.push(now);
        }
        let is_due = |(_, restart): &(String, Restart)| restart.is_due(now);
        if self.may_restart && plan.restarts.iter().any(is_due) {
            self.restarts += 1;
            self.restart_kubelet();
        }
        true
    }

    fn run(&mut self, now: SystemTime) {
        assert!(self.run_until(now, false, usize::MAX));
    }

    fn restart_kubelet(&mut self) {
        self.kubelet.invocation += 1;
        self.kubelet.cas = cas_in(&self.kubelet.kubeconfig);
    }

    /// Verifies the served certificate as a client with these CAs does.
    fn verify(
        &self,
        cas: &[CertificateDer<'static>],
        now: SystemTime,
    ) -> Result<(), rustls::Error> {
        let leaf = self.leaf();
        let mut roots = rustls::RootCertStore::empty();
        roots.add_parsable_certificates(cas.iter().cloned());
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let verifier = WebPkiServerVerifier::builder_with_provider(roots.into(), provider);
        let now = UnixTime::since_unix_epoch(now.duration_since(UNIX_EPOCH).unwrap());
        let name = ServerName::try_from("127.0.0.1").unwrap();
        let verifier = verifier.build().unwrap();
        verifier.verify_server_cert(&leaf, &[], &name, &[], now).map(drop)
    }

    /// kubelet connects anew, as after a restart of jackstay, and so does a client that reads its kubeconfig now.
    /// Between two times at which certificates are valid they are, so each combination is verified at its first and
    /// last days.
    fn assert_served(&mut self, now: SystemTime, what: &str) {
        let read = cas_in(&self.kubelet.kubeconfig);
        let leaf = self.leaf();
        for (index, cas) in [self.kubelet.cas.clone(), read].into_iter().enumerate() {
            let last = self.verified[index].take();
            let last = last.filter(|last| last.leaf == leaf && last.cas == cas);
            if let Some(last) = last
                && last.from <= now
                && now < last.until
            {
                self.verified[index] = Some(last);
                continue;
            }
            let verified = self.verify(&cas, now);
            let day = now.duration_since(day(0)).map_or(0, |since| since.as_secs() / 86_400);
            assert!(verified.is_ok(), "day {day}, client {index}, {what}: {verified:?}");
            let until = cert_info(&leaf).unwrap().not_after - DAY * 2;
            self.verified[index] = Some(Verified { leaf: leaf.clone(), cas, from: now, until });
        }
    }

    fn leaf(&self) -> CertificateDer<'static> {
        valid_certificates(&std::fs::read(self.serving()).unwrap()).remove(0)
    }

    fn bundle(&self) -> Cas {
        valid_certificates(&std::fs::read(self.dir.path().join("local-ca.crt")).unwrap())
    }
}

enum Change<'a> {
    Write(&'a Path, Vec<u8>, u32),
    Remove(&'a Path),
}

impl Change<'_> {
    fn apply(&self) {
        match self {
            // Without the sync of `files::replace`, which takes most of the time of these tests.
            Self::Write(path, bytes, mode) => {
                std::fs::write(path, bytes).unwrap();
                std::fs::set_permissions(path, Permissions::from_mode(*mode)).unwrap();
            }
            Self::Remove(path) => std::fs::remove_file(path).unwrap(),
        }
    }
}

/// The changes of files in the order of the command.
fn changes(plan: &RenewalPlan) -> Vec<Change<'_>> {
    let state = Change::Write(&plan.state_file, plan.state.to_json(), PUBLIC);
    let is_new = RenewalState::read(&plan.state_file) != plan.state;
    let outputs = plan.publish.iter().chain(&plan.kubeconfigs).chain(&plan.switch);
    let writes = outputs.map(|file| Change::Write(&file.path, file.bytes.clone(), file.mode));
    let removals = plan.remove.iter().map(|path| Change::Remove(path));
    Some(state).into_iter().filter(|_| is_new).chain(writes).chain(removals).collect()
}

fn create_pair(now: SystemTime) -> local_ca::NewServingCert {
    let names = NAMES.map(ToOwned::to_owned);
    local_ca::create_serving_cert("jackstay on node-1", &names, now).unwrap()
}

fn listed(path: &Path) -> Listed {
    let content = match std::fs::read(path) {
        Ok(bytes) => KubeconfigFile::parse(path, &bytes).map(Some),
        Err(_) => Ok(None),
    };
    Listed { path: path.to_owned(), content: content.map_err(|error| error.to_string()) }
}

fn write_kubeconfig(path: &Path, ca: &str) {
    let data = STANDARD.encode(ca);
    let text = format!(
        "apiVersion: v1\nkind: Config\nclusters:\n- name: c\n  cluster:\n    server: https://127.0.0.1:7443\n    \
         certificate-authority-data: {data}\n"
    );
    std::fs::write(path, text).unwrap();
}

/// The CAs in a kubeconfig.
fn cas_in(path: &Path) -> Cas {
    of_kubeconfigs(&[listed(path)])
}

/// Eight hundred days with daily runs: kubelet verifies the served certificate on each day, whatever restarts when.
#[test]
fn renewal_clients_are_served_on_each_of_800_days() {
    for seed in 0..seeds(1) {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut machine = Machine::new(day(0));
        for number in 0..800 {
            let now = day(number) + Duration::from_secs(random.u64(0..20_000));
            // Not each run is complete.
            let limit = if random.u8(..) < 20 { random.usize(0..6) } else { usize::MAX };
            let is_complete = machine.run_until(now, false, limit);
            machine.assert_served(now, &format!("seed {seed}, complete: {is_complete}"));
            if seed % 3 == 1 && random.u8(..) < 8 {
                machine.restart_kubelet();
            }
            machine.assert_served(now + DAY / 2, &format!("seed {seed}, in the evening"));
        }
        assert_eq!(machine.switches.len(), 2, "seed {seed}: {:?}", machine.switches);
        assert_eq!(machine.alarms, 0, "seed {seed}");
        let [first, second] = [machine.switches[0], machine.switches[1]];
        assert!(first >= day(344) && first < day(347), "seed {seed}");
        assert!(second >= day(586) && second < day(590), "seed {seed}");
        assert!(
            machine.restarts <= 3 && (machine.restarts == 3 || seed % 3 == 1),
            "{}",
            machine.restarts
        );
        assert!(
            machine.bundle().len() == 2,
            "the expired CA is dropped, the third one is published"
        );
    }
}

/// A restart of kubelet by its operator at each stage makes the restart by the renewal unnecessary, and never harms.
#[test]
fn renewal_kubelet_restarted_at_each_stage_is_served() {
    for restarted in (232..620).step_by(usize::try_from(140 / seeds(1)).unwrap()) {
        let mut machine = Machine::new(day(0));
        for number in days_of(620, restarted..restarted + 2) {
            if number == restarted {
                machine.restart_kubelet();
                machine.assert_served(day(number), "restarted before the run");
            }
            machine.run(day(number));
            machine.assert_served(day(number), &format!("restarted on day {restarted}"));
        }
        assert_eq!(machine.alarms, 0);
    }
}

/// A machine that is off for weeks or longer: served when it runs after its first run, at the latest.
#[test]
fn renewal_machine_that_was_off_is_served_after_its_first_run() {
    for seed in 0..seeds(1) {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut machine = Machine::new(day(0));
        let mut number = 0;
        while number < 800 {
            let off = random.u32(0..if seed % 2 == 0 { 40 } else { 400 });
            number += off;
            // kubelet starts at boot, before the renewal runs.
            machine.restart_kubelet();
            for _ in 0..random.u32(1..60) {
                machine.run(day(number));
                machine.assert_served(day(number), &format!("seed {seed}, off for {off} days"));
                number += 1;
            }
        }
    }
}

/// Whichever change of a run is the last one before a kill, all clients are served, and the next run goes on.
#[test]
fn renewal_killed_after_each_change_goes_on() {
    let forced = [(10, true), (11, true)];
    let on_time = [(244, false), (260, false), (300, false), (345, false), (366, false)];
    for (name, steps) in [("forced", &forced[..]), ("on time", &on_time[..])] {
        for killed in 0..steps.len() {
            for limit in 0..7 {
                let mut machine = Machine::new(day(0));
                let first = machine.leaf();
                for (index, (number, force)) in steps.iter().enumerate() {
                    let now = day(*number);
                    let context = format!("{name}, step {killed} killed after {limit} changes");
                    if index == killed && !machine.run_until(now, *force, limit) {
                        machine.assert_served(now, &context);
                        // A user repeats the command unless the new certificate is served.
                        let again = *force && machine.leaf() == first;
                        assert!(machine.run_until(now, again, usize::MAX), "{context}");
                    } else if index != killed {
                        machine.run_until(now, *force, usize::MAX);
                    }
                    machine.assert_served(now, &context);
                    if name == "forced" {
                        machine.restart_kubelet();
                    }
                }
                let cas = machine.bundle().len();
                assert!(
                    machine.leaf() != first && cas <= 2,
                    "{name}, {killed}, {limit}: {cas} CAs"
                );
                let temporary = files_in(machine.dir.path());
                assert!(temporary.iter().all(|name| !name.starts_with('.')), "{temporary:?}");
            }
        }
    }
}

fn files_in(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

/// kubelet is not restarted: the old certificate is served until its last days, and each run from the planned switch on
/// raises an alarm.
#[test]
fn renewal_without_restart_of_a_known_client_waits_and_alarms() {
    let mut machine = Machine::new(day(0));
    machine.may_restart = false;
    for number in 0..362 {
        machine.run(day(number));
        machine.assert_served(day(number), "the old certificate");
    }
    assert_eq!(machine.alarms, 362 - 344);
    machine.run(day(363));
    assert_eq!(machine.switches, [day(363)]);
    assert!(machine.verify(&machine.kubelet.cas, day(363)).is_err(), "kubelet has the old CA only");
    let restarts = machine.plan(day(363), false).restarts;
    assert_eq!(restarts, [(UNIT.to_owned(), Restart::Now)]);
}

/// A client whose unit is not known gets the time until the switch.
#[test]
fn renewal_of_unknown_clients_serves_the_old_certificate_for_three_months() {
    let mut machine = Machine::new(day(0));
    machine.is_observed = false;
    for number in 0..344 {
        machine.run(day(number));
        machine.assert_served(day(number), "the old certificate");
    }
    machine.restart_kubelet();
    for number in 344..400 {
        machine.run(day(number));
        machine.assert_served(day(number), "restarted before the switch");
    }
    assert_eq!(machine.switches, [day(344)]);
}

/// Kubeconfigs that are missing, damaged, of another cluster or rewritten by hand are warnings; those that trust the
/// local CA get what they lack at the next run.
#[test]
fn renewal_repairs_kubeconfigs_and_warns_of_others() {
    let mut machine = Machine::new(day(0));
    let old = machine.bundle();
    let [missing, damaged, other, late] =
        ["missing", "damaged", "other", "late"].map(|name| machine.dir.path().join(name));
    std::fs::write(&damaged, "clusters: 1").unwrap();
    let foreign =
        local_ca::create_serving_cert("other", &NAMES.map(ToOwned::to_owned), day(0)).unwrap();
    write_kubeconfig(&other, &foreign.ca);
    machine.kubeconfigs.extend([missing, damaged, other.clone(), late.clone()]);
    let before = std::fs::read(&other).unwrap();
    let plan = machine.plan(day(244), false);
    assert_eq!((plan.action, plan.alarm, plan.warnings.len()), (Action::Publish, None, 4));
    for number in 244..340 {
        machine.run(day(number));
        machine.assert_served(day(number), "published");
    }
    assert_eq!(std::fs::read(&other).unwrap(), before, "a foreign CA");
    // Both are written by hand with the first CA.
    write_kubeconfig(&late, &pem_of(&old[0]));
    write_kubeconfig(&machine.kubelet.kubeconfig.clone(), &pem_of(&old[0]));
    machine.run(day(340));
    for path in [&late, &machine.kubelet.kubeconfig] {
        assert_eq!(cas_in(path), machine.bundle());
    }
    // The clients of those get two weeks from the first run that sees the CA.
    for number in 341..366 {
        machine.run(day(number));
        machine.assert_served(day(number), "rewritten by hand");
    }
    assert_eq!(machine.switches, [day(355)]);
    // A kubeconfig of a machine's first year is known by the name of its CA.
    machine.run(day(380));
    write_kubeconfig(&late, &pem_of(&old[0]));
    machine.run(day(381));
    assert_eq!(cas_in(&late), machine.bundle());
}

#[test]
fn renewal_without_a_kubeconfig_alarms_and_switches_in_the_last_days() {
    let mut machine = Machine::new(day(0));
    machine.kubeconfigs = vec![machine.dir.path().join("missing")];
    machine.is_observed = false;
    for number in 240..362 {
        machine.run(day(number));
    }
    assert_eq!((machine.alarms, machine.switches.len()), (362 - 243, 0));
    machine.run(day(362));
    assert_eq!(machine.switches, [day(362)]);
}

/// A CA that a user has added to the cluster stays.
#[test]
fn renewal_keeps_foreign_cas_of_a_cluster() {
    let machine = Machine::new(day(0));
    let foreign =
        local_ca::create_serving_cert("other", &NAMES.map(ToOwned::to_owned), day(0)).unwrap();
    let path = machine.kubelet.kubeconfig.clone();
    write_kubeconfig(&path, &format!("{}{}", pem_of(&machine.bundle()[0]), foreign.ca));
    let mut machine = machine;
    machine.run(day(250));
    let cas = cas_in(&path);
    assert_eq!((cas.len(), &cas[2]), (3, &valid_certificates(foreign.ca.as_bytes())[0]));
}

/// A kubeconfig that names the published file needs no change; one that names a copy cannot be changed.
#[test]
fn renewal_reads_the_ca_from_a_named_file() {
    let mut machine = Machine::new(day(0));
    let (named, copied) = (machine.dir.path().join("named"), machine.dir.path().join("copied"));
    for (path, file) in [(&named, "local-ca.crt"), (&copied, "copy.crt")] {
        let cluster =
            format!("{{server: 'https://127.0.0.1:7443', certificate-authority: {file}}}");
        let text =
            format!("apiVersion: v1\nkind: Config\nclusters:\n- name: c\n  cluster: {cluster}\n");
        std::fs::write(path, text).unwrap();
    }
    let ca = machine.dir.path().join("local-ca.crt");
    std::fs::copy(&ca, machine.dir.path().join("copy.crt")).unwrap();
    machine.kubeconfigs.extend([named.clone(), copied]);
    for number in 244..346 {
        machine.run(day(number));
    }
    let plan = machine.plan(day(346), false);
    assert!(plan.kubeconfigs.is_empty());
    let (warning, alarm) = (plan.warnings.join(" "), plan.alarm.unwrap());
    assert!(warning.contains("copy.crt") && alarm.contains("copied"), "{warning} {alarm}");
    assert!(!alarm.contains("named"), "{alarm}");
    std::fs::copy(&ca, machine.dir.path().join("copy.crt")).unwrap();
    for number in 346..361 {
        machine.run(day(number));
    }
    assert_eq!(machine.switches, [day(360)]);
}

/// A clock that is years ahead, or back, for a while: when it is right again, the first run makes everything work.
#[test]
fn renewal_with_a_wrong_clock_does_no_harm_that_stays() {
    let jumps: &[i64] = &[-20_000, 400, -120, 4000, -400, -20, 20, 120];
    let jumps = if seeds(1) > 1 { jumps } else { &jumps[..3] };
    let wrong: &[(u32, u32)] = &[(300, 1), (346, 2), (100, 5), (250, 3), (500, 4)];
    let wrong = if seeds(1) > 1 { wrong } else { &wrong[..2] };
    for (wrong_from, lasts) in wrong.iter().copied() {
        for jump in jumps.iter().copied() {
            let mut machine = Machine::new(day(0));
            for number in days_of(640, wrong_from - 1..wrong_from + lasts + 20) {
                let is_wrong = (wrong_from..wrong_from + lasts).contains(&number);
                let clock = if is_wrong { jumped(number, jump) } else { day(number) };
                machine.run(clock);
                if !is_wrong {
                    machine.assert_served(day(number), &format!("day {wrong_from}, {jump} days"));
                }
            }
            let files = files_in(machine.dir.path());
            assert!(files.len() <= 6, "{files:?}");
        }
    }
}

fn jumped(number: u32, by: i64) -> SystemTime {
    let days = 20_000 + i64::from(number) + by;
    UNIX_EPOCH + DAY * u32::try_from(days.max(0)).unwrap()
}

/// The state after a renewal by an earlier version: two CAs, that of the served certificate first, and no other pair.
#[test]
fn renewal_understands_the_files_of_earlier_versions() {
    let mut machine = Machine::new(day(0));
    let old = machine.bundle();
    let created = create_pair(day(250));
    let bundle = format!("{}{}", created.ca, pem_of(&old[0]));
    std::fs::write(machine.dir.path().join("local-ca.crt"), &bundle).unwrap();
    std::fs::write(machine.serving(), &created.pair).unwrap();
    write_kubeconfig(&machine.kubelet.kubeconfig.clone(), &bundle);
    machine.restart_kubelet();
    let plan = machine.plan(day(251), false);
    assert!(plan.publish.is_empty() && plan.kubeconfigs.is_empty() && plan.switch.is_empty());
    for number in days_of(800, 0..0).skip_while(|number| *number < 251) {
        machine.run(day(number));
        machine.assert_served(day(number), "after a renewal of an earlier version");
        assert_eq!(machine.bundle().contains(&old[0]), number <= 365, "day {number}");
    }
    assert_eq!(machine.switches.len(), 1);
}

/// A next pair for other names, and one that is damaged, are replaced by a new one.
#[test]
fn renewal_replaces_a_next_pair_of_no_use() {
    let mut machine = Machine::new(day(0));
    let next = machine.dir.path().join("serving.next.pem");
    for content in ["", "damaged", &create_pair(day(0)).pair] {
        std::fs::write(&next, content).unwrap();
        machine.run(day(1));
        assert!(!next.exists(), "it is removed");
        std::fs::write(&next, content).unwrap();
        let plan = machine.plan(day(250), false);
        assert_eq!((plan.action, plan.remove.len()), (Action::Publish, 0));
    }
    let other = local_ca::create_serving_cert("x", &["node-2".to_owned()], day(1)).unwrap();
    std::fs::write(&next, format!("{}{}", other.pair, other.ca)).unwrap();
    assert_eq!(machine.plan(day(250), false).action, Action::Publish);
    machine.run(day(250));
    let pair = std::fs::read(&next).unwrap();
    assert_eq!(valid_certificates(&pair).len(), 2);
    assert_eq!(std::fs::metadata(&next).unwrap().permissions().mode() & 0o777, 0o600);
    let keys = String::from_utf8(pair).unwrap().matches("PRIVATE KEY-----").count();
    assert_eq!(keys, 2, "the only key is that of the serving certificate");
}

/// A run for another kubeconfig, a lost state and a unit that is named later do not make a client trusted that has not
/// started since the publication.
#[test]
fn renewal_state_that_is_lost_restarts_a_client_once_more() {
    let mut machine = Machine::new(day(0));
    machine.may_restart = false;
    machine.run(day(244));
    let lacks = |machine: &Machine| {
        !matches!(machine.plan(day(260), false).restarts[..], [(_, Restart::NotNeeded)])
    };
    let kubeconfigs = std::mem::take(&mut machine.kubeconfigs);
    machine.is_observed = false;
    machine.run(day(245));
    machine.kubeconfigs = kubeconfigs;
    machine.is_observed = true;
    assert!(lacks(&machine), "a run that does not know of it");
    std::fs::remove_file(machine.dir.path().join(STATE_FILE)).unwrap();
    assert!(lacks(&machine), "a lost state");
    machine.run(day(246));
    assert!(lacks(&machine));
    machine.restart_kubelet();
    assert!(!lacks(&machine));
}

/// The restarts of a fleet are spread over two weeks.
#[test]
fn renewal_spreads_restarts_of_a_fleet() {
    let mut days: Vec<u64> = (0..40)
        .map(|_| {
            let mut machine = Machine::new(day(0));
            machine.run(day(244));
            let plan = machine.plan(day(245), false);
            let [(_, Restart::At(time))] = plan.restarts[..] else { panic!("{:?}", plan.restarts) };
            let announced = plan.restarts[0].1.describe(UNIT).unwrap();
            assert!(announced.contains("is restarted after"), "{announced}");
            time.duration_since(day(245)).unwrap().as_secs() / 86_400
        })
        .collect();
    assert!(days.iter().all(|day| *day < 14), "{days:?}");
    days.sort_unstable();
    days.dedup();
    // 40 places on 14 days: fewer than 6 different days have a probability below 1e-12.
    assert!(days.len() >= 6, "{days:?}");
}
