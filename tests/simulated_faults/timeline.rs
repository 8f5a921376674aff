//! What happens in a run, in the same terms for a simulated and for a real one, and the figures that are compared.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use jackstay_core::connection::ConnectionState;
use jackstay_core::endpoint_state::EndpointState;

/// What a client did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Read,
    Write,
}

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry {
    /// A connection of jackstay has this state. Its number is unique in a run.
    Connection { endpoint: usize, number: u32, state: ConnectionState },
    /// An endpoint has this state.
    Endpoint { endpoint: usize, state: EndpointState },
    /// A watch that has lost its stream continues on another one.
    WatchResumed,
    /// A watch continues on another stream while the one before works.
    WatchMoved,
    /// A read whose second attempt was sent beside the first one has its response.
    HedgedReadAnswered,
    /// A request has ended.
    Ended { kind: Kind, took: Duration, ok: bool },
    /// An informer has received an event, this time after its write.
    Delivered { after: Duration },
    /// An informer lists again.
    Relist,
    /// A watch was reset, or its connection was lost.
    WatchBroken,
    /// A client has renewed its lease.
    Renewed { client: usize },
}

/// Writers of each scenario.
const WRITERS: u32 = 2;
/// Endpoints of each scenario.
const ENDPOINTS: usize = 3;
/// Time for which a write is in flight, and in which a fault begins at all endpoints.
const IN_FLIGHT: Duration = Duration::from_millis(20);

/// The entries of a run, each with the time since its start.
pub type Timeline = Vec<(Duration, Entry)>;

/// The fault of a run: the first of its faults begins, and the last of them ends.
#[derive(Debug, Clone)]
pub struct Fault {
    pub begins: Duration,
    pub ends: Option<Duration>,
    /// The endpoints that have the fault.
    pub endpoints: BTreeSet<usize>,
    /// Informers that list again or not, by chance.
    pub relists: u32,
}

impl Fault {
    /// Whether every endpoint has the fault.
    pub fn hits_all(&self) -> bool {
        self.endpoints.len() == ENDPOINTS
    }
}

/// A figure of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Figure {
    /// Time from the begin of the fault to an event.
    At(Duration),
    /// How long something took.
    Took(Duration),
    /// How often something happened, and by how much chance may change that.
    Count(u64, u32),
}

/// The figures of a run by their names. An event that did not happen has none.
pub type Figures = BTreeMap<&'static str, Figure>;

/// The figures of a run.
pub fn figures(timeline: &Timeline, fault: &Fault) -> Figures {
    let mut figures = Figures::new();
    connections(timeline, fault, &mut figures);
    endpoints(timeline, fault, &mut figures);
    clients(timeline, fault, &mut figures);
    figures
}

/// The first entry from `begins` on that matches, as time since then.
fn first(
    timeline: &Timeline,
    begins: Duration,
    matches: impl Fn(&Entry) -> bool,
) -> Option<Duration> {
    let found = timeline.iter().find(|(at, entry)| *at >= begins && matches(entry));
    found.map(|(at, _)| at.saturating_sub(begins))
}

fn connections(timeline: &Timeline, fault: &Fault, figures: &mut Figures) {
    let mut old = BTreeSet::new();
    let (mut lost, mut suspect) = (Vec::new(), None);
    for (at, entry) in timeline {
        let Entry::Connection { endpoint, number, state } = *entry else { continue };
        if !fault.endpoints.contains(&endpoint) {
            continue;
        }
        if *at < fault.begins {
            match state {
                ConnectionState::Live => {
                    old.insert(number);
                }
                ConnectionState::Dead => {
                    old.remove(&number);
                }
                _ => {}
            }
            continue;
        }
        let after = at.saturating_sub(fault.begins);
        match state {
            ConnectionState::Suspect => suspect = suspect.or(Some(after)),
            ConnectionState::Dead if old.remove(&number) => lost.push(after),
            _ => {}
        }
    }
    let mut add = |name, at: Option<Duration>| {
        figures.extend(at.map(|at| (name, Figure::At(at))));
    };
    add("a connection is suspect", suspect);
    add("first connection ends", lost.first().copied());
    add("last connection ends", lost.last().copied().filter(|_| old.is_empty()));
}

