//! Why jackstay refuses a client or closes what that client holds: the limit, the reason, the metric that counts it, and
//! what the client gets.

use super::memory_labels::Shed;
use crate::request::status_error::StatusError;

/// Why jackstay refuses a connection, a handshake or a request, or ends it for others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// All slots are in use, and none by an idle connection.
    SlotsFull,
    /// The source has its share of the slots, none of its connections is idle, and the reserve is in use.
    SourceShare,
    /// A connection with a slot of the reserve has proven no identity in its handshake.
    NotProven,
    /// A new connection took the slot of an idle one.
    Evicted,
    /// The process is out of descriptors.
    Descriptors,
    /// The TLS handshake failed, or was ended for another one.
    Handshake,
    /// The TLS handshake took too long.
    HandshakeTimeout,
    /// A new connection has sent no request.
    NoRequest,
    /// The client sent too many frames of a kind.
    Frames,
    /// No memory for a new connection.
    ConnectionMemory,
    /// No memory for a new request or tunnel.
    RequestMemory,
    /// jackstay closes a connection without a request, because memory is short.
    IdleConnection,
    /// jackstay ends a stream or connection whose client does not read, because memory is short.
    StalledReader,
    /// jackstay closes a connection with long-running requests, because memory is short.
    LongRunning,
    /// Too many closed connections wait until their clients close them, too.
    Lingering,
    /// Too many requests of the source wait that have proven nothing.
    UnprovenRequests,
    /// The same for upgrades.
    UnprovenUpgrades,
    /// Too many certificate chains wait for verification.
    CertificateQueue,
    /// The head of the request is too large.
    HeadSize,
    /// The client has too many streams on its connection.
    Streams,
    /// The client reads nothing of a response.
    StalledStream,
    /// No stream to an apiserver became free.
    UpstreamStreams,
}

/// A metric, and the value of its label.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Counted {
    /// `jackstay_downstream_refused_total` by reason.
    Connection(&'static str),
    /// `jackstay_shed_total` by reason.
    Shed(Shed),
    /// `jackstay_downstream_frame_limit_total` by the kind of frames.
    Frames,
    /// `jackstay_client_verifications_total` by outcome.
    Verification(&'static str),
    /// Only as an error response, in `jackstay_own_errors_total` by reason.
    OwnError(&'static str),
    /// Only as a response that its client ended early, in `jackstay_responses_cut_total`.
    ResponseCut,
    /// Not counted: the HTTP/2 library refuses the stream.
    Uncounted,
}

/// What the client gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// The connection is closed: that of a flow with a reset, another one without a message.
    Close,
    /// The connection is reset.
    Reset,
    /// The connection is closed with GOAWAY, or after the response (HTTP/1.1). That of a flow is reset.
    GoAway,
    /// The connection is closed with GOAWAY and `ENHANCE_YOUR_CALM`.
    EnhanceYourCalm,
    /// The stream is reset with `REFUSED_STREAM`, which permits clients to repeat the request. A request over
    /// HTTP/1.1, and an upgrade, get 429.
    RefusedStream,
    /// The stream is reset, or the connection if its socket accepts no bytes.
    ResetStream,
    /// A response with this status code.
    Status(u16),
}

/// The row of a refusal in the table.
struct Row {
    limits: &'static [&'static str],
    reason: &'static str,
    counted: Counted,
    answer: Answer,
}

/// A row of the table: configuration keys, reason, metric with label, and answer.
const fn row(
    limits: &'static [&'static str],
    reason: &'static str,
    counted: Counted,
    answer: Answer,
) -> Row {
    Row { limits, reason, counted, answer }
}

const SLOTS: &[&str] = &["limits.max_connections"];
const MEMORY: &[&str] = &["memory_limit"];

impl Refusal {
    /// All refusals, in the order of the table.
    pub const ALL: [Self; 22] = [
        Self::SlotsFull,
        Self::SourceShare,
        Self::NotProven,
        Self::Evicted,
        Self::Descriptors,
        Self::Handshake,
        Self::HandshakeTimeout,
        Self::NoRequest,
        Self::Frames,
        Self::ConnectionMemory,
        Self::RequestMemory,
        Self::IdleConnection,
        Self::StalledReader,
        Self::LongRunning,
        Self::Lingering,
        Self::UnprovenRequests,
        Self::UnprovenUpgrades,
        Self::CertificateQueue,
        Self::HeadSize,
        Self::Streams,
        Self::StalledStream,
        Self::UpstreamStreams,
    ];

