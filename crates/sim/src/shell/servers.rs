//! The apiservers of a run: processes on hosts of their own over one store.

use std::io;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use jackstay_apiserver::aggregated::AggregatedPath;
use jackstay_apiserver::cluster::Cluster;
use jackstay_apiserver::pki::Issued;
use jackstay_apiserver::{ApiServer, Options};
use jackstay_core::backends::{Backend, BackendId, certificate_hash};
use jackstay_sys::sockets::stream::TcpListener;

use super::certificates::Certificates;
use super::process::Process;
use super::program::APISERVER_PORT;
use crate::faults::FaultKind;
use crate::net::sockets::SocketNetwork;
use crate::net::{HostId, ProcessId, ProcessState, SocketOptions};

/// The shortest time that a request takes. Up to as much is added at random.
const SERVICE_TIME: Duration = Duration::from_micros(600);
/// Time from a change in the store to the watch cache.
const CACHE_LAG: Duration = Duration::from_millis(1);
/// How long a server that shuts down serves the streams that are open.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(2);

/// An apiserver.
pub struct Apiserver {
    network: SocketNetwork,
    /// Its number as a process of the network.
    number: ProcessId,
    server: ApiServer,
    /// The [`certificate_hash`] of each certificate that it has had.
    certificates: Vec<u64>,
    process: Process,
    is_running: bool,
    /// Until a fault that overlaps others starts it again.
    is_dead: bool,
}

impl Apiserver {
    /// Starts an apiserver with this certificate on a host.
    ///
    /// # Errors
    /// The certificate cannot be used, or the host has another apiserver.
    pub fn start(
        network: &SocketNetwork,
        host: HostId,
        cluster: &Cluster,
        (certificates, certificate): (&Certificates, Issued),
        (max_streams, compresses_responses): (u32, bool),
    ) -> io::Result<Self> {
        let mut options = Options::named(&format!("apiserver-{host}"));
        options.compresses_responses = compresses_responses;
        let hash = certificate_hash(&certificate.cert_der());
        options.certificate = Some(certificate);
        let server = ApiServer::new(cluster, certificates.pki(), options)?;
        server.set_faults(|faults| {
            faults.service_time = Some(SERVICE_TIME..=2 * SERVICE_TIME);
            faults.cache_lag = Some(CACHE_LAG);
            faults.max_streams = Some(max_streams);
        });
        let number = network.add_process(host);
        let process = serve(network, number, &server)?;
        Ok(Self {
            network: network.clone(),
            number,
            server,
            certificates: vec![hash],
            process,
            is_running: true,
            is_dead: false,
        })
    }

    /// Its number as a process of the network.
    pub fn number(&self) -> ProcessId {
        self.number
    }

    /// Begins or ends a fault of the process. Those of the network are not meant here.
    ///
    /// # Errors
    /// A killed process cannot listen again.
    pub fn set_fault(&mut self, kind: FaultKind, begins: bool) -> io::Result<()> {
        match kind {
            // Another fault may have killed it.
            FaultKind::Stop if self.is_dead => {}
            FaultKind::Stop if begins => {
                self.is_running = false;
                self.network.set_process(self.number, ProcessState::Stopped);
                self.process.stop();
            }
            FaultKind::Stop => {
                self.is_running = true;
                self.network.set_process(self.number, ProcessState::Running);
                self.process.cont();
            }
            FaultKind::Kill if begins => self.kill(),
            FaultKind::Compact if begins => {
                self.server.compact();
            }
            FaultKind::ShutDown if begins => self.server.drain(SHUTDOWN_GRACE),
            // After another fault that has ended meanwhile, the process runs again.
            FaultKind::Kill | FaultKind::ShutDown => {
                self.kill();
                self.restart()?;
            }
            _ => self.server.set_faults(|faults| match kind {
                FaultKind::Hang => (faults.hang, faults.dead) = (begins, begins),
                FaultKind::Unready => faults.unready = begins,
                FaultKind::Forbid => faults.rbac_empty = begins,
                FaultKind::Slow(time) => {
                    let time = if begins { time } else { SERVICE_TIME };
                    faults.service_time = Some(time..=2 * time);
                }
                FaultKind::GroupRefused => {
                    faults.aggregated_path = path(begins, AggregatedPath::Refused);
                }
                FaultKind::GroupDark => {
                    faults.aggregated_path = path(begins, AggregatedPath::Dark);
                }
                FaultKind::GroupUnavailable => faults.aggregated_unavailable = begins,
                FaultKind::Overload => faults.max_in_flight = begins.then_some(0),
                FaultKind::Lag(lag) => {
                    faults.cache_lag = Some(if begins { lag } else { CACHE_LAG });
                }
                FaultKind::Goaway(chance) => {
                    faults.goaway_chance = if begins { chance } else { 0.0 }
                }
                _ => {}
            }),
        }
        Ok(())
    }

    /// Names this address in `/api`.
    pub fn advertise(&self, address: &'static str) {
        self.server.set_faults(|faults| faults.advertised_address = Some(address));
    }

    /// Shows this certificate on new connections.
    ///
    /// # Errors
    /// The certificate cannot be used.
    pub fn renew_certificate(&mut self, certificate: &Issued) -> io::Result<()> {
        self.certificates.push(certificate_hash(&certificate.cert_der()));
        self.server.set_certificate(certificate)
    }

    /// Whether jackstay means this apiserver, and no other one.
    pub fn is_backend(&self, backend: &Backend) -> bool {
        match &backend.id {
            BackendId::Certificate(hash) => self.certificates.contains(hash),
            BackendId::Address(address) => **address == *self.server.name(),
            BackendId::Indistinct(_) => false,
        }
    }

    /// The server, which outlives its processes.
    pub fn server(&self) -> &ApiServer {
        &self.server
    }

    /// The requests and watches of clients that a running server serves.
    pub fn open_requests(&self) -> u64 {
        let counters = self.server.counters();
        let probes = counters.own_requests_of_jackstay.load(Relaxed);
        let requests = counters.in_flight.load(Relaxed) - probes;
        let open = requests + counters.watches.load(Relaxed);
        if self.is_running { open } else { 0 }
    }

    fn kill(&mut self) {
        // Its kernel closes the sockets before the program could.
        self.network.set_process(self.number, ProcessState::Dead);
        self.process.kill();
        (self.is_running, self.is_dead) = (false, true);
    }

    /// Starts a killed server again. Its watch cache has no history (apiserver, `storage/cacher/watch_cache.go`,
    /// `Replace`).
    fn restart(&mut self) -> io::Result<()> {
        self.server.compact();
        self.network.set_process(self.number, ProcessState::Running);
        self.process = serve(&self.network, self.number, &self.server)?;
        (self.is_running, self.is_dead) = (true, false);
        Ok(())
    }
}

/// The path to the aggregated server when a fault begins or ends.
fn path(begins: bool, fault: AggregatedPath) -> AggregatedPath {
    if begins { fault } else { AggregatedPath::Open }
}

/// Starts the process of a server.
fn serve(network: &SocketNetwork, number: ProcessId, server: &ApiServer) -> io::Result<Process> {
    let listener = network.listen_with(number, APISERVER_PORT, SocketOptions::go())?;
    Ok(Process::start(server.serve(TcpListener::Virtual(listener))))
}
