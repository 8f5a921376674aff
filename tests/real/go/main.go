// Load is a load generator on Go's net/http, the HTTP/2 stack of kubelet and client-go, with the same keepalive (PING
// after 30 s of silence, connection closed 15 s later). It reads, writes and watches through one connection and
// accounts for everything exactly: every failure, the slowest requests, broken watches, lost, duplicated and unordered
// events, and the longest silence.
//
// With -direct, some writers bypass the server under test, so that events exist during every fault, and reference
// watches record which events exist.
//
// It prints "ready" when every watch is open. After -duration or on SIGTERM it writes a JSON report to -report and
// exits.
package main

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/net/http2"
)

var (
	server     = flag.String("server", "", "URL of the server under test")
	direct     = flag.String("direct", "", "URL of an apiserver for the writers that bypass it and the reference watches")
	caFile     = flag.String("ca", "", "CA bundle")
	certFile   = flag.String("cert", "", "client certificate")
	keyFile    = flag.String("key", "", "its key")
	tokenFile  = flag.String("token-file", "", "bearer token; read again for each request")
	namespace  = flag.String("namespace", "load", "namespace to work in; it must exist")
	duration   = flag.Duration("duration", 30*time.Second, "duration of the load")
	interval   = flag.Duration("interval", 100*time.Millisecond, "interval between the starts of two requests of a reader or writer")
	readers    = flag.Int("readers", 4, "readers")
	writers    = flag.Int("writers", 2, "writers through the server under test")
	directs    = flag.Int("direct-writers", 1, "writers that bypass it, with -direct")
	watches    = flag.Int("watches", 20, "number of watches; every second one is quiet")
	quietEvery = flag.Duration("quiet-every", 5*time.Second, "interval between changes of each quiet watch's object")
	formats    = flag.String("formats", "json,table,protobuf", "formats of the watches, used in turn")
	timeout    = flag.Duration("watch-timeout", 10*time.Minute, "timeoutSeconds of the watches")
	readIdle   = flag.Duration("read-idle", 30*time.Second, "send a PING after this silence")
	pingWait   = flag.Duration("ping-timeout", 15*time.Second, "close the connection when a PING is unanswered for this long")
	agent      = flag.String("user-agent", "jackstay-load", "User-Agent")
	settle     = flag.Duration("settle", 15*time.Second, "maximum time to wait for the last events")
	reportFile = flag.String("report", "", "path of the report; default: standard output")
	flowSpec   = flag.String("flows", "", "single connections instead, by kind: read=4,idle-watch=10 (see flows.go)")
)

// client is one HTTP/2 connection pool to one server.
type client struct {
	base  string
	token string
	http  *http.Client
}

func newClient(base string) (*client, error) {
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if *caFile != "" {
		pem, err := os.ReadFile(*caFile)
		if err != nil {
			return nil, err
		}
		config.RootCAs = x509.NewCertPool()
		config.RootCAs.AppendCertsFromPEM(pem)
	}
	if *certFile != "" {
		pair, err := tls.LoadX509KeyPair(*certFile, *keyFile)
		if err != nil {
			return nil, err
		}
		config.Certificates = []tls.Certificate{pair}
	}
	transport := &http.Transport{TLSClientConfig: config, TLSHandshakeTimeout: 10 * time.Second}
	h2, err := http2.ConfigureTransports(transport)
	if err != nil {
		return nil, err
	}
	h2.ReadIdleTimeout = *readIdle
	h2.PingTimeout = *pingWait
	c := &client{base: base, http: &http.Client{Transport: transport}}
	return c, nil
}

// result is a complete response, or the error.
type result struct {
	code       int
	body       []byte
	auditID    string
	retryAfter string
	proto      string
	err        error
	start, end time.Time
	paused     time.Duration // time during which this process did not run
}

// took is the server's response time: without pauses of this process.
func (a result) took() time.Duration { return a.end.Sub(a.start) - a.paused }