    /// The table.
    #[rustfmt::skip]
    const fn row(self) -> Row {
        use Answer::{Close, EnhanceYourCalm, GoAway, RefusedStream, Reset, ResetStream, Status};
        use Counted::{Connection, Frames, OwnError, ResponseCut, Uncounted, Verification};
        match self {
            Self::SlotsFull => row(SLOTS, "connection refused: in use are all of", Connection("cap"), Close),
            Self::SourceShare => row(
                &["limits.max_connections", "limits.source_prefix_v6"],
                "connection refused: its source uses its share of", Connection("source"), Close,
            ),
            Self::NotProven => row(SLOTS, "connection closed: it proved no identity", Connection("source"), Close),
            Self::Evicted => row(SLOTS, "idle connection closed for a new one: few of", Connection("evicted"), GoAway),
            Self::Descriptors => row(&[], "connection refused because it cannot be accepted", Connection("descriptors"), Reset),
            Self::Handshake => row(&[], "TLS handshake failed", Connection("handshake"), Close),
            Self::HandshakeTimeout => row(&["limits.handshake_timeout"], "TLS handshake timed out", Connection("timeout"), Close),
            Self::NoRequest => row(&["limits.header_timeout"], "no request received", Connection("timeout"), GoAway),
            Self::Frames => row(&[], "its client exceeded a limit of frames", Frames, EnhanceYourCalm),
            Self::ConnectionMemory => row(
                MEMORY, "connection refused for lack of memory (memory_limit, jackstay_memory_budget_bytes)",
                Counted::Shed(Shed::ConnectionRefused), Close,
            ),
            Self::RequestMemory => row(
                MEMORY, "memory for clients is short: see memory_limit and jackstay_memory_budget_bytes",
                Counted::Shed(Shed::StreamRefused), RefusedStream,
            ),
            Self::IdleConnection => row(MEMORY, "idle, and memory is short", Counted::Shed(Shed::IdleConnection), GoAway),
            Self::StalledReader => row(
                MEMORY, "the client takes no bytes, and memory is short (memory_limit)", Counted::Shed(Shed::StalledReader), ResetStream,
            ),
            Self::LongRunning => row(MEMORY, "closed for lack of memory", Counted::Shed(Shed::LongRunning), Close),
            Self::Lingering => row(
                &[], "closed connection reset before its client has closed it: too many wait for that",
                Counted::Shed(Shed::Lingering), Reset,
            ),
            Self::UnprovenRequests => row(
                &[], "too many requests with unproven tokens of this client's user or address wait",
                Counted::Shed(Shed::QueueFull), Status(429),
            ),
            Self::UnprovenUpgrades => row(
                &[], "too many upgrades without a proven token of this client's user or address wait",
                Counted::Shed(Shed::QueueFull), Status(429),
            ),
            Self::CertificateQueue => row(
                &[], "the client certificate chain is not verified yet: too many others wait for that",
                Verification("busy"), Status(429),
            ),
            Self::HeadSize => row(
                &["limits.max_header_bytes"], "the request's headers are larger than", OwnError("header_too_large"), Status(431),
            ),
            Self::Streams => row(&["limits.max_streams"], "too many streams", Uncounted, RefusedStream),
            Self::StalledStream => row(&["limits.stall_timeout"], "the client takes no bytes", ResponseCut, ResetStream),
            Self::UpstreamStreams => row(
                &["connections.max", "connections.max_streams"],
                "every stream to the apiservers is taken: see connections.max and connections.max_streams",
                OwnError("limit"), Status(429),
            ),
        }
    }

    /// The configuration keys of the limit; empty if it is fixed.
    pub const fn limits(self) -> &'static [&'static str] {
        self.row().limits
    }

    /// The reason in log lines and error responses. Where it names a limit, the number follows.
    pub const fn reason(self) -> &'static str {
        self.row().reason
    }

    /// The metric that counts it.
    pub const fn counted(self) -> Counted {
        self.row().counted
    }

    /// What the client gets.
    pub const fn answer(self) -> Answer {
        self.row().answer
    }
}

impl From<Refusal> for StatusError {
    /// 429, for a request that was refused before it was sent.
    fn from(refusal: Refusal) -> Self {
        Self::too_many_requests(refusal.reason())
    }
}

impl Counted {
    /// The value of the label; that of frames is their kind.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Connection(label) | Self::Verification(label) | Self::OwnError(label) => label,
            Self::Shed(shed) => shed.as_str(),
            Self::Frames => "frame",
            Self::ResponseCut => "client",
            Self::Uncounted => "",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_refusal_is_listed_once_and_has_a_reason() {
        for (index, refusal) in Refusal::ALL.into_iter().enumerate() {
            assert_eq!(refusal as usize, index, "{refusal:?}");
            assert!(!refusal.reason().is_empty(), "{refusal:?}");
        }
    }

    #[test]
    fn status_error_has_the_status_and_label_of_the_table() {
        for refusal in Refusal::ALL {
            let error = StatusError::from(refusal);
            let is_429 = matches!(refusal.answer(), Answer::Status(429) | Answer::RefusedStream);
            if let Counted::OwnError(label) = refusal.counted() {
                assert_eq!(error.label == label, is_429, "{refusal:?}");
            }
            assert!(!is_429 || error.code == 429, "{refusal:?}");
            assert_eq!(error.message, format!("jackstay: {}", refusal.reason()));
        }
    }
}
