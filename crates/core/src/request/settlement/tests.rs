//! Every interleaving of a write, its look-ups and its repetition with what an etcd and others may do meanwhile.

mod objects;

use std::collections::HashSet;

use super::{Found, MAX_SENDS, Settlement, SettlementEffect, SettlementInput, WriteEnd};

/// The version that the write names.
const NAMED: u64 = 10;
/// The uid that it may name.
const UID: u8 = 1;

/// Who wrote an object last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Writer {
    /// The state that the write starts from.
    Before,
    Client,
    Rival,
}

/// The object in etcd.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Stored {
    version: u64,
    uid: u8,
    writer: Writer,
}

/// Where a request of the client is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Flight {
    NotSent,
    /// It may be carried out at any later time, or be lost. `awaited`: the settlement waits for its end.
    Sent {
        awaited: bool,
    },
    /// It was carried out or refused, and its response is under way.
    Answered {
        status: u16,
    },
    /// Nothing more follows from it.
    Over,
}

/// A look-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Reading {
    None,
    /// It has not reached etcd.
    Asked,
    /// What it has read is under way.
    Read(Found),
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct World {
    names_uid: bool,
    object: Option<Stored>,
    revision: u64,
    next_uid: u8,
    /// How often the client's write has changed or created the object.
    applied: u8,
    created: bool,
    rivals: u8,
    deletions: u8,
    flights: [Flight; MAX_SENDS],
    reading: Reading,
    is_troubled: [bool; MAX_SENDS],
    settlement: Settlement,
    /// What the client has got.
    result: Option<SettlementEffect>,
}

/// One step of the world.
#[derive(Debug, Clone, Copy)]
enum Event {
    Trouble(usize),
    /// A request of the client is carried out or refused.
    Handle(usize),
    /// Its response arrives.
    Arrive(usize),
    /// Its connection is lost, or it is given up. It may be carried out later.
    Lose(usize),
    /// As `Lose`, and it will never be carried out, which its failure shows.
    Refuse(usize),
    /// The apiserver answers it with an error, which says nothing about etcd.
    Fail(usize),
    Read,
    ReadFails,
    Found,
    Rival,
    Delete,
    Recreate,
}

impl World {
    fn new(names_uid: bool) -> Self {
        let mut world = Self {
            names_uid,
            object: Some(Stored { version: NAMED, uid: UID, writer: Writer::Before }),
            revision: NAMED,
            next_uid: UID + 1,
            applied: 0,
            created: false,
            rivals: 0,
            deletions: 0,
            flights: [Flight::NotSent; MAX_SENDS],
            reading: Reading::None,
            is_troubled: [false; MAX_SENDS],
            settlement: Settlement::new(names_uid),
            result: None,
        };
        world.flights[0] = Flight::Sent { awaited: true };
        world
    }

    fn events(&self) -> Vec<Event> {
        let mut events = Vec::new();
        for (write, flight) in self.flights.iter().enumerate() {
            match flight {
                Flight::NotSent | Flight::Over => {}
                Flight::Sent { awaited } => {
                    events.push(Event::Handle(write));
                    if *awaited {
                        events.extend([
                            Event::Lose(write),
                            Event::Refuse(write),
                            Event::Fail(write),
                        ]);
                    }
                }
                Flight::Answered { .. } => {
                    events.extend([Event::Arrive(write), Event::Lose(write)]);
                }
            }
            let is_awaited =
                matches!(flight, Flight::Sent { awaited: true } | Flight::Answered { .. });
            if is_awaited && !self.is_troubled[write] {
                events.push(Event::Trouble(write));
            }
        }
        match self.reading {
            Reading::None => {}
            Reading::Asked => events.extend([Event::Read, Event::ReadFails]),
            Reading::Read(_) => events.push(Event::Found),
        }
        if self.object.is_some() {
            if self.rivals < 2 {
                events.push(Event::Rival);
            }
            if self.deletions == 0 {
                events.push(Event::Delete);
            }
        } else {
            events.push(Event::Recreate);
        }
        events
    }

    /// `Store.Update` of kube-apiserver for an object that may be created by an update.
    fn handle(&mut self) -> u16 {
        let uid = self.object.map_or(0, |object| object.uid);
        if self.names_uid && uid != UID {
            return 409;
        }
        let Some(object) = self.object else {
            self.write(Writer::Client);
            self.created = true;
            return 201;
        };
        if object.version != NAMED {
            return 409;
        }
        self.write(Writer::Client);
        200
    }

    fn write(&mut self, writer: Writer) {
        self.revision += 1;
        let uid = self.object.map_or(self.next_uid, |object| object.uid);
        if self.object.is_none() {
            self.next_uid += 1;
        }
        self.object = Some(Stored { version: self.revision, uid, writer });
        self.applied += u8::from(writer == Writer::Client);
    }

