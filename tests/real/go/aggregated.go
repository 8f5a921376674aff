package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"
)

// With -aggregated, it serves one API group on several addresses, by HTTP/2 and HTTP/1.1, from one store. Each address
// is a replica of the aggregated apiserver. A POST is always applied, also with a name that exists, and appended to the
// store file: a write that is applied twice has two lines.
var (
	aggregatedAt   = flag.String("aggregated", "", "serve an aggregated API group at these addresses instead, separated by commas")
	aggregatedAPI  = flag.String("aggregated-api", "", "group and version of the API, for example example.com/v1")
	aggregatedFile = flag.String("aggregated-store", "", "file with a line for each applied write: version, name, replica")
)

const ownInterval = 100 * time.Millisecond // between the objects that the server itself creates

type gauge struct {
	version uint64
	name    string
}

type gauges struct {
	mu      sync.Mutex
	changed chan struct{} // closed at each change
	version uint64
	history []gauge
	file    *os.File
}

func openGauges(path string) (*gauges, error) {
	// Microseconds, so that the versions also increase across a restart.
	g := &gauges{changed: make(chan struct{}), version: uint64(time.Now().UnixMicro())}
	text, err := os.ReadFile(path)
	if err != nil && !os.IsNotExist(err) {
		return nil, err
	}
	for _, line := range strings.Split(string(text), "\n") {
		if fields := strings.Fields(line); len(fields) == 3 {
			version, _ := strconv.ParseUint(fields[0], 10, 64)
			g.history = append(g.history, gauge{version, fields[1]})
		}
	}
	g.file, err = os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	return g, err
}

// create applies a write. Objects that the server itself creates have no replica, and are not in the file.
func (g *gauges) create(name, replica string) gauge {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.version++
	made := gauge{g.version, name}
	if replica != "" {
		fmt.Fprintf(g.file, "%d %s %s\n", made.version, name, replica)
	}
	g.history = append(g.history, made)
	close(g.changed)
	g.changed = make(chan struct{})
	return made
}

// after returns the objects with versions above the cursor, the newest version, and the channel of the next change.
func (g *gauges) after(cursor uint64) ([]gauge, uint64, chan struct{}) {
	g.mu.Lock()
	defer g.mu.Unlock()
	first := len(g.history)
	for first > 0 && g.history[first-1].version > cursor {
		first--
	}
	return g.history[first:len(g.history):len(g.history)], g.version, g.changed
}

func (g *gauges) named(name string) (gauge, bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for i := len(g.history) - 1; i >= 0; i-- {
		if g.history[i].name == name {
			return g.history[i], true
		}
	}
	return gauge{}, false
}

type document map[string]interface{}

func (g gauge) object() document {
	return document{"kind": "Gauge", "apiVersion": *aggregatedAPI, "metadata": document{"name": g.name, "resourceVersion": strconv.FormatUint(g.version, 10)}}
}

func respond(w http.ResponseWriter, code int, body interface{}) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	json.NewEncoder(w).Encode(body)
}

func (g *gauges) watch(w http.ResponseWriter, r *http.Request) {
	cursor, _ := strconv.ParseUint(r.URL.Query().Get("resourceVersion"), 10, 64)
	bookmarks := r.URL.Query().Get("allowWatchBookmarks") == "true"
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusOK)
	w.(http.Flusher).Flush()
	encoder, bookmark := json.NewEncoder(w), time.NewTicker(time.Second)
	defer bookmark.Stop()
	for {
		events, version, changed := g.after(cursor)
		for _, event := range events {
			cursor = event.version
			encoder.Encode(document{"type": "ADDED", "object": event.object()})
		}
		w.(http.Flusher).Flush()
		select {
		case <-r.Context().Done():
			return
		case <-changed:
		case <-bookmark.C:
			if bookmarks {
				encoder.Encode(document{"type": "BOOKMARK", "object": gauge{version: version}.object()})
			}
		}
	}
}

