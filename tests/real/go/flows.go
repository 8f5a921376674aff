package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// flow is a client with its own connection: when it worked, and every outage with its errors. After a failure it
// retries every 50 ms.
//
//	idle-watch   a watch without events
//	busy-watch   a watch with events
//	read         a GET every 100 ms
//	write        a PUT every 100 ms
//	fresh        a GET every 200 ms, each on a new connection
type flow struct {
	Kind string `json:"kind"`
	ID   int    `json:"id"`
	// Completed requests, received events and opened watches.
	Successes int `json:"successes"`
	// The slowest successful request; for `fresh` including TCP and TLS.
	SlowestMs float64 `json:"slowest_ms"`
	// The longest time between two successes; without meaning for an idle watch.
	MaxGapMs float64  `json:"max_gap_ms"`
	Outages  []outage `json:"outages"`
	// Watches that the server ended cleanly, and responses with an error status.
	Ends []string `json:"ends"`

	client *client
	last   time.Time
}

// outage is a period in which every attempt failed.
type outage struct {
	// Times of the first error and of the next success, in Unix seconds; To is 0 if there was none.
	From   float64  `json:"from"`
	To     float64  `json:"to"`
	Errors []string `json:"errors"`
}

func unix(t time.Time) float64 { return float64(t.UnixMicro()) / 1e6 }

func (f *flow) worked(took time.Duration) {
	now := time.Now()
	f.Successes++
	f.SlowestMs = max(f.SlowestMs, ms(took))
	if !f.last.IsZero() {
		f.MaxGapMs = max(f.MaxGapMs, ms(now.Sub(f.last)))
	}
	f.last = now
	if n := len(f.Outages); n > 0 && f.Outages[n-1].To == 0 {
		f.Outages[n-1].To = unix(now)
	}
}

func (f *flow) failed(err error) {
	n := len(f.Outages)
	if n == 0 || f.Outages[n-1].To != 0 {
		f.Outages = append(f.Outages, outage{From: unix(time.Now())})
		n++
	}
	if o := &f.Outages[n-1]; len(o.Errors) < 5 {
		o.Errors = append(o.Errors, err.Error())
	}
}

// runFlows runs the flows of `spec` ("read=4,idle-watch=10") until -duration or SIGTERM, and writes the report.
func runFlows(spec string) error {
	direct, err := newClient(*direct)
	if err != nil {
		return err
	}
	path := "/api/v1/namespaces/" + *namespace + "/configmaps"
	for _, name := range []string{"idle", "busy"} {
		if err := ensure(direct, path, name, name); err != nil {
			return err
		}
	}
	var flows []*flow
	for _, part := range strings.Split(spec, ",") {
		kind, number, _ := strings.Cut(part, "=")
		count, err := strconv.Atoi(number)
		if err != nil {
			return fmt.Errorf("-flows %s: %w", part, err)
		}
		for i := 0; i < count; i++ {
			c, err := newClient(*server)
			if err != nil {
				return err
			}
			f := &flow{Kind: kind, ID: i, Outages: []outage{}, Ends: []string{}, client: c}
			if kind == "write" {
				if err := ensure(direct, path, fmt.Sprintf("write-%d", i), "write"); err != nil {
					return err
				}
			}
			flows = append(flows, f)
		}
	}

	ctx, stop := context.WithCancel(context.Background())
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	go func() { <-signals; stop() }()
	var opened, done sync.WaitGroup
	for _, f := range flows {
		opened.Add(1)
		done.Add(1)
		go func(f *flow) {
			defer done.Done()
			var once sync.Once
			f.run(ctx, path, func() { once.Do(opened.Done) })
		}(f)
	}
	opened.Wait()
	fmt.Println("ready")
	go repeat(ctx, 100*time.Millisecond, 0, func(turn int) {
		request, cancel := requestContext()
		defer cancel()
		direct.do(request, "PUT", path+"/busy", object("busy", "busy", "direct", turn))
	})
	time.AfterFunc(*duration, stop)
	done.Wait()
	out, err := json.MarshalIndent(map[string]any{"flows": flows}, "", " ")
	if err != nil {
		return err
	}
	return os.WriteFile(*reportFile, append(out, '\n'), 0o644)
}

func (f *flow) run(ctx context.Context, path string, opened func()) {
	every := 100 * time.Millisecond
	if f.Kind == "fresh" {
		every = 200 * time.Millisecond
	}
	// Requests in flight at the end count only if they took a whole interval.
	over := func(start time.Time, err error) bool {
		return ctx.Err() != nil && (err != nil || time.Since(start) < every)
	}
	for turn := 1; ctx.Err() == nil; turn++ {
		start := time.Now()
		err := f.once(ctx, path, turn, opened)
		if over(start, err) {
			return
		}
		pause := every - time.Since(start)
		switch {
		case err != nil:
			f.failed(err)
			pause = 50 * time.Millisecond
		case strings.HasSuffix(f.Kind, "watch"):
			pause = 0
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
}

func (f *flow) once(ctx context.Context, path string, turn int, opened func()) error {
	start := time.Now()
	switch f.Kind {
	case "idle-watch", "busy-watch":
		return f.watch(ctx, path+"?watch=true&timeoutSeconds=3600&resourceVersion=0&fieldSelector=metadata.name%3D"+strings.TrimSuffix(f.Kind, "-watch"), opened)
	case "fresh":
		defer f.client.http.CloseIdleConnections()
		fallthrough
	case "read":
		return f.request(ctx, start, "GET", path+"/idle", "", opened)
	case "write":
		name := fmt.Sprintf("write-%d", f.ID)
		return f.request(ctx, start, "PUT", path+"/"+name, object(name, "write", "write", turn), opened)
	}
	return fmt.Errorf("unknown kind of flow: %s", f.Kind)
}

func (f *flow) request(ctx context.Context, start time.Time, method, path, body string, opened func()) error {
	a := f.client.do(ctx, method, path, body)
	if a.err == nil && !a.ok() {
		f.Ends = append(f.Ends, fmt.Sprintf("%d %s", a.code, a.body))
	}
	if a.err == nil {
		f.worked(time.Since(start) - a.paused)
		opened()
	}
	return a.err
}

// watch opens a watch and reads it to its end; nil is a clean end by the server.
func (f *flow) watch(ctx context.Context, path string, opened func()) error {
	start := time.Now()
	request, err := f.client.request(ctx, "GET", path, "application/json", "", uuid())
	if err != nil {
		return err
	}
	response, err := f.client.http.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		body, _ := io.ReadAll(response.Body)
		f.Ends = append(f.Ends, fmt.Sprintf("%d %s", response.StatusCode, body))
		return nil
	}
	f.worked(time.Since(start))
	opened()
	// The first event contains the current object; only the busy watch receives more.
	buffer := make([]byte, 64<<10)
	for {
		_, err := response.Body.Read(buffer)
		if err == io.EOF {
			f.Ends = append(f.Ends, "watch ended cleanly")
			return nil
		}
		if err != nil {
			return err
		}
		if f.Kind == "busy-watch" {
			f.worked(0)
		}
	}
}