fn endpoints(timeline: &Timeline, fault: &Fault, figures: &mut Figures) {
    let is = |state: EndpointState| move |entry: &Entry| matches!(entry, Entry::Endpoint { endpoint, state: now } if *now == state && fault.endpoints.contains(endpoint));
    let mut add = |name, at: Option<Duration>| {
        figures.extend(at.map(|at| (name, Figure::At(at))));
    };
    for (name, state) in [
        ("endpoint suspect", EndpointState::Suspect),
        ("endpoint degraded", EndpointState::Degraded),
        ("endpoint ejected", EndpointState::Ejected),
        ("endpoint ready again", EndpointState::Ready),
    ] {
        add(name, first(timeline, fault.begins, is(state)));
    }
}

fn clients(timeline: &Timeline, fault: &Fault, figures: &mut Figures) {
    let ended = figures.get("last connection ends").copied();
    let mut add = |name, figure: Option<Figure>| {
        figures.extend(figure.map(|figure| (name, figure)));
    };
    let times = |wanted: Entry| {
        let found =
            timeline.iter().filter(move |(at, entry)| *at >= fault.begins && *entry == wanted);
        found.map(|(at, _)| Figure::At(at.saturating_sub(fault.begins)))
    };
    add("first watch resumed", times(Entry::WatchResumed).next());
    add("last watch resumed", times(Entry::WatchResumed).next_back());
    // Later, watches move only for their balance. How uneven they are does not follow from the fault, but from the latency
    // of each process.
    let is_away = |figure: &Figure| match (figure, ended) {
        (Figure::At(moved), Some(Figure::At(ended))) => *moved <= ended,
        _ => true,
    };
    add("first watch moved", times(Entry::WatchMoved).next().filter(is_away));
    let hedged = |entry: &Entry| *entry == Entry::HedgedReadAnswered;
    add("first hedged read answered", first(timeline, fault.begins, hedged).map(Figure::At));
    let mut renewed = BTreeMap::<usize, Duration>::new();
    let (mut slowest, mut silence, mut lease) =
        ([Duration::ZERO; 2], Duration::ZERO, Duration::ZERO);
    let (mut failed, mut relists, mut broken) = ([0; 2], 0, 0);
    for &(at, entry) in timeline {
        match entry {
            Entry::Renewed { client } => {
                if let Some(before) = renewed.insert(client, at) {
                    lease = lease.max(at.saturating_sub(before));
                }
            }
            _ if at < fault.begins => {}
            Entry::Ended { kind, took, ok } => {
                slowest[kind as usize] = slowest[kind as usize].max(took);
                failed[kind as usize] += u64::from(!ok);
            }
            // A fault of all endpoints begins at each one milliseconds after another: whether the event of a write that is in
            // flight meanwhile passes before it or after it is by chance.
            Entry::Delivered { after }
                if fault.hits_all()
                    && at.saturating_sub(after).abs_diff(fault.begins) < IN_FLIGHT => {}
            Entry::Delivered { after } => silence = silence.max(after),
            Entry::Relist => relists += 1,
            Entry::WatchBroken => broken += 1,
            _ => {}
        }
    }
    add("slowest read", Some(Figure::Took(slowest[0])));
    add("slowest write", Some(Figure::Took(slowest[1])));
    add("longest silence of a watch", Some(Figure::Took(silence)));
    add("longest time between renewals", Some(Figure::Took(lease)));
    // The fault may meet a write of each writer or none. Other counts have no such chance.
    add("failed reads", Some(Figure::Count(failed[0], 0)));
    add("failed writes", Some(Figure::Count(failed[1], WRITERS)));
    add("lists after the first", Some(Figure::Count(relists, fault.relists)));
    add("broken watches", Some(Figure::Count(broken, 0)));
    let ended = |wanted: bool| move |entry: &Entry| matches!(entry, Entry::Ended { kind: Kind::Read, ok, .. } if *ok == wanted);
    if let Some(at) = first(timeline, fault.begins, ended(false)) {
        add("first read fails", Some(Figure::At(at)));
        let end = fault.ends.unwrap_or(fault.begins + at);
        let again = first(timeline, end, ended(true));
        add(
            "reads succeed again",
            again.map(|at| Figure::At((at + end).saturating_sub(fault.begins))),
        );
    }
}
