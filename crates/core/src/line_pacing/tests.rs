use super::*;

const MS: Duration = Duration::from_millis(1);

/// A line with a queue: what a window of `bound` bytes in each direction makes of it.
struct Line {
    /// Bytes a second.
    rate: f64,
    shortest: Duration,
    /// Bytes that the queue of a direction holds at most.
    queue: f64,
    /// Bytes of others in the queue of received bytes.
    others: f64,
    sent: f64,
    received: f64,
    measured: u64,
    memory: LineMemory,
}

impl Line {
    fn new(rate: f64, shortest: Duration) -> Self {
        Self {
            rate,
            shortest,
            queue: 1e6,
            others: 0.0,
            sent: 0.0,
            received: 0.0,
            measured: 0,
            memory: LineMemory::default(),
        }
    }

    /// A step of 100 ms with these bounds. Returns what the kernel says then.
    fn step(&mut self, bounds: QueueBounds, sends: bool, receives: bool) -> TcpInfo {
        let in_flight = self.rate * self.shortest.as_secs_f64();
        let window = |is_used: bool, bound: Option<u32>| match (is_used, bound) {
            (false, _) => 0.0,
            (true, bound) => bound.map_or(f64::MAX, f64::from).min(self.queue + in_flight),
        };
        let (up, down) = (window(sends, bounds.send), window(receives, bounds.receive));
        let queued = |window: f64| (window - in_flight).max(0.0) / self.rate;
        let round_trip =
            self.shortest + Duration::from_secs_f64(queued(up) + queued(down + self.others));
        let moved = |window: f64| (window / round_trip.as_secs_f64()).min(self.rate) * 0.1;
        self.sent += moved(up);
        self.received += moved(down);
        // Each measurement differs a little.
        self.measured += 1;
        let round_trip = round_trip + Duration::from_micros(self.measured % 7);
        TcpInfo {
            bytes_acked: self.sent as u64,
            bytes_received: self.received as u64,
            rtt: round_trip,
            receive_rtt: round_trip,
            min_rtt: self.shortest,
            ..TcpInfo::default()
        }
    }

    /// Paces for this number of steps. Returns the bounds, the last round trip, and the bytes of each direction in the
    /// second half.
    fn run(
        &mut self,
        pacing: &mut LinePacing,
        (start, steps): (Instant, u32),
        (sends, receives): (bool, bool),
    ) -> (QueueBounds, Duration, [f64; 2]) {
        let (mut half, mut last) = ([0.0; 2], TcpInfo::default());
        for step in 0..steps {
            if step == steps / 2 {
                half = [self.sent, self.received];
            }
            last = self.step(pacing.bounds(), sends, receives);
            pacing.look(&last, &mut self.memory, start + step * 100 * MS);
        }
        (pacing.bounds(), last.rtt, [self.sent - half[0], self.received - half[1]])
    }
}

#[test]
fn queue_of_a_slow_line_becomes_short_and_the_line_stays_busy() {
    for (rate, shortest) in [(32e3, MS), (125e3, MS), (125e3, 100 * MS), (1e6, 20 * MS)] {
        for directions in [(true, false), (false, true), (true, true)] {
            let (mut line, mut pacing) = (Line::new(rate, shortest), LinePacing::watched());
            let what = format!("{rate} {shortest:?} {directions:?}");
            let (bounds, rtt, moved) = line.run(&mut pacing, (Instant::now(), 600), directions);
            let used = [(directions.0, bounds.send), (directions.1, bounds.receive)];
            assert!(used.iter().all(|(is_used, bound)| !is_used || bound.is_some()), "{what}");
            // The smallest bound of both directions.
            let least = 2.0 * f64::from(MIN_BOUND) / rate;
            let longest = shortest + LONG_QUEUE.max(Duration::from_secs_f64(least));
            assert!(rtt <= longest, "{what}: {rtt:?}");
            for (moved, is_used) in moved.into_iter().zip([directions.0, directions.1]) {
                assert!(!is_used || moved > 0.45 * rate * 30.0, "{what}: {moved}");
            }
        }
    }
}

#[test]
fn fast_line_is_left_free_after_a_look_or_two() {
    // A queue of 80 ms on 8 Mbit/s; 500 Mbit/s with a queue of half a second, near and far.
    for (rate, queue, shortest) in
        [(1e6, 8e4, 10 * MS), (60e6, 30e6, 10 * MS), (60e6, 30e6, 80 * MS)]
    {
        let mut line = Line { queue, ..Line::new(rate, shortest) };
        let (mut pacing, mut free_at) = (LinePacing::watched(), None);
        let mut memory = LineMemory::default();
        for step in 0..300 {
            let info = line.step(pacing.bounds(), true, true);
            pacing.look(&info, &mut memory, Instant::now() + step * 100 * MS);
            if pacing.bounds() == QueueBounds::default() {
                free_at.get_or_insert(step);
            } else {
                assert!(free_at.is_none(), "{rate} {step} {pacing:?}");
            }
        }
        assert!(rate < 2e6 || free_at.unwrap() <= 4, "{rate} {shortest:?} {free_at:?}");
    }
}

