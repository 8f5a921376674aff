//! Settles a write whose outcome is unknown: the object is read from etcd through another apiserver, and shows whether the
//! write was carried out. It does no I/O and reads no clock. [`Settlement::step`] takes a [`SettlementInput`] and returns
//! the [`SettlementEffect`] that the shell executes.
//!
//! # Why it is safe
//!
//! Only a PUT that names the resourceVersion of its object, *V*, is settled. The facts about kube-apiserver (1.36):
//!
//! 1. The PUT is carried out only on an object of version *V*: `Store.Update` compares both versions within
//!    `GuaranteedUpdate`, and responds with 409 otherwise (`registry/generic/registry/store.go`). etcd applies the change in
//!    a transaction that compares the revision of the key (`storage/etcd3/store.go`). A revision occurs once in an etcd, so
//!    of all PUTs that name *V*, however often each is sent, and however late one arrives, at most one changes the object.
//! 2. A PUT of an object that does not exist creates it if its kind allows that, as a Lease does (`AllowCreateOnUpdate` in
//!    `registry/coordination/lease/strategy.go`), whatever version the PUT names. If the PUT names `metadata.uid`, that is a
//!    precondition (`defaultUpdatedObjectInfo.Preconditions` in `registry/rest/update.go`), which is checked before, against
//!    the empty uid of the object that is missing: 409 (`Preconditions.Check` in `storage/interfaces.go`). So such a PUT
//!    creates nothing.
//! 3. A PUT that changes nothing is not written, and responds with 200 and *V*.
//! 4. A GET without `resourceVersion` reads from etcd. What it shows includes every PUT that was carried out before it began.
//!
//! Nothing follows from a time: the handler of a stopped apiserver may carry out a PUT after hours.
//!
//! # What was read
//!
//! | the object has | [`Found`] | it follows |
//! |---|---|---|
//! | a version above *V*, and what was written | `Written` | The PUT was carried out, and none but it: it is answered with this object. |
//! | the version *V* | `Unwritten` | No PUT with *V* was carried out. One that was sent may be carried out later. |
//! | anything else: other contents, another uid, none | `Other` | A PUT that names *V* and the uid cannot be carried out any more. It may have been, before another write. |
//! | nothing: a 403, no response | `Unknown` | |
//!
//! Two clients whose PUTs name *V* and are equal cannot be told apart, so the contents must contain a time to the
//! microsecond that the client has chosen ([`object::WrittenObject::parse`]).
//!
//! # What follows
//!
//! | PUTs sent | what is known of them | read | effect |
//! |---|---|---|---|
//! | any | a response below 300 | any | `Respond` |
//! | any | no such response | `Written` | `Answer` |
//! | one | a response | any | `Respond`: whatever it is, it belongs to the only PUT |
//! | one | none yet, its connection is in trouble | not yet | `LookUp` |
//! | one | none, and it ended | not since | `LookUp` |
//! | one that names the uid | none | `Unwritten` | `SendAgain`, to another apiserver |
//! | one | none yet | anything else | `Wait` |
//! | one | none, and it ended | anything else | `Refuse`: the outcome is unknown |
//! | two | a response above 299, a 409 too, or none: one ended, and the other runs | not since | `LookUp` |
//! | two | the same | anything but `Written` | `Wait` |
//! | two | neither has a success, and the connection of one is in trouble | not since | `LookUp` |
//! | two | both ended | not since | `LookUp` |
//! | two | both ended | anything but `Written` | `Refuse` |
//!
//! The response of one of two PUTs says nothing about the other: a 409 may follow from the other one's success. A PUT
//! that was not processed (its failure shows that) counts as not sent.

#![allow(missing_docs)] // the text of a variant explains its fields

mod lease;
mod object;
#[cfg(test)]
mod tests;

pub use self::object::{Found, MAX_BODY, ObjectKind, WrittenObject};

/// A write is sent at most this often.
pub const MAX_SENDS: usize = 2;

/// What is known of a write that was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WriteEnd {
    /// The response has this status.
    Response(u16),
    /// The apiserver has not processed it, and it is not sent again.
    Unprocessed,
    /// It may be carried out.
    Unknown,
}

/// What has happened. A `write` is the number of a write, from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SettlementInput {
    /// The connection or the endpoint of a write that runs is in trouble, and it may be looked up.
    Troubled,
    /// A write has ended.
    Ended { write: usize, end: WriteEnd },
    /// The object was read.
    Found(Found),
}

/// What the shell does after a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SettlementEffect {
    /// Wait for the next input.
    Wait,
    /// Read the object from etcd.
    LookUp,
    /// Send the write a second time, to another apiserver.
    SendAgain,
    /// Forward the response of this write, or its failure if it was not processed. The other one is cancelled.
    Respond { write: usize },
    /// Answer with the object that was read. All writes are cancelled.
    Answer,
    /// Answer that the outcome is unknown, with the failure of the first write.
    Refuse,
}

