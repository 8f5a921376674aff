//! When `/readyz` is probed next and what a result means ([`prober`], [`schedule`], [`answers`]), and when an apiserver
//! without a PONG counts as stopped ([`silence`]).

pub mod answers;
pub mod prober;
pub mod schedule;
pub mod silence;
