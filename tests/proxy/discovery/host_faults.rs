//! Starts on a host without DNS, without an address family or without `/etc`. Each test changes the whole
//! host, so the tests run as root in namespaces of their own, one after the other:
//!
//! ```sh
//! unshare --net --mount sh -c 'ip link set lo up && cargo test --test proxy discovery:: -- --ignored --test-threads=1'
//! ```
//!
//! With `JACKSTAY_BIN`, which names a release build, the last test measures that build against the
//! promise.

use crate::support::child::{KillOnDrop, free_address};
use crate::support::figures::check_figure;
use crate::support::{CONFIGMAPS, Certs, PATIENCE, pages, pause, until, wait};
use jackstay_apiserver as apiserver;
use jackstay_apiserver::cluster::Cluster;
use jackstay_apiserver::{ApiServerHandle, Options};
use jackstay_config::Config;
use jackstay_core::discovery::address::EndpointAddress;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpStream, UdpSocket};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Promised time from the start to the first response.
const FIRST_RESPONSE: Duration = Duration::from_secs(1);

pub fn run(command: &str) {
    let status = Command::new("sh").args(["-c", command]).status().unwrap();
    assert!(status.success(), "{command}");
}

/// A change of the host, and the command that undoes it on drop.
pub struct HostChange(pub &'static str);

impl Drop for HostChange {
    fn drop(&mut self) {
        let _ = Command::new("sh").args(["-c", self.0]).status();
    }
}

/// Replaces the content of `/etc/resolv.conf` until the returned value is dropped.
fn resolv_conf(dir: &Path, text: &str) -> HostChange {
    // Mounts of this test must not propagate to the host.
    run("mount --make-rprivate /");
    let file = dir.join("resolv.conf");
    std::fs::write(&file, text).unwrap();
    // It may be a symlink to a file that does not exist in this namespace.
    run("[ -e /etc/resolv.conf ] || touch /etc/resolv.conf");
    run(&format!("mount --bind {} $(readlink -f /etc/resolv.conf)", file.display()));
    HostChange("umount -l $(readlink -f /etc/resolv.conf)")
}

/// An apiserver on a loopback address.
struct LocalServer {
    certs: Certs,
    server: ApiServerHandle,
}

impl LocalServer {
    fn on(ip: IpAddr) -> Self {
        let (certs, cluster) = (Certs::new(), Cluster::new());
        let options = Options { bind: (ip, 0).into(), ..Options::named("one") };
        let server = apiserver::start(&cluster, &certs.pki, options).unwrap();
        Self { certs, server }
    }

    fn config(&self) -> Config {
        self.certs.config(&[self.server.addr])
    }

    fn named(&self, host: &str) -> EndpointAddress {
        EndpointAddress { host: host.to_owned(), port: self.server.addr.port() }
    }

    /// The time from the start to the first response.
    async fn first_response(&self, config: Config) -> Duration {
        let start = Instant::now();
        let proxy = self.certs.start(config);
        let client = proxy.client().await;
        until("a request succeeds", async || client.get(CONFIGMAPS).await.unwrap().status == 200)
            .await;
        start.elapsed()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
#[ignore = "drops DNS packets on the whole host; needs its own namespaces"]
async fn silent_name_servers_do_not_delay_the_first_response() {
    let local = LocalServer::on(Ipv4Addr::LOCALHOST.into());
    let text = "nameserver 127.0.0.53\nnameserver 127.0.0.54\n";
    let _files = resolv_conf(local.certs.path(), text);
    run(
        "nft add table inet t && nft 'add chain inet t o { type filter hook output priority 0 ; }' \
         && nft add rule inet t o udp dport 53 drop && nft add rule inet t o tcp dport 53 drop",
    );
    let _rules = HostChange("nft delete table inet t");
    let address_only = local.first_response(local.config()).await;
    let mut config = local.config();
    config.upstreams[0].endpoints.push(local.named("lb.example.com"));
    let address_and_name = local.first_response(config).await;
    check_figure("no DNS: first response", address_only, FIRST_RESPONSE);
    check_figure("no DNS, a name and an address: first response", address_and_name, FIRST_RESPONSE);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
#[ignore = "is the name server of the whole host; needs its own namespaces"]
async fn static_addresses_cause_no_dns_query() {
    let local = LocalServer::on(Ipv4Addr::LOCALHOST.into());
    let _files = resolv_conf(local.certs.path(), "nameserver 127.0.0.99\n");
    let socket = UdpSocket::bind("127.0.0.99:53").unwrap();
    let queries = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&queries);
    std::thread::spawn(move || {
        while socket.recv_from(&mut [0; 1500]).is_ok() {
            count.fetch_add(1, Relaxed);
        }
    });
    let mut config = local.config();
    config.upstreams[0].endpoints.push(local.named("localhost"));
    let proxy = local.certs.start(config.clone());
    proxy.wait_connected(2).await;
    let client = proxy.client().await;
    for _ in 0..100 {
        assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 200);
        pause(Duration::from_millis(20)).await;
    }
    assert_eq!(queries.load(Relaxed), 0, "a name server was queried");
    drop(proxy);

    // A configured name causes queries, so the check above would detect one.
    config.upstreams[0].endpoints.push(local.named("lb.example.com"));
    let proxy = local.certs.start(config);
    until("a name server is queried", async || queries.load(Relaxed) > 0).await;
    drop(proxy);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
#[ignore = "removes IPv6 and /etc from the whole host; needs its own namespaces"]
async fn start_works_without_ipv6_and_without_etc() {
    let local = LocalServer::on(Ipv4Addr::LOCALHOST.into());
    run("sysctl -qw net.ipv6.conf.all.disable_ipv6=1");
    let _ipv6 = HostChange("sysctl -qw net.ipv6.conf.all.disable_ipv6=0");
    run("mount --make-rprivate / && mount -t tmpfs none /etc");
    let _files = HostChange("umount -l /etc");
    assert!(!Path::new("/etc/nsswitch.conf").exists() && !Path::new("/etc/hosts").exists());
    let mut config = local.config();
    config.upstreams[0].endpoints = vec![local.named("localhost"), local.named("lb.example.com")];
    config.listeners[0].bind.push((Ipv6Addr::LOCALHOST, 0).into());
    let took = local.first_response(config).await;
    check_figure("no IPv6 and no /etc: first response", took, FIRST_RESPONSE);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
#[ignore = "removes 127.0.0.1 from the whole host; needs its own namespaces"]
async fn start_works_with_only_the_ipv6_loopback() {
    run("ip address delete 127.0.0.1/8 dev lo");
    let _ipv4 = HostChange("ip address add 127.0.0.1/8 dev lo");
    let local = LocalServer::on(Ipv6Addr::LOCALHOST.into());
    let mut config = local.config();
    config.upstreams[0].endpoints = vec![local.named("localhost")];
    config.listeners[0].bind = vec![(Ipv6Addr::LOCALHOST, 0).into()];
    config.admin.bind = (Ipv6Addr::LOCALHOST, 0).into();
    let took = local.first_response(config).await;
    check_figure("only IPv6: first response", took, FIRST_RESPONSE);
}

#[test]
#[ignore = "removes DNS, IPv6 and /etc from the whole host; needs its own namespaces"]
fn start_without_dns_ipv6_and_disk_listens_immediately() {
    let certs = Certs::new();
    run("sysctl -qw net.ipv6.conf.all.disable_ipv6=1");
    let _ipv6 = HostChange("sysctl -qw net.ipv6.conf.all.disable_ipv6=0");
    run("mount --make-rprivate / && mount -t tmpfs none /etc");
    let _etc = HostChange("umount -l /etc");
    std::fs::write("/etc/resolv.conf", "nameserver 127.0.0.53\n").unwrap();
    run(
        "nft add table inet t && nft 'add chain inet t o { type filter hook output priority 0 ; }' \
         && nft add rule inet t o udp dport 53 drop && nft add rule inet t o tcp dport 53 drop",
    );
    let _rules = HostChange("nft delete table inet t");

    // No apiserver, no writable state directory, and neither of the files of the other sources.
    let (listener, admin) = (free_address(), free_address());
    let mut config = certs.config(&["192.0.2.1:6443".parse().unwrap()]);
    config.admin.bind = admin;
    config.state_dir = Some("/proc/no-disk".into());
    config.listeners[0].bind = vec![listener, (Ipv6Addr::LOCALHOST, listener.port()).into()];
    let upstream = &mut config.upstreams[0];
    upstream.endpoints.push(EndpointAddress { host: "lb.example.com".into(), port: 6443 });
    upstream.endpoints_file = Some(certs.path().join("endpoints"));
    upstream.discovery.kubeconfig = Some(certs.path().join("kubeconfig"));
    let file = certs.path().join("jackstay.yaml");
    std::fs::write(&file, config.to_json().to_string()).unwrap();

    let release = std::env::var_os("JACKSTAY_BIN");
    let program = release.clone().unwrap_or_else(|| env!("CARGO_BIN_EXE_jackstay").into());
    let mut times = Vec::new();
    for _ in 0..5 {
        let start = Instant::now();
        let mut command = Command::new(&program);
        command.args(["run", "--config"]).arg(&file);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut process = KillOnDrop(command.spawn().unwrap());
        wait::until_blocking(PATIENCE, "jackstay listens", || {
            assert_eq!(process.try_wait().unwrap(), None, "jackstay ended");
            TcpStream::connect(listener).is_ok()
        });
        times.push(start.elapsed());

        let ready = pages::get_blocking(admin, "/readyz").unwrap();
        assert!(ready.starts_with("HTTP/1.1 503"), "{ready}");
        let sources = ["file", "dns", "slices"].map(|name| format!("source control-plane/{name}"));
        for failed in sources.iter().map(String::as_str).chain(["upstream control-plane"]) {
            assert!(ready.contains(failed), "{failed}: {ready}");
        }
    }
    times.sort_unstable();
    println!("listening after {times:?}");
    // The fastest start counts, because other processes of the machine delay the others.
    let limit = Duration::from_millis(if release.is_some() { 100 } else { 1_000 });
    check_figure("start without DNS, IPv6 and disk: listening", times[0], limit);
}
