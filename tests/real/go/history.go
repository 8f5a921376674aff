package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand"
	"net/http"
	"net/url"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
	"unsafe"
)

// With -history, clients with random requests and watches record every request, response and event as a line of JSON,
// for consistency/checker.py. Each client has its own connection and credential.
var (
	historyFile = flag.String("history", "", "record a history to this file instead; see history.go")
	historyIDs  = flag.String("clients", "", "name=token of each client, separated by commas; without a token it uses -cert")
	seed        = flag.Int64("seed", 1, "seed of the requests")
	reference   = flag.String("reference-token", "", "token for reference watches at -direct")
	watchList   = flag.Bool("watch-list", true, "etcd reports its progress on request, which watches with bookmarks and initial events need")
	group       = flag.String("custom-group", "check.jackstay.test", "API group of the custom resource `things`")
)

const (
	historyKeys = 6
	valueKey    = "jackstay.test/value"
)

var historyResources = []string{"configmaps", "leases", "things"}

func collection(resource string) string {
	prefix := map[string]string{"configmaps": "/api/v1", "leases": "/apis/coordination.k8s.io/v1"}[resource]
	if prefix == "" {
		prefix = "/apis/" + *group + "/v1"
	}
	return prefix + "/namespaces/" + *namespace + "/" + resource
}

// now is CLOCK_MONOTONIC, which all processes of the host share, in nanoseconds.
func now() int64 {
	var t syscall.Timespec
	syscall.Syscall(syscall.SYS_CLOCK_GETTIME, 1, uintptr(unsafe.Pointer(&t)), 0)
	return t.Nano()
}

type record map[string]interface{}

// recorder writes records; the file is complete after close.
type recorder struct {
	mu   sync.Mutex
	file *os.File
	out  *bufio.Writer
}

func (r *recorder) write(line record) {
	text, _ := json.Marshal(line)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.out.Write(append(text, '\n'))
}

func (r *recorder) close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.out.Flush(); err != nil {
		return err
	}
	return r.file.Close()
}

// item is an object as a response or event shows it.
type item struct {
	Key     string  `json:"key"`
	Version uint64  `json:"version"`
	UID     string  `json:"uid"`
	Value   *string `json:"value,omitempty"`
	Hash    string  `json:"hash,omitempty"`
}

// objectItem describes a decoded object. The hash is of all its fields but kind and apiVersion, which lists leave out.
func objectItem(object map[string]interface{}) item {
	metadata, _ := object["metadata"].(map[string]interface{})
	annotations, _ := metadata["annotations"].(map[string]interface{})
	text := func(from map[string]interface{}, key string) string { s, _ := from[key].(string); return s }
	value := text(annotations, valueKey)
	version, _ := strconv.ParseUint(text(metadata, "resourceVersion"), 10, 64)
	delete(object, "kind")
	delete(object, "apiVersion")
	var canonical bytes.Buffer
	encoder := json.NewEncoder(&canonical)
	encoder.SetEscapeHTML(false)
	encoder.Encode(object)
	sum := sha256.Sum256(bytes.TrimSpace(canonical.Bytes()))
	return item{text(metadata, "name"), version, text(metadata, "uid"), &value, hex.EncodeToString(sum[:8])}
}

func decode(body []byte) (map[string]interface{}, error) {
	var object map[string]interface{}
	decoder := json.NewDecoder(bytes.NewReader(body))
	decoder.UseNumber()
	err := decoder.Decode(&object)
	return object, err
}

// historyClient is one client with its identity and connection.
type historyClient struct {
	*client
	name     string
	out      *recorder
	bypasses bool // the reference, which uses an apiserver directly

	mu     sync.Mutex
	random *rand.Rand
	op     int
	seq    int
	seen   map[string]uint64 // the newest version by resource
	known  map[string]item   // the last object by path, for conditional writes
}

func (h *historyClient) pick(n int) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.random.Intn(n)
}

func (h *historyClient) saw(resource string, version uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if version > h.seen[resource] {
		h.seen[resource] = version
	}
}

func (h *historyClient) newest(resource string) string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return strconv.FormatUint(h.seen[resource], 10)
}

