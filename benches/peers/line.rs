//! LISTs, uploads and watches over a long line: a [`relay`](crate::relay) delays every byte between proxy and origin, or
//! between client and origin without a proxy. The direct client has windows like Go's, of 4 MiB.
//!
//! In each round every target is measured once, and the order changes from round to round (A B C, B C A, …), so that
//! changes in the speed of the machine affect all alike. Before its turn a target carries nothing for [`PAUSE`].

use std::{
    collections::BTreeMap, fmt::Write, net::SocketAddr, process::Command, sync::Arc, time::Duration,
};

use rustls::ClientConfig;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep_until};

use crate::{
    Result,
    client::{Client, TOKEN},
    origin,
    process::Process,
    proxies::{Environment, Layer, Proxy, Target},
    report::median,
    started_address,
};

/// Round trips of the lines: the same site, another one, another continent.
const ROUND_TRIPS: [Duration; 3] =
    [Duration::from_millis(2), Duration::from_millis(20), Duration::from_millis(80)];

/// Largest ratio of a LIST through jackstay at L7 to the direct one, at [`CHECKED`] and above.
const LIMIT: f64 = 1.2;
const CHECKED: Duration = Duration::from_millis(20);

/// jackstay's windows shrink to their initial size one second after the last response that needed larger ones.
const PAUSE: Duration = Duration::from_millis(1500);

/// A target that has needed this time for one kind of work is not measured again in later rounds.
const ENOUGH: Duration = Duration::from_secs(3);

/// Events of a watch in one round, at [`origin::EVENTS_PER_SECOND`].
const EVENTS: usize = 1000;

/// Bodies of 200 MB by which the speed of the relay is measured.
const RELAY_RUNS: usize = 3;

/// One column of the table.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Figure {
    /// The first LIST after a pause, and the one after it on the same connection.
    FirstList,
    NextList,
    Object,
    Upload,
    EventMedian,
    EventP99,
    EventCpu,
}

/// How a value is compared with the direct one.
#[derive(PartialEq, Eq)]
enum Comparison {
    /// Seconds; the ratio.
    Ratio,
    /// Microseconds; the difference.
    Added,
    /// Microseconds; not compared.
    Absolute,
}

impl Figure {
    const ALL: [Self; 7] = [
        Self::FirstList,
        Self::NextList,
        Self::Object,
        Self::Upload,
        Self::EventMedian,
        Self::EventP99,
        Self::EventCpu,
    ];

    /// Key in the JSON, label in the table and in the report.
    fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::FirstList => ("first_list_seconds", "first LIST"),
            Self::NextList => ("next_list_seconds", "next LIST"),
            Self::Object => ("get_64_kib_seconds", "GET 64 KiB"),
            Self::Upload => ("upload_seconds", "PUT 20 MB"),
            Self::EventMedian => ("event_delay_median_us", "event, median *"),
            Self::EventP99 => ("event_delay_p99_us", "event, p99 *"),
            Self::EventCpu => ("cpu_us_per_event", "CPU per event"),
        }
    }

    fn comparison(self) -> Comparison {
        match self {
            Self::FirstList | Self::NextList | Self::Object | Self::Upload => Comparison::Ratio,
            Self::EventMedian | Self::EventP99 => Comparison::Added,
            Self::EventCpu => Comparison::Absolute,
        }
    }

    /// The largest ratio of `row` to the direct connection, if there is a limit.
    fn limit(self, row: &Row) -> Option<f64> {
        let limited = matches!(self, Self::FirstList | Self::NextList)
            && (row.target, row.layer) == (Target::Jackstay, Layer::L7)
            && row.round_trip >= CHECKED;
        limited.then_some(LIMIT)
    }
}

/// One kind of client through one proxy, on one line.
struct Row {
    round_trip: Duration,
    target: Target,
    layer: Layer,
    credential: &'static str,
    /// One sample for each of the first rounds. Rows of one line have the same rounds at the same index.
    samples: BTreeMap<Figure, Vec<f64>>,
}

impl Row {
    fn name(&self) -> String {
        if self.target == Target::Direct {
            self.target.name().into()
        } else {
            format!("{} {:?}, {}", self.target.name(), self.layer, self.credential)
        }
    }

