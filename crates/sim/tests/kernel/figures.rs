//! What a case has measured, and how much the two sides may differ.

use std::fmt::Write as _;
use std::io;
use std::time::Duration;

use jackstay_core::tcp_info::TcpInfo;

/// How much a figure may differ, and why it may.
#[derive(Debug, Clone, Copy)]
pub struct Tolerance {
    /// In the unit of the figure.
    absolute: f64,
    /// Of the larger one.
    ratio: f64,
    reason: &'static str,
}

impl Tolerance {
    /// None.
    pub const NONE: Self = Self::by(0.0, 0.0, "equal");
    /// Of a time that timers of the kernel decide: its wheel rounds them up by an eighth at most
    /// (`kernel/time/timer.c`), and the machine may be busy.
    pub const TIMER: Self = Self::by(0.05, 0.125, "timer wheel: an eighth; machine: 50 ms");
    /// Of a time without timers.
    pub const PROMPT: Self = Self::by(0.05, 0.0, "machine: 50 ms");

    /// An absolute difference, and a ratio of the larger one.
    pub const fn by(absolute: f64, ratio: f64, reason: &'static str) -> Self {
        Self { absolute, ratio, reason }
    }

    fn allows(&self, one: f64, other: f64) -> bool {
        (one - other).abs() <= self.absolute + self.ratio * one.abs().max(other.abs())
    }
}

#[derive(Debug, PartialEq)]
enum Value {
    /// A number, or one for each of several moments. Times are in seconds.
    Numbers(Vec<f64>),
    Text(String),
}

impl std::fmt::Display for Value {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Numbers(numbers) => {
                let rounded = numbers.iter().map(|number| (number * 1e4).round() / 1e4);
                f.write_str(&rounded.map(|number| number.to_string()).collect::<Vec<_>>().join(" "))
            }
            Self::Text(text) => f.write_str(text),
        }
    }
}

struct Figure {
    name: String,
    value: Value,
    tolerance: Tolerance,
}

/// The figures of a case.
#[derive(Default)]
pub struct Figures(Vec<Figure>);

impl Figures {
    pub fn time(&mut self, name: &str, value: Duration, tolerance: Tolerance) {
        self.times(name, &[value], tolerance);
    }

    pub fn times(&mut self, name: &str, values: &[Duration], tolerance: Tolerance) {
        self.numbers(name, values.iter().map(Duration::as_secs_f64).collect(), tolerance);
    }

    pub fn count(&mut self, name: &str, value: u64, tolerance: Tolerance) {
        self.numbers(name, vec![value as f64], tolerance);
    }

    pub fn numbers(&mut self, name: &str, values: Vec<f64>, tolerance: Tolerance) {
        self.push(name, Value::Numbers(values), tolerance);
    }

    /// A text, which is the same on both sides.
    pub fn text(&mut self, name: &str, value: impl Into<String>) {
        self.push(name, Value::Text(value.into()), Tolerance::NONE);
    }

    /// What an operation has returned: a number of bytes, or the kind of an error.
    pub fn result(&mut self, name: &str, result: &io::Result<usize>) {
        self.text(
            name,
            match result {
                Ok(bytes) => format!("{bytes} bytes"),
                Err(error) => format!("{:?}", error.kind()),
            },
        );
    }

    /// Fields of `TCP_INFO` at several moments.
    pub fn infos<'a>(&mut self, infos: &[TcpInfo], fields: impl IntoIterator<Item = &'a Field>) {
        for field in fields {
            let values = infos.iter().map(field.value).collect();
            self.numbers(field.name, values, field.tolerance);
        }
    }

    fn push(&mut self, name: &str, value: Value, tolerance: Tolerance) {
        self.0.push(Figure { name: name.into(), value, tolerance });
    }
}

/// A field of `TCP_INFO`.
#[derive(Clone, Copy)]
pub struct Field {
    pub name: &'static str,
    value: fn(&TcpInfo) -> f64,
    pub tolerance: Tolerance,
}

/// Why windows differ: the model has fixed ones.
pub const BUFFERS: &str = "the kernel begins with 64 KiB and lets buffers grow";
const SHORTEST: Tolerance = Tolerance::by(0.005, 0.0, "machine: 5 ms");
const ROUND_TRIP: Tolerance =
    Tolerance::by(0.05, 0.0, "delayed acknowledgements: 40 ms; machine: 10 ms");
