//! What apiservers are spared: load that would come back at once, and questions that each cost them a
//! connection.

use crate::peer::{Act, Peers};
use crate::support::{Certs, MAPS, World, pass, patient, terminate, until};
use jackstay::demo::faulty_relay::FaultyRelay;
use jackstay::upstream::balance::slow_start;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// Long enough for a second question of whoever may ask each second.
const WINDOW: Duration = Duration::from_millis(2_500);

/// Its caches are cold: at first it takes part in one pick of ten, and in all of them after 30 s.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn what_has_recovered_is_asked_little_at_first() {
    const REQUESTS: u16 = 400;
    let world = World::new(2);
    let proxy = world.start_with(|config| *config = patient(config.clone())).await;
    let client = proxy.client(&world.certs.credentials()).await;
    let (server, address) = (world.servers[0].name(), world.servers[0].addr.to_string());
    world.servers[0].kill();
    until("it is out", async || {
        let endpoints = proxy.endpoints().await;
        endpoints.iter().any(|e| e["address"] == *address && e["state"] == "ejected")
    })
    .await;
    world.servers[0].restart().unwrap();
    let mut back = Instant::now();
    until("it is back", async || {
        let now = Instant::now();
        let ready = proxy.endpoints().await.iter().all(|endpoint| endpoint["state"] == "ready");
        if !ready {
            back = now;
        }
        ready
    })
    .await;
    proxy.ready(2).await;
    world.cluster.audit().clear();
    for _ in 0..REQUESTS {
        assert_eq!(client.get(MAPS).await.unwrap().status, 200);
    }
    let share = slow_start(back.elapsed());
    let asked = world.cluster.audit().select(|r| r.server == server && r.path == MAPS).len();
    println!(
        "{asked} of {REQUESTS} requests went to the one that is back, its share is {share:.2}"
    );
    // Five standard deviations above its share, where the other one is always the slower of the two.
    let most = f64::from(REQUESTS) * share + 2.5 * f64::from(REQUESTS).sqrt();
    assert!((asked as f64) < most, "{asked} of {REQUESTS}, {share:.2} of them at most");
}

/// An anonymous question makes an apiserver end the connection that it came on. A prober without a
/// credential asks every 30 s, whatever becomes of its connections meanwhile, and whether or not
/// they outlive the question.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn anonymous_questions_are_rare_however_connections_end() {
    tokio::join!(ask_rarely(None), ask_rarely(Some(Act::Cut)));
}

/// `first` is what comes of the first question: an answer, if nothing.
async fn ask_rarely(first: Option<Act>) {
    let certs = Certs::new();
    let peers = Peers::start(&certs, 1);
    let hole = FaultyRelay::start(peers.addresses[0]).unwrap();
    let mut config = patient(certs.config(&[hole.addr]));
    config.upstreams[0].health.readyz.cert = None;
    terminate(&mut config).identities.clear();
    let answered = first.is_none();
    peers.script.play(first);
    let begun = Instant::now();
    let proxy = certs.start(config);
    until("it has asked", async || !peers.script.seen().is_empty()).await;
    if answered {
        until("the answer is known", async || {
            proxy.endpoints().await.iter().all(|endpoint| endpoint["state"] != "connecting")
        })
        .await;
    }
    let mut connected = peers.script.accepted.load(Relaxed);
    // Whoever has a credential asks again after a second at most.
    while begun.elapsed() < WINDOW || connected < 2 {
        hole.reset_all();
        until("it has connected again", async || {
            let accepted = peers.script.accepted.load(Relaxed);
            accepted > connected || (begun.elapsed() >= WINDOW && connected > 1)
        })
        .await;
        connected = peers.script.accepted.load(Relaxed);
        pass(Duration::from_millis(100)).await;
    }
    let asked = peers.script.seen().len();
    println!("{asked} questions in {:?}, {connected} connections", begun.elapsed());
    let most = 1 + begun.elapsed().as_secs() / 24;
    assert!(asked as u64 <= most);
}