    fn samples(&self, figure: Figure) -> &[f64] {
        self.samples.get(&figure).map_or(&[], Vec::as_slice)
    }

    fn add(&mut self, figure: Figure, value: f64) {
        self.samples.entry(figure).or_default().push(value);
    }

    /// Whether the row needs another sample of work whose figures take `seconds` of the clock.
    fn needs(&self, figures: &[Figure]) -> bool {
        let seconds: f64 = figures.iter().flat_map(|&figure| self.samples(figure)).sum();
        seconds < ENOUGH.as_secs_f64()
    }

    /// Whether the row needs another second of events.
    fn needs_events(&self) -> bool {
        let seconds = EVENTS as f64 / f64::from(origin::EVENTS_PER_SECOND);
        (self.samples(Figure::EventMedian).len() as f64) * seconds < ENOUGH.as_secs_f64()
    }
}

/// The results.
pub struct Lines {
    /// Line by line; the first row of each is the direct connection.
    rows: Vec<Row>,
    /// MB per second of a direct client without relay, and through a relay without delay.
    speeds: [Vec<f64>; 2],
}

/// Measures all lines in at most `rounds` rounds each.
pub async fn run(
    environment: &Environment<'_>,
    targets: &[Target],
    rounds: usize,
) -> Result<Lines> {
    let speeds = relay_speeds(environment).await?;
    let mut rows = Vec::new();
    for round_trip in ROUND_TRIPS {
        eprintln!("line of {} ms", round_trip.as_millis());
        let (relay, _relay) = start(environment, round_trip / 2).await?;
        let line = Line {
            environment: Environment { origin: relay, ..*environment },
            round_trip,
            without_certificate: environment.pki.client_config_without_certificate()?,
        };
        rows.extend(line.measure(targets, rounds).await?);
    }
    Ok(Lines { rows, speeds })
}

/// One line.
struct Line<'a> {
    /// The origin is the relay.
    environment: Environment<'a>,
    round_trip: Duration,
    without_certificate: Arc<ClientConfig>,
}

impl Line<'_> {
    async fn measure(&self, targets: &[Target], rounds: usize) -> Result<Vec<Row>> {
        let mut proxies = Vec::new();
        for layer in [Layer::L7, Layer::L4] {
            for &target in targets {
                // HTTP/2 through a proxy at L4 is the client's own, so one peer shows what all do.
                let measured = target.works_at(layer)
                    && (layer == Layer::L7 || matches!(target, Target::Jackstay | Target::Haproxy));
                if measured {
                    let started = self.environment.start(target, layer).await;
                    let started = target.skip_failed_peer(started)?;
                    proxies.extend(started.map(|proxy| (layer, proxy)));
                }
            }
        }
        // The tokens come last, so that other targets are measured between two turns of one proxy. At L4 the credential
        // makes no difference.
        let row = |target, layer, credential| Row {
            round_trip: self.round_trip,
            target,
            layer,
            credential,
            samples: BTreeMap::new(),
        };
        let mut rows = vec![(row(Target::Direct, Layer::L4, "certificate"), None)];
        for (layer, proxy) in &proxies {
            rows.push((row(proxy.target, *layer, "certificate"), Some(proxy)));
        }
        for (layer, proxy) in proxies.iter().filter(|(layer, _)| *layer == Layer::L7) {
            rows.push((row(proxy.target, *layer, "token"), Some(proxy)));
        }

        let mut order: Vec<_> = (0..rows.len()).collect();
        let mut last_used = BTreeMap::new();
        for round in 0..rounds {
            eprintln!("round {} of {rounds}", round + 1);
            for index in std::mem::take(&mut order) {
                let (row, proxy) = &mut rows[index];
                let address = proxy.map_or(self.environment.origin, |proxy| proxy.address);
                if let Some(&last) = last_used.get(&address) {
                    sleep_until(last + PAUSE).await;
                }
                let measured = self.turn(row, address, *proxy).await;
                last_used.insert(address, Instant::now());
                order.extend(row.target.skip_failed_peer(measured)?.map(|()| index));
            }
            order.rotate_left(1);
        }
        Ok(rows.into_iter().map(|(row, _)| row).collect())
    }

    /// One turn of a row: on a new connection, which is warm when the measurement begins.
    async fn turn(&self, row: &mut Row, address: SocketAddr, proxy: Option<&Proxy>) -> Result<()> {
        let (tls, token) = match row.credential {
            "token" => (&self.without_certificate, Some(TOKEN)),
            _ => (self.environment.tls, None),
        };
        let mut client = Client::connect(address, tls).await?.with_token(token);
        client.get(origin::OBJECT).await?;
        if row.needs(&[Figure::FirstList, Figure::NextList]) {
            for (figure, path, bytes) in [
                (Figure::FirstList, origin::LIST, origin::LIST_BYTES),
                (Figure::NextList, origin::LIST, origin::LIST_BYTES),
                (Figure::Object, origin::LONG_OBJECT, origin::LONG_OBJECT_BYTES),
            ] {
                let start = Instant::now();
                let length = client.get(path).await?;
                row.add(figure, start.elapsed().as_secs_f64());
                if length != bytes {
                    return Err(format!("{path}: {length} bytes of {bytes}").into());
                }
            }
        }
        if row.needs(&[Figure::Upload]) {
            let start = Instant::now();
            client.put(origin::OBJECT, origin::UPLOAD_BYTES).await?;
            row.add(Figure::Upload, start.elapsed().as_secs_f64());
        }
        if row.needs_events() {
            let cpu = || proxy.map(|proxy| proxy.process.thread_cpu_seconds()).transpose();
            let before = cpu()?;
            let delays = client.event_delays(EVENTS).await?;
            if let (Some(before), Some(after)) = (before, cpu()?) {
                row.add(Figure::EventCpu, 1e6 * (after - before) / EVENTS as f64);
            }
            let quantile = |q: f64| delays[((EVENTS - 1) as f64 * q) as usize].as_secs_f64() * 1e6;
            row.add(Figure::EventMedian, quantile(0.5));
            row.add(Figure::EventP99, quantile(0.99));
        }
        Ok(())
    }
}

