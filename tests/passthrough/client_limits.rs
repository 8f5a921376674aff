//! What clients can do to a passthrough listener that is not meant well: each takes only what is
//! its own, and for a while.

use crate::peer::Peer;
use crate::prober::Probed;
use crate::support::{Certs, passthrough_config, passthrough_mode, pause, soon, until};
use jackstay::config::Route;
use std::io::{BufRead, BufReader, ErrorKind};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// There and back again.
async fn echo((client, server): &mut (TcpStream, TcpStream)) {
    client.write_all(b"x").await.unwrap();
    assert_eq!(soon("a byte up", server.read_u8()).await.unwrap(), b'x');
    server.write_all(b"y").await.unwrap();
    assert_eq!(soon("a byte down", client.read_u8()).await.unwrap(), b'y');
}

/// They hold what sockets hold and no more, and the others go on. What they did not read is there
/// when they read at last.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_that_do_not_read_stop_their_own_writer_alone() {
    let (certs, peer) = (Certs::new(), Peer::start().await);
    let proxy = certs.start(passthrough_config(certs.config(&[peer.address])));
    let mut other = peer.join(&proxy).await;
    let mut slow = Vec::new();
    for _ in 0..4 {
        let (client, mut server) = peer.join(&proxy).await;
        let writer = tokio::spawn(async move {
            let (much, mut written) = (vec![7; 64 << 10], 0_usize);
            // A writer that gets nowhere for a second is stopped.
            while let Ok(done) = timeout(Duration::from_secs(1), server.write_all(&much)).await {
                done.unwrap();
                written += much.len();
                assert!(written < 256 << 20, "nobody stops it");
            }
            (server, written)
        });
        slow.push((client, writer));
    }
    while slow.iter().any(|(_, writer)| !writer.is_finished()) {
        echo(&mut other).await;
        pause(Duration::from_millis(20)).await;
    }
    for (mut client, writer) in slow {
        let (server, written) = writer.await.unwrap();
        drop(server);
        let mut rest = Vec::new();
        soon("the rest", client.read_to_end(&mut rest)).await.unwrap();
        // The last write was cut short by the test's own timeout.
        assert!(rest.len() >= written && rest.iter().all(|byte| *byte == 7), "{written}");
    }
    echo(&mut other).await;
}

