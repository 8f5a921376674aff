//! Serializes values of the configuration (`#[serde(serialize_with)]`) in the form of the file, so that
//! a printed configuration can be loaded again.

// serde passes every field by reference.
#![allow(clippy::ref_option, clippy::trivially_copy_pass_by_ref)]

use std::ffi::OsStr;
use std::fmt::Display;
use std::time::Duration;

use serde::{Serialize, Serializer};

use super::units::{format_duration, format_size};

/// The text of a value.
pub(super) fn display<S: Serializer>(value: &impl Display, s: S) -> Result<S::Ok, S::Error> {
    s.collect_str(value)
}

/// The texts of a list of values.
pub(super) fn display_all<S: Serializer>(values: &[impl Display], s: S) -> Result<S::Ok, S::Error> {
    s.collect_seq(values.iter().map(ToString::to_string))
}

/// The text of a value, or an empty text for `None`.
pub(super) fn optional_display<S: Serializer>(
    value: &Option<impl Display>,
    s: S,
) -> Result<S::Ok, S::Error> {
    match value {
        Some(value) => s.collect_str(value),
        None => s.serialize_str(""),
    }
}

/// A text or a path, or an empty text for `None`.
pub(super) fn optional_text<S: Serializer>(
    text: &Option<impl AsRef<OsStr>>,
    s: S,
) -> Result<S::Ok, S::Error> {
    s.serialize_str(&text.as_ref().map_or("".into(), |text| text.as_ref().to_string_lossy()))
}

/// A value, or the default of its type for `None`: a certificate and its key, or empty paths.
pub(super) fn value_or_default<S: Serializer, T: Serialize + Default>(
    value: &Option<T>,
    s: S,
) -> Result<S::Ok, S::Error> {
    value.as_ref().unwrap_or(&T::default()).serialize(s)
}

/// A number in hexadecimal.
pub(super) fn hex<S: Serializer>(number: &u32, s: S) -> Result<S::Ok, S::Error> {
    s.collect_str(&format_args!("{number:#x}"))
}

/// A size in bytes with its unit.
pub(super) fn size<S: Serializer>(bytes: &u32, s: S) -> Result<S::Ok, S::Error> {
    s.serialize_str(&format_size(u64::from(*bytes)))
}

/// A duration with its unit.
pub(super) fn duration<S: Serializer>(duration: &Duration, s: S) -> Result<S::Ok, S::Error> {
    s.serialize_str(&format_duration(*duration))
}

/// A duration with its unit, or `0s` for `None`.
pub(super) fn duration_or_zero<S: Serializer>(
    duration: &Option<Duration>,
    s: S,
) -> Result<S::Ok, S::Error> {
    s.serialize_str(&format_duration(duration.unwrap_or_default()))
}

/// A duration with its unit, or `adaptive` for `None`.
pub(super) fn duration_or_adaptive<S: Serializer>(
    duration: &Option<Duration>,
    s: S,
) -> Result<S::Ok, S::Error> {
    s.serialize_str(&duration.map_or("adaptive".to_owned(), format_duration))
}