impl Lines {
    /// The direct connection on the line of `row`.
    fn direct(&self, row: &Row) -> Option<&Row> {
        let is_direct =
            |other: &&Row| other.target == Target::Direct && other.round_trip == row.round_trip;
        self.rows.iter().find(is_direct)
    }

    /// The median over the rounds of the ratio to the direct connection, or of the difference.
    fn compared(&self, row: &Row, figure: Figure) -> Option<f64> {
        let compare: fn(&f64, &f64) -> f64 = match figure.comparison() {
            Comparison::Ratio => |value, direct| value / direct,
            Comparison::Added => |value, direct| value - direct,
            Comparison::Absolute => return None,
        };
        let pairs = row.samples(figure).iter().zip(self.direct(row)?.samples(figure));
        median(&pairs.map(|(value, direct)| compare(value, direct)).collect::<Vec<_>>())
    }

    /// The rows that have a limit for `figure`, with the limit.
    fn limited(&self, figure: Figure) -> impl Iterator<Item = (&Row, f64)> {
        self.rows.iter().filter_map(move |row| Some((row, figure.limit(row)?)))
    }

    /// Name, ratio and limit of each measured figure that has a limit.
    pub fn figures(&self) -> Vec<(String, f64, f64)> {
        let mut figures = Vec::new();
        for figure in Figure::ALL {
            for (row, limit) in self.limited(figure) {
                let Some(ratio) = self.compared(row, figure) else { continue };
                let (round_trip, label) = (row.round_trip.as_millis(), figure.names().1);
                let name = format!("{round_trip} ms, {label}, {}, × direct", row.credential);
                figures.push((name, ratio, limit));
            }
        }
        figures
    }

    /// Whether jackstay was measured and meets every limit.
    pub fn meets_all(&self) -> bool {
        let figures = self.figures();
        !figures.is_empty() && figures.iter().all(|(_, ratio, limit)| ratio <= limit)
    }

