//! Keepalive probes of connections that are idle while packets are dropped.

use jackstay_sys::clock;
use jackstay_sys::sockets::stream::TcpStream;

use super::{BOTH, exchange, ms, pause, pause_until, read_once, since};
use crate::figures::{FIELDS, Figures, Tolerance};
use crate::rig::Rig;

/// When `TCP_INFO` is read, between two probes.
const MOMENTS: [u64; 4] = [500, 1_600, 3_600, 8_600];

/// Of an upstream connection of jackstay.
pub async fn of_client(rig: &Rig, figures: &mut Figures) {
    let (mut client, mut server) = rig.pair().await;
    exchange(&mut client, &mut server, 10).await;
    pause(ms(3_300)).await;
    let info = client.tcp_info().unwrap();
    figures.infos(&[info], &FIELDS);
    rig.drop_packets(BOTH);
    fails(client, figures).await;
}

/// Of a connection that jackstay has accepted.
pub async fn of_server(rig: &Rig, figures: &mut Figures) {
    let (mut client, mut server) = rig.pair().await;
    exchange(&mut client, &mut server, 10).await;
    // The kernel delays the last acknowledgement by 40 ms.
    pause(ms(200)).await;
    rig.drop_packets(BOTH);
    fails(server, figures).await;
}

async fn fails(mut stream: TcpStream, figures: &mut Figures) {
    let start = clock::now();
    let mut probes = Vec::new();
    for at in MOMENTS {
        pause_until(start + ms(at)).await;
        probes.push(f64::from(stream.tcp_info().unwrap().probes));
    }
    figures.numbers("probes while packets are dropped", probes, Tolerance::NONE);
    let result = read_once(&mut stream).await;
    figures.time("failed after", since(start), Tolerance::TIMER);
    figures.result("result", &result);
}