/// What a watch and a list show: the pause before an event, or before a response, counts in the round trip.
#[test]
fn pauses_are_no_queue() {
    let (mut pacing, mut memory) = (LinePacing::watched(), LineMemory::default());
    for look in 0..100_u32 {
        let info = TcpInfo {
            bytes_received: 5_000 * u64::from(look),
            receive_rtt: 300 * MS,
            min_rtt: MS,
            last_data_recv: look % 3 * 50 * MS,
            ..TcpInfo::default()
        };
        pacing.look(&info, &mut memory, Instant::now() + look * 100 * MS);
        assert_eq!(pacing.bounds().receive, Some(START_BOUND), "{look}");
        assert_eq!(pacing.queue(), (look == 0).then_some(Duration::ZERO), "{look}");
    }
}

#[test]
fn bound_ends_with_the_transfer_and_grows_with_the_line() {
    let (mut line, mut pacing, start) =
        (Line::new(125e3, MS), LinePacing::watched(), Instant::now());
    let (bounds, ..) = line.run(&mut pacing, (start, 100), (false, true));
    assert!(bounds.receive.is_some() && pacing.is_active());
    // The line becomes fast.
    line.rate = 50e6;
    let (bounds, ..) = line.run(&mut pacing, (start + 10_000 * MS, 100), (false, true));
    assert_eq!(bounds.receive, None);
    line.rate = 125e3;
    let (bounds, ..) = line.run(&mut pacing, (start + 20_000 * MS, 100), (false, true));
    assert!(bounds.receive.is_some());
    let (bounds, ..) = line.run(&mut pacing, (start + 30_000 * MS, 610), (false, false));
    assert_eq!(bounds, QueueBounds { send: Some(START_BOUND), receive: Some(START_BOUND) });
    assert!(!pacing.is_active());
}

#[test]
fn connection_begins_with_the_bounds_of_the_line_for_a_minute() {
    let start = Instant::now();
    let (mut memory, mut pacing) = (LineMemory::default(), LinePacing::watched());
    assert_eq!(memory.bounds(start), None);
    let bounds = QueueBounds { send: None, receive: Some(20_000) };
    memory.record(bounds, start);
    let change = pacing.look(&TcpInfo::default(), &mut memory, start);
    assert_eq!(change, Some(BoundsChange { before: QueueBounds::default(), bounds }));
    assert!(!pacing.is_active(), "a connection alone proves nothing");
    // It is not used.
    for seconds in 1..=60 {
        pacing.look(&TcpInfo::default(), &mut memory, start + seconds * 1_000 * MS);
        assert_eq!(pacing.bounds() == bounds, seconds < 60, "{seconds}");
    }
    assert_eq!(memory.bounds(start + 59_999 * MS), Some(bounds));
    assert_eq!(memory.bounds(start + 60_000 * MS), None);
}

#[test]
fn queue_of_others_is_paced_in_vain_for_ten_seconds_only() {
    let (mut line, mut pacing, start) =
        (Line::new(125e3, MS), LinePacing::watched(), Instant::now());
    line.others = 250e3;
    let (bounds, ..) = line.run(&mut pacing, (start, 60), (false, true));
    assert_eq!(bounds.receive, Some(MIN_BOUND));
    let (bounds, ..) = line.run(&mut pacing, (start + 6_000 * MS, 300), (false, true));
    assert_eq!(bounds.receive, None);
    assert!(line.others > 0.0);
}

/// On loopback, whose segments have 64 KiB, the events of a watch are no full segments.
#[test]
fn old_measurement_is_no_queue() {
    let (mut pacing, mut memory) = (LinePacing::watched(), LineMemory::default());
    for look in 0..100_u32 {
        let info = TcpInfo {
            bytes_received: 20_000 * u64::from(look),
            receive_rtt: 2_300 * MS,
            min_rtt: MS,
            ..TcpInfo::default()
        };
        pacing.look(&info, &mut memory, Instant::now() + look * 100 * MS);
        assert_eq!(pacing.bounds().receive, Some(START_BOUND), "{look}");
    }
}

/// A connection that begins behind the queue does not know the shortest round trip.
#[test]
fn shortest_round_trip_is_that_of_the_endpoint() {
    let (mut memory, start) = (LineMemory::default(), Instant::now());
    for (rtt, queue) in [(3, 0), (1_500, 1_497), (2, 0)] {
        let (mut pacing, rtt) = (LinePacing::watched(), rtt * MS);
        pacing.look(&TcpInfo { rtt, min_rtt: rtt, ..TcpInfo::default() }, &mut memory, start);
        assert_eq!(pacing.queue(), Some(queue * MS));
    }
}
