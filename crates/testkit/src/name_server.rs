//! A name server with a script, over UDP and TCP.

use std::collections::HashMap;
use std::io::{self, Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use hickory_proto::op::{Message, ResponseCode};
use hickory_proto::rr::rdata::{A, AAAA, CNAME};
use hickory_proto::rr::{Name, RData, Record};

pub use hickory_proto::rr::RecordType;
use tempfile::TempDir;

/// The response to a query.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// These addresses, with a TTL in seconds; those of the other family are left out.
    Addresses(Vec<IpAddr>, u32),
    /// The same over TCP. Over UDP a response without records that says that it is cut.
    Cut(Vec<IpAddr>, u32),
    /// An alias (CNAME) of this name, and the addresses of that in the same response.
    Alias(String, Vec<IpAddr>, u32),
    /// NXDOMAIN.
    NoSuchName,
    /// SERVFAIL.
    Failure,
    /// REFUSED.
    Refusal,
    /// None.
    Silence,
}

/// Replies by name and record type, or by name, or by the domain that a name is in.
#[derive(Debug, Default)]
struct Script {
    exact: HashMap<(String, RecordType), Reply>,
    names: HashMap<String, Reply>,
    domains: Vec<(String, Reply)>,
    /// The server responds to nothing.
    is_silent: bool,
    queries: Vec<(String, RecordType)>,
}

/// A name server, and the files of a resolver that refer to it.
#[derive(Debug)]
pub struct ResolverSetup {
    pub server: NameServer,
    pub hosts: PathBuf,
    pub resolv_conf: PathBuf,
    _directory: TempDir,
}

impl ResolverSetup {
    /// Starts the name server and writes resolv.conf. There is no file of hosts.
    pub fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let [hosts, resolv_conf] = ["hosts", "resolv.conf"].map(|name| directory.path().join(name));
        let setup = Self { server: NameServer::start(), hosts, resolv_conf, _directory: directory };
        // Without it, the search list has the domain of this host.
        setup.write_resolv_conf("search .\n");
        setup
    }

    /// Writes resolv.conf, with the line of the name server.
    pub fn write_resolv_conf(&self, lines: &str) {
        let text = format!("nameserver 127.0.0.1\n{lines}");
        std::fs::write(&self.resolv_conf, text).unwrap();
    }
}

/// A name server. Names of which the script says nothing do not exist. Its threads run until the process ends.
#[derive(Debug, Clone)]
pub struct NameServer {
    address: SocketAddr,
    script: Arc<Mutex<Script>>,
}

impl NameServer {
    /// Starts a name server on a free port of the loopback address.
    pub fn start() -> Self {
        // The port of the UDP socket may be in use for TCP.
        let servers = (0..20).map(|_| Self::start_at("127.0.0.1:0".parse().unwrap()));
        servers.flatten().next().expect("a port that is free for UDP and TCP")
    }

