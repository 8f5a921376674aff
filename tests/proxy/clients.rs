//! Runs curl and Python's requests, two common clients that are not written in Go, against the demo apiserver
//! through jackstay. `tests/clients/setup` installs both.

use crate::support::{CONFIGMAPS, TestCluster, config_map};
use std::process::Command;

/// Sends a body of undeclared length. The requests library sends a generator in chunks.
const PYTHON: &str = r#"
import os, requests
e = os.environ
def pieces():
    body = open(e["object"], "rb").read().replace(b"NAME", e["name"].encode())
    for at in range(0, len(body), 7):
        yield body[at:at + 7]
send = getattr(requests, e["method"])
response = send(e["url"] + e["path"], data=pieces(), cert=(e["cert"], e["key"]), verify=e["ca"],
                headers={"Content-Type": "application/json"}, timeout=30)
assert response.request.headers["Transfer-Encoding"] == "chunked"
print(response.status_code, end="")
"#;

/// The command of every request. Without a 100 (Continue) curl would wait for 60 s and exceed `--max-time`.
const CURL: &str = r#"sed "s/NAME/$name/" $object | curl --silent --show-error --max-time 50 \
    --expect100-timeout 60 --cacert $ca --cert $cert --key $key --output /dev/null \
    --write-out '%{http_code}' -H 'Content-Type: application/json'"#;

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
#[ignore = "needs curl and Python's requests (tests/clients/setup)"]
async fn chunked_and_expecting_bodies_of_curl_and_requests_arrive() {
    let cluster = TestCluster::new(2);
    let proxy = cluster.start().await;
    let dir = tempfile::tempdir().unwrap();
    let ca = cluster.certs.pki.write_ca(dir.path()).unwrap();
    let (cert, key) = cluster.certs.admin.write_to(dir.path(), "client").unwrap();
    let object = dir.path().join("object.json");
    std::fs::write(&object, config_map("NAME", "1").to_string()).unwrap();
    let python = std::env::var("JACKSTAY_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    // Prints the status of the response, and then the exit status of the client.
    let run = |script: &str, name: &str, method: &str, path: &str| -> String {
        let result = Command::new("sh")
            .args(["-c", &format!("({script}) 2>&1; echo \" exit=$?\"")])
            .env("url", format!("https://{}", proxy.addr))
            .envs([("ca", &ca), ("cert", &cert), ("key", &key), ("object", &object)])
            .envs([("python", python.as_str()), ("script", PYTHON)])
            .envs([("name", name), ("method", method), ("path", path)])
            .output()
            .unwrap();
        String::from_utf8(result.stdout).unwrap()
    };
    let chunked = format!("{CURL} -H 'Transfer-Encoding: chunked' --data-binary @- -X $method");
    let http1 = format!("{chunked} --http1.1 $url$path");
    let http2 = format!("{CURL} -T - -X $method --http2 $url$path");
    let expecting =
        format!("{CURL} -H 'Expect: 100-continue' --data-binary @- --http1.1 $url$path");
    let python = "$python -c \"$script\"";
    let item = |name: &str| format!("{CONFIGMAPS}/{name}");
    let mut failures = Vec::new();
    for (script, name, method, path, code) in [
        (http1.as_str(), "a", "POST", CONFIGMAPS.to_owned(), "201"),
        (&http1, "a", "PUT", item("a"), "200"),
        (&http1, "a", "GET", item("a"), "200"),
        (&http2, "b", "POST", CONFIGMAPS.to_owned(), "201"),
        (&expecting, "c", "POST", CONFIGMAPS.to_owned(), "201"),
        (python, "d", "post", CONFIGMAPS.to_owned(), "201"),
        (python, "d", "put", item("d"), "200"),
        (python, "d", "get", item("d"), "200"),
    ] {
        let output = run(script, name, method, &path);
        println!("{name} {method} {path}: {output}");
        if output.trim() != format!("{code} exit=0") {
            failures.push(format!("{script}: {method} {path}: {output}"));
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}
