package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"sort"
	"strconv"
	"sync"
	"time"
)

// ledger records every request, write and watch, and makes the report.
type ledger struct {
	mu       sync.Mutex
	started  time.Time
	finished time.Time // writers stopped
	closed   time.Time // watches stopped
	kinds    map[string]*requestStats
	failures []failure
	writes   []writeRecord
	watchers []*watcher
}

type requestStats struct {
	Total       int     `json:"total"`
	Failed      int     `json:"failed"`
	NoStatus    int     `json:"failed_without_status"`
	SlowestMs   float64 `json:"slowest_ms"`
	Slowest     []timed `json:"slowest"`    // the slowest ones, in descending order
	MaxGapMs    float64 `json:"max_gap_ms"` // the longest time without a success
	MaxGapAt    float64 `json:"max_gap_at"`
	HTTP1       int     `json:"http1,omitempty"`
	requests    []timed
	P50Ms       float64 `json:"p50_ms"`
	P99Ms       float64 `json:"p99_ms"`
	lastSuccess time.Time
}

// timed is a request and its duration.
type timed struct {
	Unix      float64 `json:"unix"` // of its end
	Op        string  `json:"op"`
	Path      string  `json:"path"`
	AuditID   string  `json:"audit_id"`
	LatencyMs float64 `json:"latency_ms"`
}

// maxSlowest is the number of slowest requests of each kind in a report.
const maxSlowest = 20

type failure struct {
	At         float64 `json:"at"` // seconds since the start
	Unix       float64 `json:"unix"`
	Kind       string  `json:"kind"`
	Op         string  `json:"op"`
	Path       string  `json:"path"`
	AuditID    string  `json:"audit_id,omitempty"`
	LatencyMs  float64 `json:"latency_ms"`
	Error      string  `json:"error,omitempty"`
	Code       int     `json:"code,omitempty"`
	IsStatus   bool    `json:"is_status"`
	Reason     string  `json:"reason,omitempty"`
	Message    string  `json:"message,omitempty"`
	RetryAfter string  `json:"retry_after,omitempty"`
}

type writeRecord struct {
	set, writer, op string
	seq             int
	version         uint64 // 0 for deletes and for writes without a successful response
	acked           time.Time
	ok              bool
	auditID         string
}

func newLedger() *ledger { return &ledger{kinds: map[string]*requestStats{}} }

func (l *ledger) begin() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.started = time.Now()
	for _, kind := range []string{"read", "write", "direct"} {
		l.kinds[kind] = &requestStats{lastSuccess: l.started}
	}
}

func (l *ledger) finish() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.finished = time.Now()
	for _, t := range l.kinds {
		if t.Total > 0 {
			t.gap(l.finished, l.started)
		}
	}
}

func (l *ledger) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = time.Now()
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

func (t *requestStats) gap(now, started time.Time) {
	if g := ms(now.Sub(t.lastSuccess)); g > t.MaxGapMs {
		t.MaxGapMs, t.MaxGapAt = g, t.lastSuccess.Sub(started).Seconds()
	}
	t.lastSuccess = now
}

func (l *ledger) request(kind, op, path string, a result) {
	l.mu.Lock()
	defer l.mu.Unlock()
	t := l.kinds[kind]
	t.Total++
	if a.proto == "HTTP/1.1" {
		t.HTTP1++
	}
	t.requests = append(t.requests, timed{float64(a.end.UnixMilli()) / 1000, op, path, a.auditID, ms(a.took())})
	if a.ok() {
		t.gap(a.end, l.started)
		return
	}
	t.Failed++
	f := failure{At: a.end.Sub(l.started).Seconds(), Unix: float64(a.end.UnixMilli()) / 1000, Kind: kind, Op: op, Path: path,
		AuditID: a.auditID, LatencyMs: ms(a.end.Sub(a.start)), Code: a.code, RetryAfter: a.retryAfter}
	if a.err != nil {
		f.Error = a.err.Error()
	} else {
		var status struct{ Kind, Reason, Message string }
		f.IsStatus = json.Unmarshal(a.body, &status) == nil && status.Kind == "Status"
		f.Reason, f.Message = status.Reason, status.Message
		if !f.IsStatus {
			f.Message = string(a.body[:min(len(a.body), 200)])
		}
	}
	if !f.IsStatus {
		t.NoStatus++
	}
	l.failures = append(l.failures, f)
}

