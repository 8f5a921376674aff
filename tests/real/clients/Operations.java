import java.io.BufferedReader;
import java.io.ByteArrayInputStream;
import java.io.ByteArrayOutputStream;
import java.io.InputStream;
import java.io.InputStreamReader;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublisher;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse;
import java.net.http.HttpResponse.BodyHandlers;
import java.net.http.WebSocket;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.security.KeyStore;
import java.security.cert.CertificateFactory;
import java.time.Duration;
import java.util.concurrent.Callable;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionStage;
import java.util.concurrent.TimeUnit;
import javax.net.ssl.SSLContext;
import javax.net.ssl.TrustManagerFactory;

/**
 * The operations of test_clients with the JDK's HttpClient, forced to HTTP/1.1: bodies of unknown length are chunked, and one
 * connection is kept for all requests. Prints the result of each as a line of JSON.
 */
public class Operations {
    static final String SERVER = System.getenv("CLIENT_SERVER"), NAMESPACE = System.getenv("CLIENT_NAMESPACE");
    static final String POD = System.getenv("CLIENT_POD"), TOKEN = System.getenv("CLIENT_TOKEN");
    static final String CONFIGMAPS = "/api/v1/namespaces/" + NAMESPACE + "/configmaps";
    static HttpClient client;

    static SSLContext trusting(Path ca) throws Exception {
        KeyStore store = KeyStore.getInstance(KeyStore.getDefaultType());
        store.load(null, null);
        try (InputStream in = java.nio.file.Files.newInputStream(ca)) {
            store.setCertificateEntry("ca", CertificateFactory.getInstance("X.509").generateCertificate(in));
        }
        TrustManagerFactory managers = TrustManagerFactory.getInstance(TrustManagerFactory.getDefaultAlgorithm());
        managers.init(store);
        SSLContext context = SSLContext.getInstance("TLS");
        context.init(null, managers.getTrustManagers(), null);
        return context;
    }

    static String quoted(String text) {
        StringBuilder out = new StringBuilder("\"");
        for (char c : text.toCharArray()) {
            out.append(c == '"' || c == '\\' || c < ' ' || c > '~' ? String.format("\\u%04x", (int) c) : String.valueOf(c));
        }
        return out.append('"').toString();
    }

    static HttpRequest.Builder to(String path) {
        return HttpRequest.newBuilder(URI.create(SERVER + path)).timeout(Duration.ofSeconds(60)).header("Authorization", "Bearer " + TOKEN);
    }

    /** A body of unknown length, which HTTP/1.1 sends in chunks. */
    static BodyPublisher chunked(String text) {
        return BodyPublishers.ofInputStream(() -> new ByteArrayInputStream(text.getBytes(StandardCharsets.UTF_8)));
    }

    static String manifest(String value) {
        String text = "ä\\n".repeat(2000);
        return "{\"apiVersion\":\"v1\",\"kind\":\"ConfigMap\",\"metadata\":{\"name\":\"client\",\"labels\":{\"set\":\"client\"}},"
            + "\"data\":{\"key\":\"" + value + "\",\"text\":\"" + text + "\"}}";
    }

    static String send(HttpRequest.Builder request) throws Exception {
        HttpResponse<String> response = client.send(request.build(), BodyHandlers.ofString());
        if (response.version() != HttpClient.Version.HTTP_1_1) {
            throw new IllegalStateException("not HTTP/1.1");
        }
        return "{\"status\":" + response.statusCode() + ",\"body\":" + quoted(response.body()) + "}";
    }

    static String change(String type, String path, String body) throws Exception {
        return send(to(path).header("Content-Type", type).method("PATCH", chunked(body)));
    }

    static String logs() throws Exception {
        HttpRequest request = to("/api/v1/namespaces/default/pods/" + POD + "/log?container=ticker&follow=true&tailLines=1").build();
        HttpResponse<InputStream> response = client.send(request, BodyHandlers.ofInputStream());
        StringBuilder lines = new StringBuilder();
        try (BufferedReader reader = new BufferedReader(new InputStreamReader(response.body(), StandardCharsets.UTF_8))) {
            for (int i = 0; i < 3; i++) {
                lines.append(i > 0 ? "," : "").append(quoted(reader.readLine()));
            }
        }
        return "{\"status\":" + response.statusCode() + ",\"lines\":[" + lines + "]}";
    }