    /// The table, the speed of the relay and the slowest LIST.
    pub fn table(&self) -> String {
        let mut out = format!("{:<34}", "seconds, × direct; events in µs");
        for figure in Figure::ALL {
            let _ = write!(out, "{:>16}", figure.names().1);
        }
        out.push('\n');
        for row in &self.rows {
            let name = format!("{} ms, {}", row.round_trip.as_millis(), row.name());
            let _ = write!(out, "{name:<34}");
            for figure in Figure::ALL {
                let _ = write!(out, "{:>16}", self.cell(row, figure));
            }
            out.push('\n');
        }
        out += "* delay from origin to client: absolute for direct, added for the others.\n";
        let [direct, relay] =
            self.speeds.each_ref().map(|speeds| median(speeds).unwrap_or(f64::NAN));
        let _ = writeln!(
            out,
            "limit of the bench: direct, a body of 200 MB at {relay:.0} MB/s through a relay without delay, at \
             {direct:.0} MB/s without relay",
        );
        for figure in Figure::ALL {
            let ratios = self.limited(figure).filter_map(|(row, _)| self.compared(row, figure));
            if let Some(slowest) = ratios.reduce(f64::max) {
                let label = figure.names().1;
                let _ = writeln!(
                    out,
                    "slowest {label} through jackstay at L7 from {CHECKED:?}: ×{slowest:.2}, limit ×{LIMIT}"
                );
            }
        }
        out
    }

    fn cell(&self, row: &Row, figure: Figure) -> String {
        let Some(value) = median(row.samples(figure)) else { return "–".into() };
        match (figure.comparison(), self.compared(row, figure)) {
            (Comparison::Ratio, ratio) => {
                let ratio = ratio.map_or(String::new(), |ratio| format!("×{ratio:.2}"));
                format!("{value:.3} {ratio:>6}")
            }
            (Comparison::Added, Some(added)) if row.target != Target::Direct => {
                format!("{added:+.0}")
            }
            _ => format!("{value:.0}"),
        }
    }

    /// Medians, comparisons with direct and all samples.
    pub fn json(&self) -> Value {
        let mut metrics = serde_json::Map::new();
        for (name, speeds) in
            ["direct_mb_per_second", "relay_mb_per_second"].iter().zip(&self.speeds)
        {
            let cell = json!({ "median": median(speeds), "samples": speeds });
            metrics.insert((*name).into(), json!({ "direct": cell }));
        }
        for round_trip in ROUND_TRIPS {
            for figure in Figure::ALL {
                let mut cells = serde_json::Map::new();
                let mut met = None;
                for row in self.rows.iter().filter(|row| row.round_trip == round_trip) {
                    let samples = row.samples(figure);
                    if samples.is_empty() {
                        continue;
                    }
                    let compared = self.compared(row, figure);
                    let comparison = match figure.comparison() {
                        Comparison::Ratio => "ratio_to_direct",
                        Comparison::Added | Comparison::Absolute => "added_to_direct",
                    };
                    let cell = json!({ "median": median(samples), comparison: compared, "samples": samples });
                    cells.insert(row.name(), cell);
                    if let (Some(limit), Some(ratio)) = (figure.limit(row), compared) {
                        met = Some(met.unwrap_or(true) && ratio <= limit);
                    }
                }
                if let Some(met) = met {
                    cells.insert("limit_met".into(), met.into());
                }
                let name = format!("line_{}_ms_{}", round_trip.as_millis(), figure.names().0);
                metrics.insert(name, cells.into());
            }
        }
        metrics.into()
    }
}

/// The speed of the direct client without relay, and through a relay without delay, in MB per second.
async fn relay_speeds(environment: &Environment<'_>) -> Result<[Vec<f64>; 2]> {
    let (relay, _relay) = start(environment, Duration::ZERO).await?;
    let mut speeds = [const { Vec::new() }; 2];
    for _ in 0..RELAY_RUNS {
        for (address, speeds) in [environment.origin, relay].into_iter().zip(&mut speeds) {
            let mut client = Client::connect(address, environment.tls).await?;
            client.get(origin::OBJECT).await?;
            let start = Instant::now();
            let bytes = client.get(origin::BULK).await?;
            speeds.push(bytes as f64 / 1e6 / start.elapsed().as_secs_f64());
        }
    }
    Ok(speeds)
}

/// Starts this program as the relay.
async fn start(environment: &Environment<'_>, delay: Duration) -> Result<(SocketAddr, Process)> {
    let mut command = Command::new(std::env::current_exe()?);
    let delay_micros = delay.as_micros().to_string();
    command.args(["relay", &environment.origin.to_string(), &delay_micros]);
    started_address(command, &environment.dir.join("relay.log")).await
}