func (g *gauges) serve(w http.ResponseWriter, r *http.Request, replica string) {
	group, version, _ := strings.Cut(*aggregatedAPI, "/")
	groupVersion := document{"groupVersion": *aggregatedAPI, "version": version}
	one := document{"name": group, "versions": []document{groupVersion}, "preferredVersion": groupVersion}
	api, collection := "/apis/"+*aggregatedAPI, "/apis/"+*aggregatedAPI+"/gauges"
	name := strings.TrimPrefix(r.URL.Path, collection+"/")
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	switch {
	case r.URL.Path == "/apis":
		respond(w, 200, document{"kind": "APIGroupList", "apiVersion": "v1", "groups": []document{one}})
	case r.URL.Path == "/apis/"+group:
		one["kind"], one["apiVersion"] = "APIGroup", "v1"
		respond(w, 200, one)
	case r.URL.Path == api:
		respond(w, 200, document{"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": *aggregatedAPI, "resources": []document{{
			"name": "gauges", "singularName": "gauge", "namespaced": false, "kind": "Gauge", "verbs": []string{"create", "get", "list", "watch"}}}})
	case r.URL.Path == collection && r.Method == "POST":
		var sent struct{ Metadata meta }
		if json.Unmarshal(body, &sent) != nil || sent.Metadata.Name == "" {
			respond(w, 400, document{"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 400})
			return
		}
		respond(w, 201, g.create(sent.Metadata.Name, replica).object())
	case r.URL.Path == collection && r.URL.Query().Get("watch") != "":
		g.watch(w, r)
	case r.URL.Path == collection:
		// The newest ones are enough: a list must not become slow in the course of a test.
		found, newest, _ := g.after(0)
		if len(found) > 100 {
			found = found[len(found)-100:]
		}
		items := []document{}
		for _, item := range found {
			items = append(items, item.object())
		}
		respond(w, 200, document{"kind": "GaugeList", "apiVersion": *aggregatedAPI, "metadata": document{"resourceVersion": strconv.FormatUint(newest, 10)}, "items": items})
	case name != r.URL.Path && r.Method == "GET":
		if found, exists := g.named(name); exists {
			respond(w, 200, found.object())
			return
		}
		respond(w, 404, document{"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404})
	case r.URL.Path == "/admit":
		var review struct {
			APIVersion string
			Request    struct{ UID string }
		}
		json.Unmarshal(body, &review)
		respond(w, 200, document{"kind": "AdmissionReview", "apiVersion": review.APIVersion, "response": document{"uid": review.Request.UID, "allowed": true}})
	case r.URL.Path == "/convert":
		convert(w, body)
	default:
		http.NotFound(w, r)
	}
}

// convert answers a ConversionReview: it changes only the version of each object.
func convert(w http.ResponseWriter, body []byte) {
	var review struct {
		APIVersion string
		Request    struct {
			UID               string
			DesiredAPIVersion string
			Objects           []document
		}
	}
	json.Unmarshal(body, &review)
	for _, object := range review.Request.Objects {
		object["apiVersion"] = review.Request.DesiredAPIVersion
	}
	respond(w, 200, document{"kind": "ConversionReview", "apiVersion": review.APIVersion, "response": document{
		"uid": review.Request.UID, "result": document{"status": "Success"}, "convertedObjects": review.Request.Objects}})
}

func runAggregated() error {
	g, err := openGauges(*aggregatedFile)
	if err != nil {
		return err
	}
	for number := 0; number < 10; number++ {
		g.create(fmt.Sprintf("tick-%d", number), "")
	}
	go func() {
		for number := 0; ; number++ {
			time.Sleep(ownInterval)
			g.create(fmt.Sprintf("tick-%d", number%10), "")
		}
	}()
	failed := make(chan error)
	for _, address := range strings.Split(*aggregatedAt, ",") {
		address := address
		handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { g.serve(w, r, address) })
		server := &http.Server{Addr: address, Handler: handler, ErrorLog: log.New(io.Discard, "", 0)}
		go func() { failed <- server.ListenAndServeTLS(*certFile, *keyFile) }()
	}
	return <-failed
}