func uuid() string {
	var b [16]byte
	rand.Read(b[:])
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

func (c *client) request(ctx context.Context, method, path, accept, body, auditID string) (*http.Request, error) {
	var reader io.Reader
	if body != "" {
		reader = strings.NewReader(body)
	}
	request, err := http.NewRequestWithContext(ctx, method, c.base+path, reader)
	if err != nil {
		return nil, err
	}
	request.Header.Set("User-Agent", *agent)
	request.Header.Set("Accept", accept)
	request.Header.Set("Audit-ID", auditID)
	if body != "" {
		request.Header.Set("Content-Type", "application/json")
	}
	token := c.token
	if token == "" && *tokenFile != "" {
		text, err := os.ReadFile(*tokenFile)
		if err != nil {
			return nil, err
		}
		token = strings.TrimSpace(string(text))
	}
	if token != "" {
		request.Header.Set("Authorization", "Bearer "+token)
	}
	return request, nil
}

func (c *client) do(ctx context.Context, method, path, body string) result {
	before := pauses.total()
	a := result{auditID: uuid(), start: time.Now()}
	request, err := c.request(ctx, method, path, "application/json", body, a.auditID)
	if err == nil {
		var response *http.Response
		if response, err = c.http.Do(request); err == nil {
			a.code, a.proto, a.retryAfter = response.StatusCode, response.Proto, response.Header.Get("Retry-After")
			a.body, err = io.ReadAll(response.Body)
			response.Body.Close()
			if err == nil && a.code < 300 && !json.Valid(a.body) {
				err = fmt.Errorf("the response is not JSON: %d bytes", len(a.body))
			}
		}
	}
	a.end, a.err = time.Now(), err
	a.paused = pauses.total() - before
	return a
}

func (a result) ok() bool { return a.err == nil && a.code >= 200 && a.code < 300 }

type meta struct {
	Name            string            `json:"name"`
	ResourceVersion string            `json:"resourceVersion"`
	Annotations     map[string]string `json:"annotations"`
}

func main() {
	flag.Parse()
	for _, other := range []struct {
		chosen bool
		run    func() error
	}{{*flowSpec != "", func() error { return runFlows(*flowSpec) }}, {*historyFile != "", runHistory}, {*cachedReads != "", runCachedReads},
		{*aggregatedAt != "", runAggregated}} {
		if other.chosen {
			if err := other.run(); err != nil {
				fmt.Fprintln(os.Stderr, "load:", err)
				os.Exit(1)
			}
			return
		}
	}
	l := newLedger()
	if err := run(l); err != nil {
		fmt.Fprintln(os.Stderr, "load:", err)
		os.Exit(1)
	}
	out, err := json.MarshalIndent(l.report(), "", "  ")
	if err == nil && *reportFile != "" {
		err = os.WriteFile(*reportFile, append(out, '\n'), 0o644)
	} else if err == nil {
		fmt.Println(string(out))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "load:", err)
		os.Exit(1)
	}
}

func run(l *ledger) error {
	subject, err := newClient(*server)
	if err != nil {
		return err
	}
	bypass := subject
	if *direct != "" {
		if bypass, err = newClient(*direct); err != nil {
			return err
		}
	} else {
		*directs = 0
	}
	ctx := context.Background()
	quiet := *watches / 2
	path := "/api/v1/namespaces/" + *namespace + "/configmaps"
	for i := 0; i < *writers+*directs; i++ {
		if err := ensure(bypass, path, busyName(i), "busy"); err != nil {
			return err
		}
	}
	for i := 0; i < quiet; i++ {
		if err := ensure(bypass, path, quietName(i), "quiet"); err != nil {
			return err
		}
	}
	list := bypass.do(ctx, "GET", path+"?limit=1", "")
	if !list.ok() {
		return fmt.Errorf("list: %d %v %s", list.code, list.err, list.body)
	}
	var first struct{ Metadata meta }
	if err := json.Unmarshal(list.body, &first); err != nil {
		return err
	}

	watching, stopWatching := context.WithCancel(ctx)
	defer stopWatching()
	var opened, watchers sync.WaitGroup
	start := func(w *watcher) {
		w.cursor = first.Metadata.ResourceVersion
		l.watchers = append(l.watchers, w)
		opened.Add(1)
		watchers.Add(1)
		go func() { defer watchers.Done(); w.run(watching, l, opened.Done) }()
	}
	kinds := strings.Split(*formats, ",")
	for i := 0; i < *watches; i++ {
		w := &watcher{client: subject, id: i, format: kinds[i/2%len(kinds)], bookmarks: i%4 < 2}
		if i%2 == 1 && i/2 < quiet {
			w.set, w.path = quietName(i/2), path+"?fieldSelector=metadata.name%3D"+quietName(i/2)
		} else if w.set = "busy"; i%4 == 0 {
			w.path = path + "?labelSelector=set%3Dbusy"
		} else { // Cluster-wide; the label contains the namespace, so that only objects of this run match.
			w.path = "/api/v1/configmaps?labelSelector=set%3Dbusy,run%3D" + *namespace
		}
		start(w)
	}
	if *direct != "" {
		start(&watcher{client: bypass, id: -1, reference: true, format: "json", set: "busy", path: path + "?labelSelector=set%3Dbusy"})
		for i := 0; i < quiet; i++ {
			start(&watcher{client: bypass, id: -2 - i, reference: true, format: "json", set: quietName(i), path: path + "?fieldSelector=metadata.name%3D" + quietName(i)})
		}
	}
	opened.Wait()
	fmt.Println("ready")

	working, stop := context.WithTimeout(ctx, *duration)
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	go func() { <-signals; stop() }()
	l.begin()
	var workers sync.WaitGroup
	spawn := func(f func()) { workers.Add(1); go func() { defer workers.Done(); f() }() }
	for i := 0; i < *readers; i++ {
		i := i
		spawn(func() { read(working, subject, l, path, i) })
	}
	for i := 0; i < *writers+*directs; i++ {
		i, c := i, subject
		if i >= *writers {
			c = bypass
		}
		spawn(func() { write(working, c, l, path, i, i >= *writers) })
	}
	for i := 0; i < quiet; i++ {
		i := i
		spawn(func() { updateQuiet(working, bypass, l, path, i, quiet) })
	}
	workers.Wait()
	l.finish()
	for limit := time.Now().Add(*settle); time.Now().Before(limit) && l.lag() > 0; {
		time.Sleep(50 * time.Millisecond)
	}
	l.close()
	stopWatching()
	watchers.Wait()
	return nil
}