    /// Starts a name server at this address.
    pub fn start_at(address: SocketAddr) -> io::Result<Self> {
        let udp = UdpSocket::bind(address)?;
        let address = udp.local_addr()?;
        let tcp = TcpListener::bind(address)?;
        let script = Arc::<Mutex<Script>>::default();
        let server = Self { address, script };
        let over_udp = server.clone();
        std::thread::spawn(move || over_udp.serve_udp(&udp));
        let over_tcp = server.clone();
        std::thread::spawn(move || {
            for stream in tcp.incoming().flatten() {
                let server = over_tcp.clone();
                std::thread::spawn(move || server.serve_tcp(stream));
            }
        });
        Ok(server)
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Sets the reply to all queries for a name.
    pub fn set(&self, name: &str, reply: Reply) {
        self.script.lock().unwrap().names.insert(name.to_owned(), reply);
    }

    /// Sets the addresses of a name.
    pub fn set_addresses(&self, name: &str, addresses: &[&str], ttl: u32) {
        self.set(name, Reply::Addresses(parse(addresses), ttl));
    }

    /// Sets the reply to the queries for one record type of a name.
    pub fn set_type(&self, name: &str, kind: RecordType, reply: Reply) {
        self.script.lock().unwrap().exact.insert((name.to_owned(), kind), reply);
    }

    /// Sets the reply for the names below a domain of which nothing else is said.
    pub fn set_domain(&self, domain: &str, reply: Reply) {
        self.script.lock().unwrap().domains.push((format!(".{domain}"), reply));
    }

    /// Whether the server responds to nothing.
    pub fn set_silent(&self, is_silent: bool) {
        self.script.lock().unwrap().is_silent = is_silent;
    }

    /// Forgets all replies and queries.
    pub fn forget(&self) {
        *self.script.lock().unwrap() = Script::default();
    }

    /// The number of queries so far.
    pub fn query_count(&self) -> usize {
        self.script.lock().unwrap().queries.len()
    }

    /// Takes the names of the queries since the last call, without repetitions one after another.
    pub fn take_names(&self) -> Vec<String> {
        let queries = std::mem::take(&mut self.script.lock().unwrap().queries);
        let mut names: Vec<String> = queries.into_iter().map(|(name, _)| name).collect();
        names.dedup();
        names
    }

    fn serve_udp(&self, socket: &UdpSocket) {
        let mut buffer = [0; 1500];
        while let Ok((size, peer)) = socket.recv_from(&mut buffer) {
            if let Some(response) = self.respond(&buffer[..size], false) {
                let _ = socket.send_to(&response, peer);
            }
        }
    }

    /// Responds to the queries on a connection, each after its length (RFC 1035 section 4.2.2).
    fn serve_tcp(&self, mut stream: TcpStream) {
        let mut length = [0; 2];
        while stream.read_exact(&mut length).is_ok() {
            let mut query = vec![0; u16::from_be_bytes(length).into()];
            if stream.read_exact(&mut query).is_err() {
                return;
            }
            if let Some(response) = self.respond(&query, true) {
                let length = u16::try_from(response.len()).unwrap().to_be_bytes();
                let _ = stream.write_all(&[&length[..], &response].concat());
            }
        }
    }

    fn respond(&self, query: &[u8], over_tcp: bool) -> Option<Vec<u8>> {
        let query = Message::from_vec(query).ok()?;
        let question = query.queries.first()?.clone();
        let name = question.name().to_string().to_ascii_lowercase();
        let name = name.trim_end_matches('.').to_owned();
        let kind = question.query_type();
        let reply = {
            let mut script = self.script.lock().unwrap();
            script.queries.push((name.clone(), kind));
            script.reply(&name, kind)
        };
        let mut message = Message::response(query.metadata.id, query.metadata.op_code);
        message.metadata.recursion_desired = query.metadata.recursion_desired;
        message.metadata.recursion_available = true;
        message.add_query(question.clone());
        match reply {
            Reply::Silence => return None,
            Reply::NoSuchName => message.metadata.response_code = ResponseCode::NXDomain,
            Reply::Failure => message.metadata.response_code = ResponseCode::ServFail,
            Reply::Refusal => message.metadata.response_code = ResponseCode::Refused,
            Reply::Cut(..) if !over_tcp => message.metadata.truncation = true,
            Reply::Addresses(addresses, ttl) | Reply::Cut(addresses, ttl) => {
                message.add_answers(records(question.name(), kind, &addresses, ttl));
            }
            Reply::Alias(target, addresses, ttl) => {
                let target = Name::from_ascii(target + ".").unwrap();
                let alias = RData::CNAME(CNAME(target.clone()));
                message.add_answer(Record::from_rdata(question.name().clone(), ttl, alias));
                message.add_answers(records(&target, kind, &addresses, ttl));
            }
        }
        message.to_vec().ok()
    }
}

impl Script {
    fn reply(&self, name: &str, kind: RecordType) -> Reply {
        if self.is_silent {
            return Reply::Silence;
        }
        let exact = self.exact.get(&(name.to_owned(), kind)).or_else(|| self.names.get(name));
        let of_domain = || self.domains.iter().find(|(domain, _)| name.ends_with(domain));
        let reply = exact.or_else(|| of_domain().map(|(_, reply)| reply));
        reply.cloned().unwrap_or(Reply::NoSuchName)
    }
}

/// The records of one type.
fn records(name: &Name, kind: RecordType, addresses: &[IpAddr], ttl: u32) -> Vec<Record> {
    let data = addresses.iter().filter_map(|ip| match (ip, kind) {
        (IpAddr::V4(ip), RecordType::A) => Some(RData::A(A(*ip))),
        (IpAddr::V6(ip), RecordType::AAAA) => Some(RData::AAAA(AAAA(*ip))),
        _ => None,
    });
    data.map(|data| Record::from_rdata(name.clone(), ttl, data)).collect()
}

/// The IP addresses that these texts are.
pub fn parse(addresses: &[&str]) -> Vec<IpAddr> {
    addresses.iter().map(|address| address.parse().unwrap()).collect()
}
