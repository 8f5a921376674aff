// The operations of test_clients with @kubernetes/client-node (node-fetch, since 2.0 undici; WebSocket for streams). Prints
// the result of each as a line of JSON.
import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { PassThrough, Writable } from "node:stream";

const k8s = createRequire(process.env.CLIENT_MODULES + "/")(process.env.CLIENT_PACKAGE);
const { CLIENT_KUBECONFIG: file, CLIENT_NAMESPACE: namespace, CLIENT_POD: pod, CLIENT_WORD: word } = process.env;
const config = new k8s.KubeConfig();
config.loadFromFile(file);
const core = config.makeApiClient(k8s.CoreV1Api);

const manifest = (value) => ({
  apiVersion: "v1",
  kind: "ConfigMap",
  metadata: { name: "client", labels: { set: "client" } },
  data: { key: value, text: "ä\n".repeat(2000) },
});
const named = { name: "client", namespace };

// A stream that collects text and tells when it contains enough.
class Collected extends Writable {
  text = "";
  constructor(enough) {
    super();
    this.done = new Promise((resolve) => (this.resolve = resolve));
    this.enough = enough;
    this.on("finish", () => this.resolve(this.text));
  }
  _write(chunk, _encoding, callback) {
    this.text += chunk;
    if (this.enough && this.enough(this.text)) this.resolve(this.text);
    callback();
  }
}

async function watch(version) {
  const events = [];
  const query = { labelSelector: "set=client", resourceVersion: version, timeoutSeconds: 2 };
  await new Promise((resolve, reject) =>
    new k8s.Watch(config)
      .watch(`/api/v1/namespaces/${namespace}/configmaps`, query, (type, object) => events.push({ type, object }), (error) => (error ? reject(error) : resolve()))
      .catch(reject),
  );
  return { events };
}

// The log is followed until this process exits: 2.0.1 does not catch the exception of its own abort.
async function logs() {
  const out = new Collected((text) => text.split("\n").length > 3);
  await new k8s.Log(config).log("default", pod, "ticker", out, { follow: true, tailLines: 1 });
  const text = await out.done;
  return { lines: text.split("\n").slice(0, 3) };
}

async function exec() {
  const [stdout, stderr] = [new Collected(), new Collected()];
  const status = await new Promise((resolve, reject) =>
    new k8s.Exec(config)
      .exec("default", pod, "web", ["sh", "-c", "echo out; echo err >&2; exit 7"], stdout, stderr, null, false, resolve)
      .catch(reject),
  );
  return { stdout: stdout.text, stderr: stderr.text, status };
}

async function attach() {
  const [stdout, stdin] = [new Collected((text) => text.includes(`got ${word}\n`)), new PassThrough()];
  const socket = await new k8s.Attach(config).attach("default", pod, "echo", stdout, null, stdin, false);
  stdin.write(`${word}\n`);
  const text = await stdout.done;
  socket.close();
  return { line: text.split("\n").filter((line) => line.includes(word)) };
}

async function forward() {
  const [out, input] = [new Collected((text) => text.includes("a page from the pod\n")), new PassThrough()];
  const socket = await new k8s.PortForward(config).portForward("default", pod, [8099], out, null, input);
  input.write("GET / HTTP/1.0\r\n\r\n");
  const text = await out.done;
  (typeof socket === "function" ? socket() : socket).close();
  return { page: text.split("\r\n\r\n")[1] };
}

// The promises of Cp end before its command does.
class CopyExec extends k8s.Exec {
  async exec(namespace, pod, container, command, stdout, stderr, stdin, tty, ended) {
    this.received = stdout ? new Promise((resolve, reject) => stdout.on("finish", resolve).on("error", reject)) : undefined;
    this.status = new Promise((resolve, reject) =>
      super.exec(namespace, pod, container, command, stdout, stderr, stdin, tty, (status) => ended(status).then(() => resolve(status), reject)).catch(reject),
    );
  }
}

// Copies a file into the pod and back. Its name contains the word of this run.
async function copy() {
  const [text, exec] = ["a line\n".repeat(20000), new CopyExec(config)];
  mkdirSync("up");
  writeFileSync(`up/${word}`, text);
  const cp = new k8s.Cp(config, exec);
  await cp.cpToPod("default", pod, "web", "up", "/tmp");
  const there = await exec.status;
  await cp.cpFromPod("default", pod, "web", word, "down", "/tmp");
  await exec.received;
  if (readFileSync(`down/${word}`, "utf8") !== text) throw new Error("the copy differs");
  return { there, here: await exec.status };
}

const version = (await core.listNamespacedConfigMap({ namespace })).metadata.resourceVersion;
const operations = {
  create: () => core.createNamespacedConfigMap({ namespace, body: manifest("one") }),
  list: () => core.listNamespacedConfigMap({ namespace, labelSelector: "set=client" }),
  patch: () =>
    core.patchNamespacedConfigMap({ ...named, body: { data: { key: "two" } } }, k8s.setHeaderOptions("Content-Type", k8s.PatchStrategy.MergePatch)),
  apply: () =>
    core.patchNamespacedConfigMap(
      { ...named, body: manifest("three"), fieldManager: "client", force: true },
      k8s.setHeaderOptions("Content-Type", k8s.PatchStrategy.ServerSideApply),
    ),
  delete: () => core.deleteNamespacedConfigMap(named),
  watch: () => watch(version),
  "logs -f": logs,
  exec,
  attach,
  "port-forward": forward,
  // Until 2.0 it reads a compressed archive as an uncompressed one, and fails with every server.
  ...(process.env.CLIENT_CP ? { cp: copy } : {}),
};
for (const [op, run] of Object.entries(operations)) {
  const late = new Promise((_, reject) => setTimeout(() => reject(new Error("no result in 30 s")), 30000).unref());
  const result = await Promise.race([run(), late]).catch((error) => ({ error: String(error.stack ?? error.message ?? error) }));
  console.log(JSON.stringify({ op, result }));
}
process.exit(0);