    fn read(&self) -> Found {
        match self.object {
            Some(object) if self.names_uid && object.uid != UID => Found::Other,
            Some(object) if object.version == NAMED => Found::Unwritten,
            Some(object) if object.writer == Writer::Client => Found::Written,
            _ => Found::Other,
        }
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::Trouble(write) => {
                self.is_troubled[write] = true;
                self.report(SettlementInput::Troubled);
            }
            Event::Handle(write) => {
                let status = self.handle();
                self.flights[write] = match self.flights[write] {
                    Flight::Sent { awaited: true } => Flight::Answered { status },
                    _ => Flight::Over,
                };
            }
            Event::Arrive(write) => {
                if let Flight::Answered { status } = self.flights[write] {
                    self.end(write, Flight::Over, WriteEnd::Response(status));
                }
            }
            Event::Lose(write) => {
                let left = match self.flights[write] {
                    Flight::Sent { .. } => Flight::Sent { awaited: false },
                    _ => Flight::Over,
                };
                self.end(write, left, WriteEnd::Unknown);
            }
            Event::Refuse(write) => self.end(write, Flight::Over, WriteEnd::Unprocessed),
            Event::Fail(write) => {
                self.end(write, Flight::Sent { awaited: false }, WriteEnd::Response(504));
            }
            Event::Read => self.reading = Reading::Read(self.read()),
            Event::ReadFails => self.reading = Reading::Read(Found::Unknown),
            Event::Found => {
                if let Reading::Read(found) = std::mem::replace(&mut self.reading, Reading::None) {
                    self.report(SettlementInput::Found(found));
                }
            }
            Event::Rival => {
                self.rivals += 1;
                self.write(Writer::Rival);
            }
            Event::Delete => {
                self.deletions += 1;
                self.object = None;
            }
            Event::Recreate => self.write(Writer::Rival),
        }
    }

    fn end(&mut self, write: usize, flight: Flight, end: WriteEnd) {
        self.flights[write] = flight;
        self.report(SettlementInput::Ended { write, end });
    }

    fn report(&mut self, input: SettlementInput) {
        if self.result.is_some() {
            return;
        }
        match self.settlement.step(input) {
            SettlementEffect::Wait => {
                let runs = self.flights.iter().any(|flight| {
                    matches!(flight, Flight::Sent { awaited: true } | Flight::Answered { .. })
                });
                assert!(runs || self.reading != Reading::None, "nothing to wait for: {self:?}");
            }
            SettlementEffect::LookUp => {
                assert_eq!(self.reading, Reading::None, "two look-ups: {self:?}");
                self.reading = Reading::Asked;
            }
            SettlementEffect::SendAgain => {
                assert!(self.names_uid, "sent again without a uid: {self:?}");
                assert_eq!(self.flights[1], Flight::NotSent, "{self:?}");
                self.flights[1] = Flight::Sent { awaited: true };
            }
            result => {
                self.expect_result(input, result);
                self.result = Some(result);
                // The client has its answer, and what was sent may still arrive.
                self.reading = Reading::None;
                for flight in &mut self.flights {
                    *flight = match flight {
                        Flight::Sent { .. } => Flight::Sent { awaited: false },
                        _ => Flight::Over,
                    };
                }
            }
        }
    }

    /// The client gets a success only for a write that was carried out, and an error of an apiserver only for one that was
    /// sent once.
    fn expect_result(&self, input: SettlementInput, result: SettlementEffect) {
        let success = matches!(
            (result, input),
            (SettlementEffect::Answer, _)
                | (
                    SettlementEffect::Respond { .. },
                    SettlementInput::Ended { end: WriteEnd::Response(..300), .. }
                )
        );
        if success {
            assert_eq!(self.applied, 1, "a success without the write: {self:?}");
        } else if let SettlementEffect::Respond { write } = result {
            let other = self.flights[1 - write];
            assert!(
                matches!(other, Flight::NotSent | Flight::Over),
                "an error while the other write may be carried out: {self:?}"
            );
        }
    }

    fn expect_bounds(&self) {
        assert!(self.applied <= 1, "applied twice: {self:?}");
        assert!(!self.names_uid || !self.created, "created by a renewal: {self:?}");
    }
}

/// Visits every world that can follow, and returns the number of worlds, of steps between them, and of the worlds in which the
/// client got each result.
fn explore(names_uid: bool) -> (usize, usize, [usize; 3]) {
    let mut seen = HashSet::new();
    let mut left = vec![World::new(names_uid)];
    let (mut steps, mut results) = (0, [0; 3]);
    while let Some(world) = left.pop() {
        if !seen.insert(world.clone()) {
            continue;
        }
        world.expect_bounds();
        match world.result {
            Some(SettlementEffect::Answer) => results[0] += 1,
            Some(SettlementEffect::Respond { .. }) => results[1] += 1,
            Some(_) => results[2] += 1,
            None => {}
        }
        for event in world.events() {
            let mut next = world.clone();
            next.take(event);
            steps += 1;
            left.push(next);
        }
    }
    (seen.len(), steps, results)
}