func min(a, b int) int {
	if a < b {
		return a
	}
	return b
}

func (l *ledger) write(kind, op, path, writer string, seq int, set string, a result) {
	l.request(kind, op, path, a)
	w := writeRecord{set: set, writer: writer, op: op, seq: seq, acked: a.end, ok: a.ok(), auditID: a.auditID}
	if a.ok() && op != "DELETE" {
		var o struct{ Metadata meta }
		json.Unmarshal(a.body, &o)
		w.version, _ = strconv.ParseUint(o.Metadata.ResourceVersion, 10, 64)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.writes = append(l.writes, w)
}

func (l *ledger) watchFailed(w *watcher, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	op := "broken"
	if errors.Is(err, errExpired) {
		op = "expired"
	} else if errors.Is(err, errRefused) {
		op = "refused"
	}
	now := time.Now()
	f := failure{Unix: float64(now.UnixMilli()) / 1000, Kind: "watch", Op: op, Path: w.path, Error: err.Error()}
	if !l.started.IsZero() {
		f.At = now.Sub(l.started).Seconds()
	}
	l.failures = append(l.failures, f)
}

// knownEvents is every event that exists, by set: acknowledged writes, and events that any watch received.
func (l *ledger) knownEvents() map[string]map[uint64]time.Time {
	sets := map[string]map[uint64]time.Time{}
	of := func(set string) map[uint64]time.Time {
		if sets[set] == nil {
			sets[set] = map[uint64]time.Time{}
		}
		return sets[set]
	}
	l.mu.Lock()
	for _, w := range l.writes {
		if w.version > 0 {
			of(w.set)[w.version] = w.acked
		}
	}
	l.mu.Unlock()
	for _, w := range l.watchers {
		w.mu.Lock()
		for _, e := range w.events {
			if _, known := of(w.set)[e.version]; !known {
				of(w.set)[e.version] = time.Time{}
			}
		}
		w.mu.Unlock()
	}
	return sets
}

// lag counts the events that a watch has not received yet.
func (l *ledger) lag() int {
	sets, lag := l.knownEvents(), 0
	for _, w := range l.watchers {
		w.mu.Lock()
		have := map[uint64]bool{}
		for _, e := range w.events {
			have[e.version] = true
		}
		listed := w.listed
		w.mu.Unlock()
		for version := range sets[w.set] {
			if !have[version] && version > listed {
				lag++
			}
		}
	}
	return lag
}

// watchCounts are the counts of one watch, or of all.
type watchCounts struct {
	Events     int `json:"events"`
	Ended      int `json:"ended_cleanly"`
	Broken     int `json:"broken"`
	Refused    int `json:"refused"`
	Relists    int `json:"relists"`
	Lost       int `json:"lost"`
	Duplicated int `json:"duplicated"`
	Backwards  int `json:"backwards"`
}

func (c *watchCounts) add(o watchCounts) {
	c.Events += o.Events
	c.Ended += o.Ended
	c.Broken += o.Broken
	c.Refused += o.Refused
	c.Relists += o.Relists
	c.Lost += o.Lost
	c.Duplicated += o.Duplicated
	c.Backwards += o.Backwards
}

type watchReport struct {
	ID        int    `json:"id"`
	Reference bool   `json:"reference,omitempty"`
	Set       string `json:"set"`
	Format    string `json:"format"`
	Bookmarks int    `json:"bookmarks"`
	watchCounts
	MaxGapMs    float64  `json:"max_gap_ms"`   // between two events of a busy watch
	MaxDelayMs  float64  `json:"max_delay_ms"` // from the acknowledged write to the event
	MaxDelayAt  float64  `json:"max_delay_at"`
	LostSamples []uint64 `json:"lost_samples,omitempty"`
}

type report struct {
	Started      float64                  `json:"started"`
	Seconds      float64                  `json:"seconds"`
	Requests     map[string]*requestStats `json:"requests"`
	Watches      watchTotals              `json:"watches"`
	AppliedTwice []string                 `json:"applied_twice"`
	WriteIDs     []string                 `json:"write_ids"`
	Failures     []failure                `json:"failures"`
	Each         []watchReport            `json:"each_watch"`
}

type watchTotals struct {
	Count int `json:"count"`
	watchCounts
	BusySilence  float64 `json:"busy_silence_ms"`
	BusyDelay    float64 `json:"busy_delay_ms"`
	QuietDelay   float64 `json:"quiet_delay_ms"`
	ReferenceGap float64 `json:"reference_silence_ms"`
}

func (l *ledger) report() report {
	r := report{Started: float64(l.started.UnixMilli()) / 1000, Seconds: l.finished.Sub(l.started).Seconds(),
		Requests: l.kinds, Failures: l.failures, AppliedTwice: l.appliedTwice(), WriteIDs: []string{}}
	if r.Failures == nil {
		r.Failures = []failure{}
	}
	for _, t := range l.kinds {
		sort.Slice(t.requests, func(i, j int) bool { return t.requests[i].LatencyMs > t.requests[j].LatencyMs })
		t.Slowest = t.requests[:min(len(t.requests), maxSlowest)]
		if n := len(t.requests); n > 0 {
			t.SlowestMs, t.P50Ms, t.P99Ms = t.requests[0].LatencyMs, t.requests[(n-1)/2].LatencyMs, t.requests[n-1-n*99/100].LatencyMs
		}
	}
	for _, w := range l.writes {
		if w.writer != "quiet" {
			r.WriteIDs = append(r.WriteIDs, w.auditID)
		}
	}
	sets := l.knownEvents()
	for _, w := range l.watchers {
		e := l.evaluate(w, sets[w.set])
		r.Each = append(r.Each, e)
		t := &r.Watches
		if w.reference {
			if w.set == "busy" {
				t.ReferenceGap = e.MaxGapMs
			}
			continue
		}
		t.Count++
		t.add(e.watchCounts)
		if w.set == "busy" {
			t.BusySilence, t.BusyDelay = max(t.BusySilence, e.MaxGapMs), max(t.BusyDelay, e.MaxDelayMs)
		} else {
			t.QuietDelay = max(t.QuietDelay, e.MaxDelayMs)
		}
	}
	return r
}

func max(a, b float64) float64 {
	if a > b {
		return a
	}
	return b
}

func (l *ledger) evaluate(w *watcher, all map[uint64]time.Time) watchReport {
	e := watchReport{ID: w.id, Reference: w.reference, Set: w.set, Format: w.format, Bookmarks: w.bookmarksReceived,
		watchCounts: watchCounts{Events: len(w.events), Ended: w.ended, Broken: w.broken, Refused: w.refused, Relists: w.relists}}
	have, last, highest := map[uint64]bool{}, l.started, uint64(0)
	for _, s := range w.events {
		if have[s.version] {
			e.Duplicated++
		} else if s.version < highest {
			e.Backwards++
		}
		have[s.version] = true
		if s.version > highest {
			highest = s.version
		}
		if acked := all[s.version]; !acked.IsZero() {
			if d := ms(s.at.Sub(acked)); d > e.MaxDelayMs {
				e.MaxDelayMs, e.MaxDelayAt = d, acked.Sub(l.started).Seconds()
			}
		}
		if w.set == "busy" {
			e.MaxGapMs, last = max(e.MaxGapMs, ms(s.at.Sub(last))), s.at
		}
	}
	if w.set == "busy" && last.Before(l.finished) {
		e.MaxGapMs = max(e.MaxGapMs, ms(l.finished.Sub(last)))
	}
	for version, acked := range all {
		if !have[version] && version > w.listed {
			e.Lost++
			if len(e.LostSamples) < 5 {
				e.LostSamples = append(e.LostSamples, version)
			}
			if !acked.IsZero() { // Never received: its delay lasts at least until the end.
				e.MaxDelayMs = max(e.MaxDelayMs, ms(l.closed.Sub(acked)))
			}
		}
	}
	return e
}

// appliedTwice lists every write that appears in the store twice. The store does not show a repeated identical
// update; for those the audit logs are searched for the write_ids.
func (l *ledger) appliedTwice() []string {
	versions := map[string]map[uint64]bool{}
	for _, w := range l.watchers {
		if w.set != "busy" {
			continue
		}
		for _, e := range w.events {
			if e.writer == "" || e.kind == "DELETED" {
				continue
			}
			key := fmt.Sprintf("%s seq %s", e.writer, e.seq)
			if versions[key] == nil {
				versions[key] = map[uint64]bool{}
			}
			versions[key][e.version] = true
		}
	}
	twice := []string{}
	for key, list := range versions {
		if len(list) > 1 {
			twice = append(twice, key)
		}
	}
	sort.Strings(twice)
	return twice
}