const SEGMENTS: Tolerance = Tolerance::by(3.0, 0.45, "the kernel sends acknowledgements with data");

/// All fields of [`TcpInfo`].
pub const FIELDS: [Field; 21] = [
    Field { name: "closed", value: |i| f64::from(u8::from(i.closed)), tolerance: Tolerance::NONE },
    Field { name: "ended", value: |i| f64::from(u8::from(i.ended)), tolerance: Tolerance::NONE },
    Field { name: "retransmits", value: |i| i.retransmits.into(), tolerance: Tolerance::NONE },
    Field { name: "probes", value: |i| i.probes.into(), tolerance: Tolerance::NONE },
    Field { name: "rto", value: |i| i.rto.as_secs_f64(), tolerance: Tolerance::TIMER },
    Field { name: "rtt", value: |i| i.rtt.as_secs_f64(), tolerance: ROUND_TRIP },
    Field {
        name: "rtt deviation",
        value: |i| i.rtt_deviation.as_secs_f64(),
        tolerance: ROUND_TRIP,
    },
    Field { name: "shortest rtt", value: |i| i.min_rtt.as_secs_f64(), tolerance: SHORTEST },
    Field { name: "send mss", value: |i| i.send_mss.into(), tolerance: Tolerance::NONE },
    Field { name: "unacked", value: |i| i.unacked.into(), tolerance: Tolerance::NONE },
    Field { name: "retransmitted", value: |i| i.retransmitted.into(), tolerance: Tolerance::NONE },
    Field { name: "segments out", value: |i| i.segments_out.into(), tolerance: SEGMENTS },
    Field { name: "segments in", value: |i| i.segments_in.into(), tolerance: SEGMENTS },
    Field {
        name: "data segments in",
        value: |i| i.data_segments_in.into(),
        tolerance: Tolerance::NONE,
    },
    Field { name: "out of order", value: |i| i.out_of_order.into(), tolerance: Tolerance::NONE },
    Field {
        name: "last ack recv",
        value: |i| i.last_ack_recv.as_secs_f64(),
        tolerance: Tolerance::TIMER,
    },
    Field {
        name: "last data recv",
        value: |i| i.last_data_recv.as_secs_f64(),
        tolerance: Tolerance::TIMER,
    },
    Field { name: "bytes acked", value: |i| i.bytes_acked as f64, tolerance: Tolerance::NONE },
    Field { name: "notsent bytes", value: |i| i.notsent_bytes.into(), tolerance: Tolerance::NONE },
    Field {
        name: "data segments sent",
        value: |i| i.data_segments_sent.into(),
        tolerance: Tolerance::NONE,
    },
    Field {
        name: "send window",
        value: |i| i.send_window.map_or(-1.0, f64::from),
        tolerance: Tolerance::by(0.0, 0.8, BUFFERS),
    },
];

impl Figure {
    /// Whether the other side may have measured this.
    fn allows(&self, other: &Self) -> bool {
        match (&self.value, &other.value) {
            (Value::Numbers(one), Value::Numbers(other)) => {
                let mut pairs = one.iter().zip(other);
                one.len() == other.len()
                    && pairs.all(|(one, other)| self.tolerance.allows(*one, *other))
            }
            (one, other) => one == other,
        }
    }
}

/// Compares the two sides of a case. Adds the rows of a table, and returns those that differ too much.
pub fn compare(
    case: &str,
    simulated: &Figures,
    kernel: &Figures,
    table: &mut String,
) -> Vec<String> {
    let names =
        |figures: &Figures| figures.0.iter().map(|figure| figure.name.clone()).collect::<Vec<_>>();
    assert_eq!(names(simulated), names(kernel), "{case}");
    let mut differences = Vec::new();
    for (one, other) in simulated.0.iter().zip(&kernel.0) {
        let is_allowed = one.allows(other);
        let mark = if is_allowed { "" } else { " **differs**" };
        let (name, reason) = (&one.name, one.tolerance.reason);
        let row = format!("| {case}: {name} | {} | {} | {reason}{mark} |", one.value, other.value);
        let _ = writeln!(table, "{row}");
        if !is_allowed {
            differences.push(row);
        }
    }
    differences
}