// invoke records a request before it is sent.
func (h *historyClient) invoke(line record) (int, string) {
	h.mu.Lock()
	h.op++
	op := h.op
	h.mu.Unlock()
	id := uuid()
	line["kind"], line["client"], line["op"], line["audit_id"] = "invoke", h.name, op, id
	if h.bypasses {
		line["reference"] = true
	}
	line["wall"], line["at"] = time.Now().UnixNano(), now()
	h.out.write(line)
	return op, id
}

// reply records a complete response.
func (h *historyClient) reply(op int, line record) {
	line["kind"], line["client"], line["op"] = "return", h.name, op
	if _, ok := line["at"]; !ok {
		line["at"] = now()
	}
	h.out.write(line)
}

// call sends a request that is not a watch and records it. It returns the decoded body of a success.
func (h *historyClient) call(method, path, body, contentType string, line record) map[string]interface{} {
	op, id := h.invoke(line)
	ctx, cancel := requestContext()
	defer cancel()
	request, err := h.request(ctx, method, path, "application/json", body, id)
	var response *http.Response
	var data []byte
	if err == nil {
		if contentType != "" {
			request.Header.Set("Content-Type", contentType)
		}
		if response, err = h.http.Do(request); err == nil {
			data, err = io.ReadAll(response.Body)
			response.Body.Close()
		}
	}
	answer := record{"at": now()}
	if err != nil {
		answer["error"], answer["code"] = err.Error(), 0
		h.reply(op, answer)
		return nil
	}
	answer["code"] = response.StatusCode
	object, err := decode(data)
	if response.StatusCode >= 300 {
		describe(answer, response, object, data)
		h.reply(op, answer)
		return nil
	}
	if err != nil {
		answer["error"] = fmt.Sprintf("the body is not JSON: %v", err)
		h.reply(op, answer)
		return nil
	}
	resource := line["resource"].(string)
	if list, ok := object["items"].([]interface{}); ok {
		metadata, _ := object["metadata"].(map[string]interface{})
		version, _ := strconv.ParseUint(fmt.Sprint(metadata["resourceVersion"]), 10, 64)
		items := make([]item, 0, len(list))
		for _, one := range list {
			items = append(items, objectItem(one.(map[string]interface{})))
		}
		answer["version"], answer["items"] = version, items
		if token, _ := metadata["continue"].(string); token != "" {
			answer["continue"] = true
		}
		h.saw(resource, version)
	} else if object["kind"] == "Status" { // of a deletion
		details, _ := object["details"].(map[string]interface{})
		answer["items"] = []record{{"key": line["key"], "uid": details["uid"]}}
	} else {
		one := objectItem(object)
		if line["verb"] == "delete" {
			answer["items"] = []record{{"key": line["key"], "uid": one.UID}}
		} else {
			answer["version"], answer["items"] = one.Version, []item{one}
			h.saw(resource, one.Version)
			h.mu.Lock()
			h.known[resource+"/"+one.Key] = one
			h.mu.Unlock()
		}
	}
	h.reply(op, answer)
	return object
}

// describe adds what an error response says.
func describe(answer record, response *http.Response, object map[string]interface{}, data []byte) {
	if message, _ := object["message"].(string); message != "" {
		answer["message"], answer["reason"] = message, object["reason"]
	} else if len(data) > 0 {
		answer["message"] = fmt.Sprintf("%.200s", data)
	}
	if after := response.Header.Get("Retry-After"); after != "" {
		answer["retry_after"] = after
	}
}

// ---- requests ----------------------------------------------------------------------------------------

// manifest is an object with a value that no other write has.
func (h *historyClient) manifest(resource, key, version string) (string, string) {
	h.mu.Lock()
	h.seq++
	value := fmt.Sprintf("%s-%d", h.name, h.seq)
	set := []string{"a", "b"}[h.random.Intn(2)]
	h.mu.Unlock()
	metadata := record{"name": key, "labels": record{"set": set}, "annotations": record{valueKey: value}}
	if version != "" {
		metadata["resourceVersion"] = version
	}
	object := record{"metadata": metadata}
	switch resource {
	case "configmaps":
		object["apiVersion"], object["kind"], object["data"] = "v1", "ConfigMap", record{"value": value, "text": strings.Repeat("ä<&>", 30)}
	case "leases":
		object["apiVersion"], object["kind"], object["spec"] = "coordination.k8s.io/v1", "Lease", record{"holderIdentity": value, "leaseDurationSeconds": 40}
	default:
		object["apiVersion"], object["kind"], object["spec"] = *group+"/v1", "Thing", record{"value": value}
	}
	text, _ := json.Marshal(object)
	return string(text), value
}

