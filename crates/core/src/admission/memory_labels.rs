//! The label values of the memory budget's metrics: what memory is held for, and what is shed.

/// What memory is held for. Also the value of a metric's label.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryKind {
    /// Client connections: TLS, HTTP/2 and their buffers.
    Connections,
    /// TLS handshakes and the certificate chains of clients.
    Handshakes,
    /// Request heads, and the state of requests, also of those that wait for an upstream stream.
    Streams,
    /// Receive windows of request bodies.
    RequestWindows,
    /// Responses that wait for their clients, and the upstream windows of responses.
    Responses,
    /// What upstream connections may hold while their windows are larger than at first.
    UpstreamWindows,
    /// Request bodies held for retries.
    HeldBodies,
    /// Watch events that are incomplete or wait for their client.
    WatchFrames,
    /// Upgraded connections.
    Tunnels,
    /// Passthrough connections.
    Flows,
    /// What the kernel holds for the sockets of clients, and of the endpoints of flows and tunnels.
    Sockets,
}

impl MemoryKind {
    /// All kinds, in the order of the metric.
    pub const ALL: [Self; 11] = [
        Self::Connections,
        Self::Handshakes,
        Self::Streams,
        Self::RequestWindows,
        Self::Responses,
        Self::UpstreamWindows,
        Self::HeldBodies,
        Self::WatchFrames,
        Self::Tunnels,
        Self::Flows,
        Self::Sockets,
    ];

    /// The label value.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Connections => "connections",
            Self::Handshakes => "handshakes",
            Self::Streams => "streams",
            Self::RequestWindows => "request_windows",
            Self::Responses => "responses",
            Self::UpstreamWindows => "upstream_windows",
            Self::HeldBodies => "held_bodies",
            Self::WatchFrames => "watch_frames",
            Self::Tunnels => "tunnels",
            Self::Flows => "flows",
            Self::Sockets => "sockets",
        }
    }
}

/// What was given up because memory or a queue ran short: the value of a metric's label, under which [`Refusal`]s count.
///
/// [`Refusal`]: super::Refusal
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shed {
    /// A connection without a request was closed.
    IdleConnection,
    /// A stream whose client does not read was reset.
    StalledReader,
    /// A connection with long-running requests was closed.
    LongRunning,
    /// A new stream was refused.
    StreamRefused,
    /// A new connection was refused.
    ConnectionRefused,
    /// A request was refused because too many of its source wait.
    QueueFull,
    /// A closed connection that waited for its client was reset for another one.
    Lingering,
}

impl Shed {
    /// All reasons, in the order in which memory is shed.
    pub const ALL: [Self; 7] = [
        Self::IdleConnection,
        Self::StalledReader,
        Self::LongRunning,
        Self::StreamRefused,
        Self::ConnectionRefused,
        Self::QueueFull,
        Self::Lingering,
    ];

    /// The label value.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::IdleConnection => "idle_connection",
            Self::StalledReader => "stalled_reader",
            Self::LongRunning => "long_running",
            Self::StreamRefused => "stream_refused",
            Self::ConnectionRefused => "connection_refused",
            Self::QueueFull => "queue_full",
            Self::Lingering => "lingering",
        }
    }
}