#[test]
fn no_interleaving_applies_a_write_twice_or_answers_it_wrongly() {
    for names_uid in [true, false] {
        let (worlds, steps, results) = explore(names_uid);
        println!("uid {names_uid}: {worlds} states, {steps} steps, results {results:?}");
        assert!(worlds > 1_000 && results.iter().all(|&count| count > 0));
    }
}

/// A write whose apiserver is lost, while no other client writes, always gets its answer.
#[test]
fn write_of_a_lost_apiserver_is_settled() {
    for is_carried_out in [false, true] {
        let mut world = World::new(true);
        world.take(Event::Trouble(0));
        if is_carried_out {
            world.take(Event::Handle(0));
        }
        world.take(Event::Read);
        world.take(Event::Found);
        if !is_carried_out {
            world.take(Event::Handle(1));
            world.take(Event::Arrive(1));
        }
        let expected = if is_carried_out {
            SettlementEffect::Answer
        } else {
            SettlementEffect::Respond { write: 1 }
        };
        assert_eq!(world.result, Some(expected));
    }
}

/// The rows of the table in the module documentation.
#[test]
fn step_follows_the_table() {
    use Found::{Other, Unknown, Unwritten, Written};
    use SettlementEffect::{Answer, LookUp, Refuse, Respond, SendAgain, Wait};
    use SettlementInput::Troubled;
    let ended = |write, end| SettlementInput::Ended { write, end };
    let lost = |write| ended(write, WriteEnd::Unknown);
    let answered = |write, status| ended(write, WriteEnd::Response(status));
    let unprocessed = |write| ended(write, WriteEnd::Unprocessed);
    let found = SettlementInput::Found;
    let rows: &[(bool, &[(SettlementInput, SettlementEffect)])] = &[
        (true, &[(answered(0, 200), Respond { write: 0 })]),
        (true, &[(answered(0, 409), Respond { write: 0 })]),
        (true, &[(unprocessed(0), Respond { write: 0 })]),
        (true, &[(lost(0), LookUp), (found(Written), Answer)]),
        (true, &[(lost(0), LookUp), (found(Other), Refuse)]),
        (true, &[(lost(0), LookUp), (found(Unknown), Refuse)]),
        (false, &[(lost(0), LookUp), (found(Unwritten), Refuse)]),
        (true, &[(Troubled, LookUp), (answered(0, 409), Respond { write: 0 })]),
        (
            true,
            &[(Troubled, LookUp), (found(Other), Wait), (lost(0), LookUp), (found(Other), Refuse)],
        ),
        (
            false,
            &[
                (Troubled, LookUp),
                (found(Unwritten), Wait),
                (answered(0, 200), Respond { write: 0 }),
            ],
        ),
        // The look-up may have been before the write.
        (true, &[(Troubled, LookUp), (lost(0), Wait), (found(Unwritten), SendAgain)]),
        (
            true,
            &[(Troubled, LookUp), (lost(0), Wait), (found(Other), LookUp), (found(Other), Refuse)],
        ),
        (
            true,
            &[
                (Troubled, LookUp),
                (found(Unwritten), SendAgain),
                (answered(1, 409), LookUp),
                (found(Written), Answer),
            ],
        ),
        (
            true,
            &[
                (Troubled, LookUp),
                (found(Unwritten), SendAgain),
                (answered(1, 409), LookUp),
                (found(Other), Wait),
                (answered(0, 409), LookUp),
                (found(Other), Refuse),
            ],
        ),
        (
            true,
            &[
                (lost(0), LookUp),
                (found(Unwritten), SendAgain),
                (Troubled, LookUp),
                (found(Written), Answer),
            ],
        ),
        (
            true,
            &[
                (Troubled, LookUp),
                (found(Unwritten), SendAgain),
                (Troubled, LookUp),
                (found(Unwritten), Wait),
                (answered(0, 200), Respond { write: 0 }),
            ],
        ),
        (
            true,
            &[
                (lost(0), LookUp),
                (found(Unwritten), SendAgain),
                (lost(1), LookUp),
                (found(Unwritten), Refuse),
            ],
        ),
        (
            true,
            &[
                (lost(0), LookUp),
                (found(Unwritten), SendAgain),
                (answered(1, 200), Respond { write: 1 }),
            ],
        ),
        (
            true,
            &[
                (Troubled, LookUp),
                (found(Unwritten), SendAgain),
                (unprocessed(0), Wait),
                (answered(1, 409), Respond { write: 1 }),
            ],
        ),
    ];
    for (names_uid, steps) in rows {
        let mut settlement = Settlement::new(*names_uid);
        for (input, effect) in *steps {
            assert_eq!(settlement.step(*input), *effect, "{input:?} of {names_uid} {steps:?}");
        }
    }
}