func (h *historyClient) act() {
	resource := historyResources[h.pick(len(historyResources))]
	key := fmt.Sprintf("k%d", h.pick(historyKeys))
	path := collection(resource)
	line := record{"resource": resource, "key": key}
	switch turn := h.pick(100); {
	case turn < 12:
		h.mu.Lock()
		known := h.known[resource+"/"+key]
		h.mu.Unlock()
		version := ""
		if known.Version == 0 && resource != "configmaps" { // requires a version
			return
		}
		if known.Version != 0 && (resource != "configmaps" || h.pick(2) == 0) {
			version = strconv.FormatUint(known.Version, 10)
		}
		body, value := h.manifest(resource, key, version)
		line["verb"], line["value"] = "update", value
		h.call("PUT", path+"/"+key, body, "", line)
	case turn < 32:
		body, value := h.manifest(resource, key, "")
		line["verb"], line["value"] = "patch", value
		h.call("PATCH", path+"/"+key, body, "application/merge-patch+json", line)
	case turn < 42:
		body, value := h.manifest(resource, key, "")
		line["verb"], line["value"] = "create", value
		h.call("POST", path, body, "", line)
	case turn < 48:
		line["verb"] = "delete"
		h.call("DELETE", path+"/"+key, "", "", line)
	case turn < 70:
		form := record{}
		switch h.pick(5) {
		case 0, 1, 2:
			form["resourceVersion"] = "0"
		case 3:
			form["resourceVersion"] = h.newest(resource)
		}
		line["verb"], line["form"] = "get", form
		h.call("GET", path+"/"+key+query(form), "", "", line)
	default:
		h.list(resource)
	}
}

// list sends a list in one of its forms.
func (h *historyClient) list(resource string) map[string]interface{} {
	form := record{}
	newest := h.newest(resource)
	switch turn := h.pick(10); {
	case turn < 4:
		form["resourceVersion"] = "0"
	case turn == 4:
		form["resourceVersion"], form["limit"] = "0", 2
	case turn == 5:
		form["limit"] = 2
	case turn == 6 && newest != "0":
		form["resourceVersion"], form["match"] = newest, "Exact"
	case turn == 7 && newest != "0":
		form["resourceVersion"], form["match"] = newest, "NotOlderThan"
		if h.pick(2) == 0 {
			form["limit"] = 4
		}
	}
	if h.pick(4) == 0 {
		form["selector"] = "set=a"
	}
	if form["limit"] != nil {
		h.mu.Lock()
		form["chain"] = h.op
		h.mu.Unlock()
	}
	path := collection(resource)
	object := h.call("GET", path+query(form), "", "", record{"verb": "list", "resource": resource, "form": form})
	for pages := 0; object != nil && pages < historyKeys; pages++ {
		metadata, _ := object["metadata"].(map[string]interface{})
		token, _ := metadata["continue"].(string)
		if token == "" {
			break
		}
		next := record{"continue": true, "limit": form["limit"], "chain": form["chain"]}
		if form["selector"] != nil {
			next["selector"] = form["selector"]
		}
		object = h.call("GET", path+query(next)+"&continue="+url.QueryEscape(token), "", "", record{"verb": "list", "resource": resource, "form": next})
	}
	return object
}

// query writes a form as URL parameters, without the continue token.
func query(form record) string {
	values := url.Values{}
	for name, parameter := range map[string]string{"resourceVersion": "resourceVersion", "match": "resourceVersionMatch", "limit": "limit",
		"timeoutSeconds": "timeoutSeconds", "sendInitialEvents": "sendInitialEvents", "bookmarks": "allowWatchBookmarks", "watch": "watch"} {
		if value, ok := form[name]; ok {
			values.Set(parameter, fmt.Sprint(value))
		}
	}
	if selector, ok := form["selector"].(string); ok {
		if strings.HasPrefix(selector, "metadata.name=") {
			values.Set("fieldSelector", selector)
		} else {
			values.Set("labelSelector", selector)
		}
	}
	return "?" + values.Encode()
}

// ---- watches -----------------------------------------------------------------------------------------