func busyName(i int) string  { return fmt.Sprintf("busy-%d", i) }
func quietName(i int) string { return fmt.Sprintf("quiet-%d", i) }

func object(name, set string, writer string, seq int) string {
	naming := `"name":"` + name + `"`
	if strings.HasSuffix(name, "-") {
		naming = `"generateName":"` + name + `"`
	}
	return fmt.Sprintf(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{%s,"labels":{"set":"%s","run":"%s"}},"data":{"writer":"%s","seq":"%d"}}`,
		naming, set, *namespace, writer, seq)
}

func ensure(c *client, path, name, set string) error {
	a := c.do(context.Background(), "POST", path, object(name, set, "", 0))
	if a.ok() || a.code == 409 {
		return nil
	}
	return fmt.Errorf("create %s: %d %v %s", name, a.code, a.err, a.body)
}

// repeat calls f at every interval until ctx ends; a call that takes longer skips intervals.
func repeat(ctx context.Context, every, offset time.Duration, f func(turn int)) {
	select {
	case <-ctx.Done():
		return
	case <-time.After(offset):
	}
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	for turn := 1; ; turn++ {
		f(turn)
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// requestContext lets requests complete after the end of the load, so that the load generator cancels none. A minute
// is longer than client-go's keepalive needs to close a connection.
func requestContext() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), time.Minute)
}

func read(ctx context.Context, c *client, l *ledger, path string, id int) {
	paths := []string{path + "/" + busyName(0), path + "?labelSelector=set%3Dbusy", path + "/" + quietName(0), "/api/v1", path + "?resourceVersion=0"}
	repeat(ctx, *interval, *interval*time.Duration(id)/time.Duration(*readers), func(turn int) {
		ctx, cancel := requestContext()
		defer cancel()
		p := paths[(turn+id)%len(paths)]
		if *watches < 2 && p == path+"/"+quietName(0) {
			p = path + "/" + busyName(0)
		}
		l.request("read", "GET", p, c.do(ctx, "GET", p, ""))
	})
}

// write updates its own object repeatedly. Sometimes it creates an object and deletes it later, because the store
// shows a repeated create but not a repeated identical update.
func write(ctx context.Context, c *client, l *ledger, path string, id int, bypass bool) {
	kind := "write"
	if bypass {
		kind = "direct"
	}
	writer, made := fmt.Sprintf("%s-%d", kind, id), ""
	repeat(ctx, *interval, *interval*time.Duration(id)/time.Duration(*writers+*directs), func(seq int) {
		ctx, cancel := requestContext()
		defer cancel()
		switch {
		case seq%10 == 5:
			a := c.do(ctx, "POST", path, object("made-", "busy", writer, seq))
			l.write(kind, "POST", path, writer, seq, "busy", a)
			if made = ""; a.ok() {
				var o struct{ Metadata meta }
				json.Unmarshal(a.body, &o)
				made = o.Metadata.Name
			}
		case seq%10 == 9 && made != "":
			l.write(kind, "DELETE", path+"/"+made, writer, seq, "busy", c.do(ctx, "DELETE", path+"/"+made, ""))
			made = ""
		default:
			p := path + "/" + busyName(id)
			l.write(kind, "PUT", p, writer, seq, "busy", c.do(ctx, "PUT", p, object(busyName(id), "busy", writer, seq)))
		}
	})
}

// updateQuiet changes the object of one quiet watch; the watches' changes are spread over the interval.
func updateQuiet(ctx context.Context, c *client, l *ledger, path string, id, of int) {
	name := quietName(id)
	repeat(ctx, *quietEvery, *quietEvery*time.Duration(id)/time.Duration(of), func(seq int) {
		ctx, cancel := requestContext()
		defer cancel()
		l.write("direct", "PUT", path+"/"+name, "quiet", seq, name, c.do(ctx, "PUT", path+"/"+name, object(name, "quiet", "quiet", seq)))
	})
}
