//! Reads over a long line: a [`relay`](crate::relay) delays every byte between proxy and origin, or between client and
//! origin without a proxy. Each time is compared with that of a client like Go's, with windows of 4 MiB, on the same
//! line.

use std::{process::Command, sync::Arc, time::Duration};

use rustls::ClientConfig;
use tokio::time::Instant;

use crate::{
    Result,
    client::Client,
    origin,
    process::Process,
    proxies::{Environment, Layer, Target},
    started_address,
};

/// Round trips of the lines: the same site, another one, another continent.
const ROUND_TRIPS: [Duration; 3] =
    [Duration::from_millis(2), Duration::from_millis(20), Duration::from_millis(80)];

/// Largest ratio of a LIST through jackstay to the direct one, at [`CHECKED`] and above.
const LIMIT: f64 = 1.2;
const CHECKED: Duration = Duration::from_millis(20);

/// No more connections for a figure after this time.
const ENOUGH: Duration = Duration::from_secs(3);

/// The median times of one client through one proxy.
struct Times {
    /// The first LIST on a connection, and the one after it.
    lists: [f64; 2],
    /// A response of 64 KiB.
    object: f64,
}

/// Measures and prints all lines, with `runs` new connections for each figure. Returns whether jackstay is within its limit.
pub async fn run(environment: &Environment<'_>, targets: &[Target], runs: usize) -> Result<bool> {
    let clients = [
        ("certificate", Arc::clone(environment.tls), None),
        ("token", environment.pki.client_config_without_certificate()?, Some("t0ken")),
    ];
    let mut worst = f64::NAN;
    println!("{:<44}{:>14}{:>14}{:>14}", "seconds, × direct", "LIST", "next LIST", "64 KiB");
    for round_trip in ROUND_TRIPS {
        let (relay, _relay) = start(environment, round_trip / 2).await?;
        let line = Environment { origin: relay, ..*environment };
        for (credential, tls, token) in &clients {
            let direct = measure(relay, (tls, *token), runs).await?;
            print(round_trip, "direct", credential, &direct, &direct);
            for layer in [Layer::L7, Layer::L4] {
                for &target in targets {
                    // HTTP/2 through a proxy at L4 is the client's own, so one shows what all do.
                    let measured = matches!(target, Target::Jackstay | Target::Haproxy)
                        || layer == Layer::L7 && target != Target::Nginx;
                    if !measured {
                        continue;
                    }
                    let times = async {
                        let proxy = line.start(target, layer).await?;
                        measure(proxy.address, (tls, *token), runs).await
                    };
                    let Some(times) = target.skip_failed_peer(times.await)? else { continue };
                    print(
                        round_trip,
                        &format!("{} {layer:?}", target.name()),
                        credential,
                        &times,
                        &direct,
                    );
                    if target == Target::Jackstay && layer == Layer::L7 && round_trip >= CHECKED {
                        let ratio = |n: usize| times.lists[n] / direct.lists[n];
                        worst = worst.max(ratio(0)).max(ratio(1));
                    }
                }
            }
        }
    }
    println!("slowest LIST through jackstay at L7 from {CHECKED:?}: ×{worst:.2}, limit ×{LIMIT}");
    // Not met, if jackstay was not measured.
    Ok(worst <= LIMIT)
}

fn print(round_trip: Duration, target: &str, credential: &str, times: &Times, direct: &Times) {
    let cell = |time: f64, direct: f64| format!("{time:.3} ×{:.2}", time / direct);
    println!(
        "{:<44}{:>14}{:>14}{:>14}",
        format!("{} ms, {target}, {credential}", round_trip.as_millis()),
        cell(times.lists[0], direct.lists[0]),
        cell(times.lists[1], direct.lists[1]),
        cell(times.object, direct.object),
    );
}

/// The medians over `runs` connections, each of which is warm when the measurement begins.
async fn measure(
    address: std::net::SocketAddr,
    (tls, token): (&Arc<ClientConfig>, Option<&'static str>),
    runs: usize,
) -> Result<Times> {
    let mut all = [const { Vec::new() }; 3];
    let begin = Instant::now();
    for _ in 0..runs {
        if begin.elapsed() > ENOUGH {
            break;
        }
        let mut client = Client::connect(address, tls).await?.with_token(token);
        client.get(origin::OBJECT).await?;
        let paths = [origin::LIST, origin::LIST, origin::LONG_OBJECT];
        for (path, times) in paths.into_iter().zip(&mut all) {
            let start = Instant::now();
            client.get(path).await?;
            times.push(start.elapsed().as_secs_f64());
        }
    }
    let [first, next, object] = all.map(|mut times| {
        times.sort_unstable_by(f64::total_cmp);
        times[times.len() / 2]
    });
    Ok(Times { lists: [first, next], object })
}

/// Starts this program as the relay.
async fn start(
    environment: &Environment<'_>,
    delay: Duration,
) -> Result<(std::net::SocketAddr, Process)> {
    let mut command = Command::new(std::env::current_exe()?);
    let delay_micros = delay.as_micros().to_string();
    command.args(["relay", &environment.origin.to_string(), &delay_micros]);
    started_address(command, &environment.dir.join("relay.log")).await
}