// cursor is how far a watch has come, for the end of the recording.
type cursor struct {
	mu       sync.Mutex
	version  uint64
	resource string
	selector string
	open     bool
}

// behind tells whether an open watch has yet to show the final object.
func (c *cursor) behind(final map[string]uint64) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.open && (c.selector == "" || c.selector == "set=a") && c.version < final[c.resource]
}

// watch opens watches until `ctx` ends. A reflector continues each watch where the last one ended, and lists when its
// version has expired. Others begin a new watch in a random form.
func (h *historyClient) watch(ctx, stopping context.Context, reflector bool, position *cursor) {
	var version string
	resource := historyResources[h.pick(len(historyResources))]
	for stopping.Err() == nil {
		form := record{"bookmarks": h.pick(3) > 0, "timeoutSeconds": 30 + h.pick(60)}
		format, life := "json", time.Duration(0)
		if reflector {
			if version == "" {
				list := h.call("GET", collection(resource)+"?resourceVersion=0", "", "", record{"verb": "list", "resource": resource, "form": record{"resourceVersion": "0"}})
				metadata, _ := list["metadata"].(map[string]interface{})
				if version, _ = metadata["resourceVersion"].(string); version == "" {
					time.Sleep(200 * time.Millisecond)
					continue
				}
			}
			form["resourceVersion"] = version
		} else {
			resource = historyResources[h.pick(len(historyResources))]
			life = time.Duration(2+h.pick(15)) * time.Second
			switch turn := h.pick(4); {
			case turn == 0 || turn == 1 && !*watchList:
				form["resourceVersion"] = "0"
				form["bookmarks"] = form["bookmarks"].(bool) && *watchList
			case turn == 1:
				form["sendInitialEvents"], form["bookmarks"], form["match"] = true, true, "NotOlderThan"
				if h.pick(2) == 0 {
					form["resourceVersion"] = "0"
				}
			default:
				if form["resourceVersion"] = h.newest(resource); form["resourceVersion"] == "0" {
					delete(form, "resourceVersion")
					form["bookmarks"] = form["bookmarks"].(bool) && *watchList
				}
			}
			switch h.pick(6) {
			case 0:
				form["selector"] = "set=a"
			case 1:
				form["selector"] = "set=b"
			case 2:
				form["selector"] = fmt.Sprintf("metadata.name=k%d", h.pick(historyKeys))
			}
		}
		if resource != "things" && h.pick(3) == 0 {
			format = "protobuf"
		}
		last, err := h.watchOnce(ctx, stopping, resource, format, form, life, position)
		if last != "" {
			version = last
		}
		if errors.Is(err, errExpired) {
			version = ""
		}
		if err != nil {
			time.Sleep(100 * time.Millisecond)
		}
	}
}

