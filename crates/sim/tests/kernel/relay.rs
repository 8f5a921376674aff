//! The path between the two hosts of a case whose sockets are the kernel's: a TUN device, whose packets come back after
//! what a [`Link`] of the simulation does to them. So both sides of the comparison have the same path, and only TCP
//! differs. The kernel need not have netem.
//!
//! A packet comes back with source and destination exchanged, which leaves the checksums as they are: a server that
//! listens on the address of the device is reached at the next address. The port of the server tells cases apart.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::process::Command;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Instant;

use jackstay_sim::net::queue::Queue;
use jackstay_sim::net::{Link, Side};
use rustix::ioctl::{Setter, ioctl};

const DEVICE: &str = "jackstay-test";
/// The address of the device, which is that of the second host of a simulated network.
const ADDRESS: &str = "10.0.0.2/24";
/// From `linux/if_tun.h`.
const TUNSETIFF: rustix::ioctl::Opcode = 0x4004_54ca;
const IFF_TUN: u8 = 0x01;
const IFF_NO_PI: u8 = 0x10;
/// The offset of the flags in `struct ifreq`, and its size.
const FLAGS: usize = 16;
const REQUEST: usize = 40;
/// IP version 4, and its number of TCP.
const VERSION: u8 = 4;
const TCP: u8 = 6;

/// The device, whose threads run until the process ends.
pub struct Relay {
    shared: Mutex<Shared>,
    /// Packets wait.
    changed: Condvar,
}

struct Shared {
    paths: BTreeMap<u16, Path>,
    waiting: Queue<Vec<u8>>,
}

/// The path of a case.
struct Path {
    /// From the client, and from the server.
    links: [Link; 2],
    rng: fastrand::Rng,
    /// When the last packet of each link arrives; later ones do not overtake it.
    last_arrivals: [Instant; 2],
    packets: u64,
}

impl Relay {
    /// Makes the device in the network namespace of this process, and starts the threads.
    pub fn start() -> Arc<Self> {
        let device = open_device();
        for command in
            [["address", "add", ADDRESS, "dev", DEVICE].as_slice(), &["link", "set", DEVICE, "up"]]
        {
            assert!(Command::new("ip").args(command).status().unwrap().success(), "{command:?}");
        }
        let shared = Shared { paths: BTreeMap::new(), waiting: Queue::default() };
        let relay = Arc::new(Self { shared: Mutex::new(shared), changed: Condvar::new() });
        let (reading, writing) = (device.try_clone().unwrap(), device);
        let reader = Arc::clone(&relay);
        std::thread::spawn(move || reader.take_in(reading));
        let writer = Arc::clone(&relay);
        std::thread::spawn(move || writer.deliver(writing));
        relay
    }

    /// Adds the path to the server with this port.
    pub fn add_path(&self, port: u16, link: Link) {
        let last_arrivals = [Instant::now(); 2];
        let rng = fastrand::Rng::new();
        let path = Path { links: [link; 2], rng, last_arrivals, packets: 0 };
        self.lock().paths.insert(port, path);
    }

    /// Changes the link from one of the ends.
    pub fn change_link(&self, port: u16, from: Side, change: impl Fn(&mut Link)) {
        change(&mut self.lock().paths.get_mut(&port).unwrap().links[from as usize]);
    }

    /// The packets that both ends have sent.
    pub fn packets(&self, port: u16) -> u64 {
        self.lock().paths[&port].packets
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap()
    }

    fn take_in(&self, mut device: File) {
        crate::run_before_others();
        let mut buf = vec![0; 1 << 16];
        loop {
            let count = device.read(&mut buf).unwrap();
            if self.lock().send(&buf[..count]) {
                self.changed.notify_one();
            }
        }
    }

    fn deliver(&self, mut device: File) {
        crate::run_before_others();
        let mut shared = self.lock();
        loop {
            let now = Instant::now();
            while let Some((_, packet)) = shared.waiting.pop(now) {
                device.write_all(&packet).unwrap();
            }
            shared = match shared.waiting.next_at() {
                Some(at) => {
                    let pause = at.saturating_duration_since(Instant::now());
                    self.changed.wait_timeout(shared, pause).unwrap().0
                }
                None => self.changed.wait(shared).unwrap(),
            };
        }
    }
}

impl Shared {
    /// Sends a packet on the link that it belongs to. Returns whether it is not lost.
    fn send(&mut self, packet: &[u8]) -> bool {
        if packet[0] >> 4 != VERSION || packet[9] != TCP {
            return false;
        }
        let header = usize::from(packet[0] & 0xf) * 4;
        let port = |at| u16::from_be_bytes([packet[header + at], packet[header + at + 1]]);
        let (from, path) = match (port(0), port(2)) {
            (_, to) if self.paths.contains_key(&to) => (Side::Client, self.paths.get_mut(&to)),
            (from, _) => (Side::Server, self.paths.get_mut(&from)),
        };
        let Some(path) = path else { return false };
        path.packets += 1;
        let link = &mut path.links[from as usize];
        let arrival = link.arrival(packet.len() as u32, Instant::now(), &mut path.rng);
        let Some(at) = arrival else { return false };
        let last = &mut path.last_arrivals[from as usize];
        *last = at.max(*last);
        let exchanged = [&packet[..12], &packet[16..20], &packet[12..16], &packet[20..]].concat();
        self.waiting.push(*last, exchanged);
        true
    }
}

fn open_device() -> File {
    let device = File::options().read(true).write(true).open("/dev/net/tun").unwrap();
    let mut request = [0_u8; REQUEST];
    request[..DEVICE.len()].copy_from_slice(DEVICE.as_bytes());
    // The flags are in the order of the machine.
    let flags = u16::from_be_bytes([IFF_NO_PI, IFF_TUN]);
    request[FLAGS..FLAGS + 2].copy_from_slice(&flags.to_ne_bytes());
    // SAFETY: TUNSETIFF reads a `struct ifreq`, which `request` is.
    #[allow(unsafe_code)]
    unsafe { ioctl(&device, Setter::<TUNSETIFF, _>::new(request)) }.unwrap();
    device
}