/// A `ClientHello` that never ends costs a connection for `handshake_timeout`, garbage nothing; both
/// within the cap, and who is there already does not notice.
#[tokio::test]
async fn a_flood_of_halves_and_garbage_is_bounded_and_ends() {
    let (certs, peer) = (Certs::new(), Peer::start().await);
    let mut config = passthrough_config(certs.config(&[peer.address]));
    let upstream = config.upstreams[0].name.clone();
    passthrough_mode(&mut config).routes =
        vec![Route { server_names: vec!["elsewhere.example".into()], upstream }];
    config.listeners[0].limits.max_connections = 40;
    config.listeners[0].limits.handshake_timeout = Duration::from_secs(2);
    let proxy = certs.start(config);
    let mut other = peer.join(&proxy).await;
    echo(&mut other).await;
    let begun = Instant::now();
    let mut flood = Vec::new();
    for index in 0..200 {
        let Ok(mut stream) = TcpStream::connect(proxy.addr).await else { continue };
        // A record that promises 256 bytes and brings three, byte after byte or at once; or noise.
        let bytes: &[u8] =
            if index % 4 == 3 { b"\x00\xff\x13\x37" } else { &[22, 3, 1, 1, 0, 1, 0, 0] };
        let _ = stream.write_all(bytes).await;
        flood.push(stream);
    }
    echo(&mut other).await;
    for mut stream in flood {
        let mut rest = Vec::new();
        // A reset, or the word of the server for what it did not understand.
        let end = soon("an end", stream.read_to_end(&mut rest)).await;
        assert!(end.is_ok() || end.is_err_and(|e| e.kind() == ErrorKind::ConnectionReset));
    }
    echo(&mut other).await;
    println!("a flood of 200 was over after {:?}", begun.elapsed());
    until("only the other is open", async || proxy.status().await["listeners"][0]["flows"] == 1)
        .await;
    let metrics = proxy.page("/metrics").await;
    assert!(metrics.contains(r#"reason="handshake_timeout"}"#), "{metrics}");
    assert!(metrics.contains(r#"refused_total{listener="apiserver",reason="cap"}"#), "{metrics}");
}

/// The binary as a process with few descriptors, and what it has said so far.
struct Poor {
    child: Child,
    said: Arc<Mutex<String>>,
}

impl Poor {
    /// With that many, of which a half are given at first.
    fn start(endpoint: SocketAddr, descriptors: u32) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("jackstay.yaml");
        let config = format!(
            "state_dir: ''\nadmin: {{bind: '127.0.0.1:0'}}\nupstreams: [{{name: u, endpoints: \
             ['{endpoint}']}}]\nlisteners: [{{name: l, mode: passthrough, bind: ['127.0.0.1:0'], \
             upstream: u}}]\n"
        );
        std::fs::write(&file, config).unwrap();
        let limits = format!("ulimit -S -n {}; ulimit -H -n {descriptors}", descriptors / 2);
        let mut child = Command::new("sh")
            .args(["-c", &format!("{limits}; exec \"$0\" run --config \"$1\"")])
            .arg(env!("CARGO_BIN_EXE_jackstay"))
            .arg(&file)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        let said = Arc::<Mutex<String>>::default();
        let into = Arc::clone(&said);
        std::thread::spawn(move || {
            // The file is there for as long as it runs.
            let _dir = dir;
            for line in stderr.lines().map_while(Result::ok) {
                let mut said = into.lock().unwrap();
                said.push_str(&line);
                said.push('\n');
            }
        });
        Self { child, said }
    }

    fn said(&self) -> String {
        self.said.lock().unwrap().clone()
    }

    /// The address in the line with those words, once it is there.
    async fn address(&self, words: &str) -> SocketAddr {
        until(words, async || self.said().lines().any(|line| line.contains(words))).await;
        let said = self.said();
        let line = said.lines().find(|line| line.contains(words)).unwrap();
        let address = line.split(['=', ' ', '[', ']']).find(|part| part.starts_with("127.0.0.1:"));
        address.unwrap_or_else(|| panic!("{line}")).parse().unwrap()
    }
}

impl Drop for Poor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// All descriptors that the process may have are used, not only those that it was given; whoever
/// comes then is told so at once, and the others go on.
#[tokio::test]
async fn who_comes_when_descriptors_are_used_up_is_reset_and_the_others_go_on() {
    let mut server = Probed::start(&Certs::new(), &["h2"]).await;
    let proxy = Poor::start(server.address, 110);
    let admin = proxy.address("the admin endpoint listens").await;
    let listener = proxy.address("listening").await;
    let page = async |path: &str| {
        let mut stream = TcpStream::connect(admin).await.unwrap();
        stream.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes()).await.unwrap();
        let mut answer = String::new();
        soon("an answer", stream.read_to_string(&mut answer)).await.unwrap();
        answer
    };
    until("it is ready", async || page("/readyz").await.contains("check passed")).await;
    assert!(proxy.said().contains("too few open files are allowed"), "{}", proxy.said());
    let mut flows = Vec::new();
    let refused = loop {
        match soon("a flow, or its end", server.try_flow(listener)).await {
            Ok(flow) => flows.push(flow),
            Err(error) => break error,
        }
    };
    assert_eq!(refused.kind(), ErrorKind::ConnectionReset);
    assert!(flows.len() > 25, "{} flows", flows.len());
    // If one was left, the client was taken in, and the connection to the endpoint was not made.
    let mut held = Vec::new();
    until("not even the client can be taken in", async || {
        held.push(TcpStream::connect(admin).await.unwrap());
        match soon("a flow, or its end", server.try_flow(listener)).await {
            Ok(flow) => flows.push(flow),
            Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
        }
        proxy.said().contains("listener l: refused, it cannot be accepted")
    })
    .await;
    for flow in &mut flows {
        echo(flow).await;
    }
    // Whoever wants to know what is the matter is answered: a few are kept back for that.
    for _ in 0..10 {
        let metrics = page("/metrics").await;
        assert!(metrics.contains(r#"refused_total{listener="l",reason="descriptors"}"#));
    }
    assert!(page("/readyz").await.contains("check passed"));
    drop(held);
    flows.truncate(20);
    until("there is room again", async || {
        flows.extend(soon("a flow, or its end", server.try_flow(listener)).await);
        flows.len() > 20
    })
    .await;
    let metrics = page("/metrics").await;
    assert!(metrics.contains(r#"refused_total{listener="l",reason="descriptors"}"#), "{metrics}");
    // The endpoint had no part in it.
    assert!(!metrics.contains("jackstay_ejections_total{"), "{metrics}");
    assert!(page("/readyz").await.contains("check passed"));
}