// watchOnce records one watch, and returns its last version.
func (h *historyClient) watchOnce(ctx, stopping context.Context, resource, format string, form record, life time.Duration, position *cursor) (string, error) {
	living, cancel := context.WithCancel(ctx)
	defer cancel()
	cancelled := false
	if life > 0 {
		// At the end of the recording, open watches stay, so that they show all events.
		timer := time.AfterFunc(life, func() {
			if stopping.Err() == nil {
				position.mu.Lock()
				cancelled = true
				position.mu.Unlock()
				cancel()
			}
		})
		defer timer.Stop()
	}
	form["watch"] = true
	accept := "application/json"
	if format == "protobuf" {
		accept = "application/vnd.kubernetes.protobuf;stream=watch"
	}
	op, id := h.invoke(record{"verb": "watch", "resource": resource, "form": form, "format": format})
	request, err := h.request(living, "GET", collection(resource)+query(form), accept, "", id)
	if err != nil {
		return "", err
	}
	how := func() string {
		position.mu.Lock()
		defer position.mu.Unlock()
		if cancelled {
			return "cancelled"
		} else if ctx.Err() != nil {
			return "stopped"
		}
		return ""
	}
	response, err := h.http.Do(request)
	if err != nil {
		if how() == "" {
			h.reply(op, record{"code": 0, "error": err.Error()})
		}
		return "", err
	}
	defer response.Body.Close()
	answer := record{"code": response.StatusCode}
	if response.StatusCode != 200 {
		data, _ := io.ReadAll(io.LimitReader(response.Body, 4096))
		object, _ := decode(data)
		describe(answer, response, object, data)
		h.reply(op, answer)
		if response.StatusCode == http.StatusGone {
			return "", errExpired
		}
		return "", errRefused
	}
	h.reply(op, answer)
	position.mu.Lock()
	position.resource, position.open, position.version = resource, true, 0
	position.selector, _ = form["selector"].(string)
	position.mu.Unlock()
	last := ""
	reader := bufio.NewReaderSize(response.Body, 64<<10)
	for {
		var line record
		if format == "protobuf" {
			line, err = protobufRecord(reader)
		} else {
			line, err = jsonRecord(reader)
		}
		if err != nil {
			break
		}
		line["kind"], line["client"], line["op"], line["at"] = "event", h.name, op, now()
		h.out.write(line)
		if line["type"] == "ERROR" {
			if line["code"] == 410 {
				err = errExpired
			} else {
				err = errRefused
			}
			break
		}
		version, _ := line["version"].(uint64)
		last = strconv.FormatUint(version, 10)
		h.saw(resource, version)
		position.mu.Lock()
		if version > position.version {
			position.version = version
		}
		position.mu.Unlock()
	}
	position.mu.Lock()
	position.open = false
	position.mu.Unlock()
	end := record{"kind": "end", "client": h.name, "op": op, "at": now(), "how": how()}
	if end["how"] == "" {
		if end["how"] = "clean"; err != io.EOF {
			end["how"], end["error"] = "broken", err.Error()
		}
	}
	h.out.write(end)
	if err == io.EOF {
		err = nil
	}
	return last, err
}

func jsonRecord(reader *bufio.Reader) (record, error) {
	text, err := reader.ReadBytes('\n')
	if err == io.EOF && len(bytes.TrimSpace(text)) > 0 {
		return nil, io.ErrUnexpectedEOF
	} else if err != nil {
		return nil, err
	}
	event, err := decode(text)
	if err != nil {
		return nil, fmt.Errorf("a frame that is not JSON: %v", err)
	}
	object, _ := event["object"].(map[string]interface{})
	if event["type"] == "ERROR" {
		code, _ := strconv.Atoi(fmt.Sprint(object["code"]))
		return record{"type": "ERROR", "code": code, "message": object["message"]}, nil
	}
	metadata, _ := object["metadata"].(map[string]interface{})
	annotations, _ := metadata["annotations"].(map[string]interface{})
	one := objectItem(object)
	if event["type"] == "BOOKMARK" {
		return record{"type": "BOOKMARK", "version": one.Version, "initial_end": annotations["k8s.io/initial-events-end"] == "true"}, nil
	}
	return record{"type": event["type"], "key": one.Key, "version": one.Version, "uid": one.UID, "value": one.Value, "hash": one.Hash}, nil
}

func protobufRecord(reader *bufio.Reader) (record, error) {
	var length [4]byte
	if _, err := io.ReadFull(reader, length[:]); err != nil {
		return nil, err
	}
	data := make([]byte, binary.BigEndian.Uint32(length[:]))
	if _, err := io.ReadFull(reader, data); err != nil {
		return nil, io.ErrUnexpectedEOF
	}
	event, err := fields(data)
	if err != nil {
		return nil, err
	}
	extension, err := fields(first(event, 2))
	if err != nil {
		return nil, err
	}
	raw := first(extension, 1)
	if len(raw) < 4 || string(raw[:4]) != "k8s\x00" {
		return nil, errors.New("an object without the k8s prefix")
	}
	unknown, err := fields(raw[4:])
	if err != nil {
		return nil, err
	}
	object, err := fields(first(unknown, 2))
	if err != nil {
		return nil, err
	}
	kind := string(first(event, 1))
	if kind == "ERROR" {
		line := record{"type": kind, "message": string(first(object, 3))}
		for _, f := range object {
			if f.number == 6 {
				line["code"] = int(f.varint)
			}
		}
		return line, nil
	}
	metadata, err := fields(first(object, 1))
	if err != nil {
		return nil, err
	}
	version, _ := strconv.ParseUint(string(first(metadata, 6)), 10, 64)
	annotations := map[string]string{}
	for _, f := range metadata {
		if f.number == 12 {
			entry, err := fields(f.bytes)
			if err != nil {
				return nil, err
			}
			annotations[string(first(entry, 1))] = string(first(entry, 2))
		}
	}
	if kind == "BOOKMARK" {
		return record{"type": kind, "version": version, "initial_end": annotations["k8s.io/initial-events-end"] == "true"}, nil
	}
	return record{"type": kind, "key": string(first(metadata, 1)), "version": version, "uid": string(first(metadata, 5)), "value": annotations[valueKey]}, nil
}