    /** Collects the channels of exec: the first byte of each message is the channel's number. */
    static class Channels implements WebSocket.Listener {
        final ByteArrayOutputStream[] channels = {null, new ByteArrayOutputStream(), new ByteArrayOutputStream(), new ByteArrayOutputStream()};
        final CompletableFuture<Void> closed = new CompletableFuture<>();
        int channel = -1;

        @Override
        public CompletionStage<?> onBinary(WebSocket socket, ByteBuffer data, boolean last) {
            if (channel < 0 && data.hasRemaining()) {
                channel = data.get();
            }
            byte[] bytes = new byte[data.remaining()];
            data.get(bytes);
            if (channel > 0) {
                channels[channel].writeBytes(bytes);
            }
            channel = last ? -1 : channel;
            socket.request(1);
            return null;
        }

        @Override
        public CompletionStage<?> onClose(WebSocket socket, int code, String reason) {
            closed.complete(null);
            return null;
        }

        @Override
        public void onError(WebSocket socket, Throwable error) {
            closed.completeExceptionally(error);
        }
    }

    static String exec() throws Exception {
        String command = "command=sh&command=-c&command=echo%20out;%20echo%20err%20%3E%262;%20exit%207";
        String path = "/api/v1/namespaces/default/pods/" + POD + "/exec?container=web&stdout=true&stderr=true&" + command;
        Channels channels = new Channels();
        client.newWebSocketBuilder().subprotocols("v5.channel.k8s.io").header("Authorization", "Bearer " + TOKEN)
            .buildAsync(URI.create(SERVER.replace("https:", "wss:") + path), channels).get(20, TimeUnit.SECONDS);
        channels.closed.get(20, TimeUnit.SECONDS);
        return "{\"stdout\":" + quoted(channels.channels[1].toString()) + ",\"stderr\":" + quoted(channels.channels[2].toString())
            + ",\"status\":" + quoted(channels.channels[3].toString()) + "}";
    }

    static void run(String name, Callable<String> operation) {
        String result;
        try {
            result = operation.call();
        } catch (Exception error) {
            result = "{\"error\":" + quoted(error.toString()) + "}";
        }
        System.out.println("{\"op\":" + quoted(name) + ",\"result\":" + result + "}");
    }

    public static void main(String[] arguments) throws Exception {
        client = HttpClient.newBuilder().version(HttpClient.Version.HTTP_1_1).sslContext(trusting(Path.of(System.getenv("CLIENT_CA")))).build();
        String listed = client.send(to(CONFIGMAPS + "?limit=1").build(), BodyHandlers.ofString()).body();
        String version = listed.replaceAll("(?s)^.*?\"resourceVersion\":\"(\\d+)\".*$", "$1");
        String set = "labelSelector=set%3Dclient", one = CONFIGMAPS + "/client";
        run("create", () -> send(to(CONFIGMAPS).header("Content-Type", "application/json").POST(chunked(manifest("one")))));
        run("list", () -> send(to(CONFIGMAPS + "?" + set)));
        run("patch", () -> change("application/merge-patch+json", one, "{\"data\":{\"key\":\"two\"}}"));
        run("apply", () -> change("application/apply-patch+yaml", one + "?fieldManager=client&force=true", manifest("three")));
        run("delete", () -> send(to(one).DELETE()));
        run("watch", () -> send(to(CONFIGMAPS + "?watch=true&timeoutSeconds=2&resourceVersion=" + version + "&" + set)));
        run("logs -f", Operations::logs);
        run("exec", Operations::exec);
        int idle = Integer.parseInt(System.getenv("CLIENT_IDLE"));
        if (idle > 0) { // the connections stay idle for so long
            Thread.sleep(idle * 1000L);
            run("after a minute", () -> send(to(CONFIGMAPS + "?" + set)));
        }
        System.exit(0);
    }
}
