//! The attacks, as a process without credentials can make them; one knows a valid token.

mod connections;
mod floods;
mod hellos;
mod memory;
mod records;
mod tokens;
mod unread;

use std::future::Future;
use std::time::Duration;

use tokio::task::JoinSet;

use crate::hostile::rig::Target;
use crate::support::pause;

/// An attack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attack {
    CertificateChains,
    LargeCertificateChains,
    IdleAdminConnections,
    IdleTcpConnections,
    IdleTlsConnections,
    LingeringConnections,
    LingeringConnectionsFewDescriptors,
    ReopenedConnections,
    RejectedConnections,
    ZeroWindowSmall,
    ZeroWindowLarge,
    SlowReaders,
    LargeHeaders,
    EndlessBodies,
    UnreadHttp1,
    UnreadHttp2,
    UnreadFlows,
    RandomTokens,
    RandomTokensManyConnections,
    RandomTokenUpgrades,
    TokensWithSuffix,
    WindowUpdateFlood,
    WindowUpdateFloodManyConnections,
    SettingsFlood,
    PingFlood,
    PriorityFlood,
    EmptyDataFlood,
    ContinuationFlood,
    UnknownFrameFlood,
    PacedResets,
    LongMethods,
    Handshakes,
    HalfHellos,
    IdleFlows,
    IdleFlowsOfManyUsers,
    ShortFlows,
    UnreadFlowsByName,
    TinyRecords,
    EmptyRecords,
}

impl Attack {
    pub const ALL: &[Self] = &[
        Self::CertificateChains,
        Self::LargeCertificateChains,
        Self::IdleAdminConnections,
        Self::IdleTcpConnections,
        Self::IdleTlsConnections,
        Self::LingeringConnections,
        Self::LingeringConnectionsFewDescriptors,
        Self::ReopenedConnections,
        Self::RejectedConnections,
        Self::ZeroWindowSmall,
        Self::ZeroWindowLarge,
        Self::SlowReaders,
        Self::LargeHeaders,
        Self::EndlessBodies,
        Self::UnreadHttp1,
        Self::UnreadHttp2,
        Self::UnreadFlows,
        Self::RandomTokens,
        Self::RandomTokensManyConnections,
        Self::RandomTokenUpgrades,
        Self::TokensWithSuffix,
        Self::WindowUpdateFlood,
        Self::WindowUpdateFloodManyConnections,
        Self::SettingsFlood,
        Self::PingFlood,
        Self::PriorityFlood,
        Self::EmptyDataFlood,
        Self::ContinuationFlood,
        Self::UnknownFrameFlood,
        Self::PacedResets,
        Self::LongMethods,
        Self::Handshakes,
        Self::HalfHellos,
        Self::IdleFlows,
        Self::IdleFlowsOfManyUsers,
        Self::ShortFlows,
        Self::UnreadFlowsByName,
        Self::TinyRecords,
        Self::EmptyRecords,
    ];

    /// One of each kind, for the short form.
    pub const SHORT: &[Self] = &[
        Self::IdleTlsConnections,
        Self::LingeringConnectionsFewDescriptors,
        Self::ReopenedConnections,
        Self::RejectedConnections,
        Self::ZeroWindowSmall,
        Self::LargeHeaders,
        Self::EndlessBodies,
        Self::UnreadHttp1,
        Self::UnreadFlows,
        Self::RandomTokensManyConnections,
        Self::WindowUpdateFloodManyConnections,
        Self::PacedResets,
        Self::Handshakes,
        Self::IdleFlowsOfManyUsers,
        Self::ShortFlows,
        Self::TinyRecords,
        Self::EmptyRecords,
    ];

    /// Whether the attack uses tokens.
    pub fn has_tokens(self) -> bool {
        matches!(
            self,
            Self::RandomTokens
                | Self::RandomTokensManyConnections
                | Self::RandomTokenUpgrades
                | Self::TokensWithSuffix
                | Self::RejectedConnections
        )
    }

    /// The number of users that attack, each with a process of its own.
    pub fn users(self) -> u32 {
        if self == Self::IdleFlowsOfManyUsers { 12 } else { 1 }
    }

    /// The limit on descriptors of the proxy, if it is lower than that of this process.
    pub fn descriptor_limit(self) -> Option<u32> {
        (self == Self::LingeringConnectionsFewDescriptors).then_some(2_048)
    }

