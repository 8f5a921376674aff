//! What no client may leave over in the metrics of jackstay.

/// What is zero when all clients have gone.
const EMPTY_GAUGES: [&str; 7] = [
    "jackstay_requests_in_flight",
    "jackstay_watches",
    "jackstay_held_watches",
    "jackstay_held_body_bytes",
    "jackstay_held_frame_bytes",
    "jackstay_tunnels",
    "jackstay_downstream_connections",
];

/// Whether a line of the metrics is one of [`EMPTY_GAUGES`] and not zero.
pub(super) fn is_left_over(line: &str) -> bool {
    let Some((series, value)) = line.rsplit_once(' ') else { return false };
    let name = series.split('{').next().unwrap_or(series);
    EMPTY_GAUGES.contains(&name) && value != "0"
}
