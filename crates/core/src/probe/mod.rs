//! When `/readyz` is probed next and what a result means ([`prober`], [`schedule`], [`answers`]), when an apiserver
//! without a PONG counts as stopped ([`silence`]), and when any other question is repeated ([`question_pace`]).

pub mod answers;
pub mod prober;
pub mod question_pace;
pub mod schedule;
pub mod silence;