// ---- the recording ---------------------------------------------------------------------------------

func runHistory() error {
	file, err := os.Create(*historyFile)
	if err != nil {
		return err
	}
	out := &recorder{file: file, out: bufio.NewWriter(file)}
	connect := func(name, token, base string, number int64) (*historyClient, error) {
		c, err := newClient(base)
		if err != nil {
			return nil, err
		}
		c.token = token
		return &historyClient{client: c, name: name, out: out, random: rand.New(rand.NewSource(*seed*1000 + number)), seen: map[string]uint64{}, known: map[string]item{}}, nil
	}
	identity := *certFile
	*certFile = ""
	watched, err := connect("reference", *reference, *direct, 0)
	if err != nil {
		return err
	}
	watched.bypasses = true
	var clients []*historyClient
	for i, one := range strings.Split(*historyIDs, ",") {
		name, token, _ := strings.Cut(one, "=")
		if *certFile = ""; token == "" {
			*certFile = identity
		}
		c, err := connect(name, token, *server, int64(i+1))
		if err != nil {
			return err
		}
		clients = append(clients, c)
	}
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	stopping, stopSoon := context.WithTimeout(ctx, *duration)
	defer stopSoon()
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	go func() { <-signals; stopSoon() }()

	var positions []*cursor
	var workers, watchers sync.WaitGroup
	watch := func(c *historyClient, reflector bool) {
		position := &cursor{}
		positions = append(positions, position)
		watchers.Add(1)
		go func() { defer watchers.Done(); c.watch(ctx, stopping, reflector, position) }()
	}
	for _, resource := range historyResources {
		resource, position := resource, &cursor{}
		positions = append(positions, position)
		list := watched.call("GET", collection(resource), "", "", record{"verb": "list", "resource": resource})
		metadata, _ := list["metadata"].(map[string]interface{})
		version := fmt.Sprint(metadata["resourceVersion"])
		watchers.Add(1)
		go func() {
			defer watchers.Done()
			for ctx.Err() == nil {
				last, err := watched.watchOnce(ctx, stopping, resource, "json", record{"resourceVersion": version}, 0, position)
				if last != "" {
					version = last
				}
				if errors.Is(err, errExpired) {
					version = "0"
				}
				time.Sleep(100 * time.Millisecond)
			}
		}()
	}
	for _, c := range clients {
		c := c
		watch(c, true)
		watch(c, false)
		watch(c, false)
		workers.Add(1)
		go func() {
			defer workers.Done()
			for stopping.Err() == nil {
				c.act()
				time.Sleep(time.Duration(c.pick(2*int(interval.Milliseconds())+1)) * time.Millisecond)
			}
		}()
	}
	fmt.Println("ready")
	workers.Wait()
	final := map[string]uint64{}
	for _, resource := range historyResources {
		body, value := watched.manifest(resource, "final", "")
		body = strings.Replace(body, `"set":"b"`, `"set":"a"`, 1)
		for tries := 0; tries < 20 && final[resource] == 0; tries++ {
			object := watched.call("POST", collection(resource), body, "", record{"verb": "create", "resource": resource, "key": "final", "value": value})
			if metadata, ok := object["metadata"].(map[string]interface{}); ok {
				final[resource], _ = strconv.ParseUint(fmt.Sprint(metadata["resourceVersion"]), 10, 64)
				out.write(record{"kind": "final", "resource": resource, "version": final[resource], "at": now()})
			} else {
				time.Sleep(500 * time.Millisecond)
			}
		}
	}
	time.Sleep(2 * time.Second) // for watches whose selectors do not match the final objects
	for limit := time.Now().Add(*settle); time.Now().Before(limit); time.Sleep(50 * time.Millisecond) {
		behind := false
		for _, position := range positions {
			behind = behind || position.behind(final)
		}
		if !behind {
			break
		}
	}
	stop()
	watchers.Wait()
	return out.close()
}