    /// Whether it opens connections as fast as the proxy accepts them, so that others wait in the same queue.
    pub fn fills_accept_queue(self) -> bool {
        matches!(
            self,
            Self::LingeringConnections
                | Self::LingeringConnectionsFewDescriptors
                | Self::ReopenedConnections
        )
    }

    /// Whether its requests are forwarded, so that the apiservers of the test are busy with them.
    pub fn reaches_apiservers(self) -> bool {
        matches!(
            self,
            Self::IdleTlsConnections
                | Self::RejectedConnections
                | Self::ZeroWindowSmall
                | Self::ZeroWindowLarge
                | Self::SlowReaders
                | Self::LargeHeaders
                | Self::EndlessBodies
                | Self::UnreadHttp1
                | Self::UnreadHttp2
                | Self::UnreadFlows
                | Self::RandomTokens
                | Self::RandomTokensManyConnections
                | Self::RandomTokenUpgrades
                | Self::TokensWithSuffix
                | Self::IdleFlows
                | Self::IdleFlowsOfManyUsers
                | Self::ShortFlows
                | Self::UnreadFlowsByName
                | Self::TinyRecords
                | Self::EmptyRecords
        )
    }

    /// Name and dimensions.
    pub fn name(self) -> &'static str {
        match self {
            Self::CertificateChains => "chains of 6 CA certificates of one name",
            Self::LargeCertificateChains => "2,000 connections with a chain of 30 KiB",
            Self::IdleAdminConnections => "400 idle connections to the admin port",
            Self::IdleTcpConnections => "4,200 idle TCP connections",
            Self::IdleTlsConnections => "4,200 idle TLS connections after one request",
            Self::LingeringConnections => "12,000 connections that linger",
            Self::LingeringConnectionsFewDescriptors => "the same with 2,048 descriptors",
            Self::ReopenedConnections => "2,900 connections, closed and opened again",
            Self::RejectedConnections => "4,400 connections with garbage tokens",
            Self::ZeroWindowSmall => "zero window, 100 x 1,000 streams, small responses",
            Self::ZeroWindowLarge => "zero window, 4 x 1,000 streams, large responses",
            Self::SlowReaders => "50 x 20 streams that read 1 KiB a second",
            Self::LargeHeaders => "20 x 1,000 requests with 60 KB of headers",
            Self::EndlessBodies => "200 x 16 request bodies that never end",
            Self::UnreadHttp1 => "100 HTTP/1.1 sockets that are never read",
            Self::UnreadHttp2 => "100 HTTP/2 sockets that are never read",
            Self::UnreadFlows => "100 L4 flows that stop reading",
            Self::RandomTokens => "random tokens, 10 x 1,000",
            Self::RandomTokensManyConnections => "random tokens, 100 x 1,000",
            Self::RandomTokenUpgrades => "random tokens on upgrades",
            Self::TokensWithSuffix => "a valid token with random suffixes",
            Self::WindowUpdateFlood => "WINDOW_UPDATE flood, 10 connections",
            Self::WindowUpdateFloodManyConnections => "WINDOW_UPDATE flood, 50 connections",
            Self::SettingsFlood => "SETTINGS flood, 10 connections",
            Self::PingFlood => "PING flood, 10 connections",
            Self::PriorityFlood => "PRIORITY flood, 10 connections",
            Self::EmptyDataFlood => "empty DATA flood, 10 connections",
            Self::ContinuationFlood => "CONTINUATION without end, 10 connections",
            Self::UnknownFrameFlood => "unknown frames, 10 connections",
            Self::PacedResets => "paced resets, 1,000 requests each",
            Self::LongMethods => "methods of 30 KB",
            Self::Handshakes => "TLS handshakes without a request",
            Self::HalfHellos => "4,200 half ClientHellos",
            Self::IdleFlows => "4,200 idle flows by server name",
            Self::IdleFlowsOfManyUsers => "12 users, each with 600 idle flows by server name",
            Self::ShortFlows => "short flows by server name, 50 connections",
            Self::UnreadFlowsByName => "100 flows by server name that stop reading",
            Self::TinyRecords => "TLS records of one byte, 40 connections",
            Self::EmptyRecords => "32 empty TLS records before each byte, 100 connections",
        }
    }
}