/// The state of one write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Write {
    NotSent,
    Running,
    Ended(WriteEnd),
}

/// What was read of the object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum LookUp {
    None,
    /// `outdated`: a write has ended since it began.
    Running {
        outdated: bool,
    },
    Done(Found),
    /// A write has ended since it began.
    Outdated(Found),
}

/// See the module documentation. It begins when the first write is sent.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Settlement {
    names_uid: bool,
    /// A write that runs is in trouble since the last look-up.
    is_troubled: bool,
    writes: [Write; MAX_SENDS],
    look_up: LookUp,
}

impl Settlement {
    /// The first write is sent. `names_uid`: its body contains `metadata.uid`.
    pub const fn new(names_uid: bool) -> Self {
        Self {
            names_uid,
            is_troubled: false,
            writes: [Write::Running, Write::NotSent],
            look_up: LookUp::None,
        }
    }

    /// What follows from an input.
    pub fn step(&mut self, input: SettlementInput) -> SettlementEffect {
        match input {
            SettlementInput::Troubled => self.is_troubled = true,
            SettlementInput::Ended { write, end } => {
                self.writes[write] = Write::Ended(end);
                self.look_up = match self.look_up {
                    LookUp::Running { .. } => LookUp::Running { outdated: true },
                    LookUp::Done(found) => LookUp::Outdated(found),
                    other => other,
                };
            }
            SettlementInput::Found(found) => {
                self.look_up = match self.look_up {
                    LookUp::Running { outdated: false } => LookUp::Done(found),
                    _ => LookUp::Outdated(found),
                };
            }
        }
        self.effect()
    }

    fn effect(&mut self) -> SettlementEffect {
        let succeeded = |write: &Write| matches!(write, Write::Ended(WriteEnd::Response(..300)));
        if let Some(write) = self.writes.iter().position(succeeded) {
            return SettlementEffect::Respond { write };
        }
        let is_sent =
            |write: &Write| !matches!(write, Write::NotSent | Write::Ended(WriteEnd::Unprocessed));
        let mut sent = (0..MAX_SENDS).filter(|&write| is_sent(&self.writes[write]));
        let (first, second) = (sent.next(), sent.next());
        match (first, second) {
            (None, _) => SettlementEffect::Respond { write: 0 },
            (Some(write), None) => self.effect_for_one(write),
            (Some(_), Some(_)) => self.effect_for_two(),
        }
    }

    /// What follows if only this write may have been carried out.
    fn effect_for_one(&mut self, write: usize) -> SettlementEffect {
        let may_send_again = self.names_uid && self.writes[1] == Write::NotSent;
        match (self.writes[write], self.look_up) {
            (Write::Ended(WriteEnd::Response(_)), _) => SettlementEffect::Respond { write },
            (_, LookUp::Running { .. }) => SettlementEffect::Wait,
            (_, LookUp::Done(Found::Written) | LookUp::Outdated(Found::Written)) => {
                SettlementEffect::Answer
            }
            (_, LookUp::Done(Found::Unwritten) | LookUp::Outdated(Found::Unwritten))
                if may_send_again =>
            {
                self.writes[1] = Write::Running;
                SettlementEffect::SendAgain
            }
            (Write::Running, _) if self.is_troubled => self.look_up(),
            (Write::Running, _) => SettlementEffect::Wait,
            (_, LookUp::Done(_)) => SettlementEffect::Refuse,
            (_, LookUp::None | LookUp::Outdated(_)) => self.look_up(),
        }
    }

    /// What follows if both writes may have been carried out.
    fn effect_for_two(&mut self) -> SettlementEffect {
        let runs = self.writes.map(|write| write == Write::Running);
        match (runs, self.look_up) {
            (_, LookUp::Running { .. }) => SettlementEffect::Wait,
            (_, LookUp::Done(Found::Written) | LookUp::Outdated(Found::Written)) => {
                SettlementEffect::Answer
            }
            _ if self.is_troubled => self.look_up(),
            ([true, true], _) => SettlementEffect::Wait,
            (_, LookUp::None | LookUp::Outdated(_)) => self.look_up(),
            ([false, false], LookUp::Done(_)) => SettlementEffect::Refuse,
            (_, LookUp::Done(_)) => SettlementEffect::Wait,
        }
    }

    /// Reads the object. That happens at most twice for each write: when it is in trouble, and after its end.
    fn look_up(&mut self) -> SettlementEffect {
        self.is_troubled = false;
        self.look_up = LookUp::Running { outdated: false };
        SettlementEffect::LookUp
    }
}