/// Attacks until the time is over.
pub fn run(target: &Target) {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime");
    runtime.block_on(async {
        // The process keeps its connections until the attack is over.
        let attack = async {
            match target.attack {
                Attack::CertificateChains => connections::certificate_chains(target).await,
                Attack::LargeCertificateChains => connections::large_chains(target).await,
                Attack::IdleAdminConnections => connections::idle_admin(target).await,
                Attack::IdleTcpConnections => connections::idle_tcp(target).await,
                Attack::IdleTlsConnections => connections::idle_tls(target).await,
                Attack::LingeringConnections | Attack::LingeringConnectionsFewDescriptors => {
                    connections::lingering(target, 12_000).await;
                }
                Attack::ReopenedConnections => connections::reopened(target).await,
                Attack::RejectedConnections => tokens::idle(target, 4400).await,
                Attack::Handshakes => connections::handshakes(target).await,
                Attack::ZeroWindowSmall => memory::zero_window(target, 100, 1000, "/version").await,
                Attack::ZeroWindowLarge => {
                    memory::zero_window(target, 4, 1000, memory::LARGE).await;
                }
                Attack::SlowReaders => memory::slow_readers(target, 50, 20).await,
                Attack::LargeHeaders => memory::large_headers(target, 20, 1000).await,
                Attack::EndlessBodies => memory::endless_bodies(target, 200, 16).await,
                Attack::UnreadHttp1 => unread::http1(target.server, 100).await,
                Attack::UnreadHttp2 => unread::http2(target.server, 100).await,
                Attack::UnreadFlows => {
                    let name = target.passthrough.ip().into();
                    unread::flows(target.passthrough, name, 100).await;
                }
                Attack::RandomTokens => tokens::random(target, 10).await,
                Attack::RandomTokensManyConnections => tokens::random(target, 100).await,
                Attack::RandomTokenUpgrades => tokens::upgrades(target, 10).await,
                Attack::TokensWithSuffix => tokens::suffixes(target, 10).await,
                Attack::WindowUpdateFlood => {
                    floods::frames(target, 10, &floods::WINDOW_UPDATES).await;
                }
                Attack::WindowUpdateFloodManyConnections => {
                    floods::frames(target, 50, &floods::WINDOW_UPDATES).await;
                }
                Attack::SettingsFlood => floods::frames(target, 10, &floods::SETTINGS).await,
                Attack::PingFlood => floods::frames(target, 10, &floods::PINGS).await,
                Attack::PriorityFlood => floods::frames(target, 10, &floods::PRIORITIES).await,
                Attack::EmptyDataFlood => floods::frames(target, 10, &floods::EMPTY_DATA).await,
                Attack::ContinuationFlood => {
                    floods::frames(target, 10, &floods::CONTINUATIONS).await;
                }
                Attack::UnknownFrameFlood => floods::frames(target, 10, &floods::UNKNOWN).await,
                Attack::PacedResets => floods::paced_resets(target, 1000).await,
                Attack::LongMethods => floods::long_methods(target, 1000).await,
                Attack::HalfHellos => hellos::idle(target, 4200, 50).await,
                Attack::IdleFlows => hellos::idle(target, 4200, 100).await,
                Attack::IdleFlowsOfManyUsers => hellos::idle(target, 600, 100).await,
                Attack::ShortFlows => hellos::short(target, 50).await,
                Attack::UnreadFlowsByName => {
                    unread::flows(target.server, hellos::name(), 100).await;
                }
                Attack::TinyRecords => records::of_one_byte(target, 40).await,
                Attack::EmptyRecords => records::empty(target, 100, 32).await,
            }
        };
        let _ = tokio::time::timeout(target.duration, attack).await;
    });
}

/// Runs `count` copies of an attack side by side, and starts each again when it ends.
async fn repeat<F>(count: usize, attempt: impl Fn(usize) -> F)
where
    F: Future<Output = std::io::Result<()>> + Send + 'static,
{
    let mut running = JoinSet::new();
    for at in 0..count {
        let attempt = attempt(at);
        running.spawn(async move { (at, attempt.await) });
    }
    while let Some(done) = running.join_next().await {
        let (at, result) = done.expect("no attack panics");
        if result.is_err() {
            // A refused connection must not turn into a loop without a pause.
            pause(Duration::from_millis(5)).await;
        }
        let attempt = attempt(at);
        running.spawn(async move { (at, attempt.await) });
    }
}
