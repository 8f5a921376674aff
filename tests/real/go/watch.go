package main

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"sync"
	"time"
)

// watcher is a watch that continues as client-go's reflector does: after an end from its last version, after an
// expired version from a new list.
type watcher struct {
	client    *client
	id        int
	reference bool   // bypasses the server under test; its failures are not counted
	set       string // the set of events that it must receive
	path      string
	format    string // json, table, protobuf, cbor, or cbor-or-json
	bookmarks bool   // asked for
	cursor    string

	mu     sync.Mutex
	events []watchEvent
	// Clean ends at a frame boundary; errors and ends within a frame; watches that did not open; expired versions.
	ended, broken, refused, relists int
	bookmarksReceived               int
	listed                          uint64 // the version of the last list, which covers all earlier events
}

type watchEvent struct {
	version uint64
	kind    string
	name    string
	writer  string
	seq     string
	at      time.Time
}

// frame is an event, decoded from any format.
type frame struct {
	kind, name, version, writer, seq string
	code                             int
	message                          string
}

var errExpired = errors.New("resourceVersion expired")

func (w *watcher) accept() string {
	switch w.format {
	case "table":
		return "application/json;as=Table;v=v1;g=meta.k8s.io"
	case "protobuf":
		return "application/vnd.kubernetes.protobuf;stream=watch"
	case "cbor":
		return "application/cbor"
	case "cbor-or-json": // of client-go's dynamic client with ClientsAllowCBOR
		return "application/json;q=0.9,application/cbor;q=1"
	}
	return "application/json"
}

func (w *watcher) run(ctx context.Context, l *ledger, opened func()) {
	for ctx.Err() == nil {
		err := w.once(ctx, l, &opened)
		if ctx.Err() != nil {
			return
		}
		pause := 100 * time.Millisecond
		w.mu.Lock()
		switch {
		case err == nil:
			w.ended, pause = w.ended+1, 0
		case errors.Is(err, errExpired):
			w.relists++
		case errors.Is(err, errRefused):
			w.refused++
		default:
			w.broken++
		}
		w.mu.Unlock()
		if err != nil && !w.reference {
			l.watchFailed(w, err)
		}
		if errors.Is(err, errExpired) {
			w.relist(ctx)
		}
		time.Sleep(pause)
	}
}

var errRefused = errors.New("the watch did not open")

func (w *watcher) once(ctx context.Context, l *ledger, opened *func()) error {
	path := fmt.Sprintf("%s&watch=true&resourceVersion=%s&timeoutSeconds=%d", w.path, w.cursor, int(timeout.Seconds()))
	if w.bookmarks {
		path += "&allowWatchBookmarks=true"
	}
	request, err := w.client.request(ctx, "GET", path, w.accept(), "", uuid())
	if err != nil {
		return err
	}
	response, err := w.client.http.Do(request)
	if err != nil {
		return fmt.Errorf("%w: %v", errRefused, err)
	}
	defer response.Body.Close()
	if response.StatusCode != 200 {
		body, _ := io.ReadAll(io.LimitReader(response.Body, 4096))
		if response.StatusCode == 410 {
			return errExpired
		}
		return fmt.Errorf("%w: %d %s", errRefused, response.StatusCode, body)
	}
	if *opened != nil {
		(*opened)()
		*opened = nil
	}
	return w.follow(response.Body, response.Header.Get("Content-Type"))
}

// follow reads frames to the end of the watch; nil is a clean end.
func (w *watcher) follow(body io.Reader, contentType string) error {
	reader := bufio.NewReaderSize(body, 64<<10)
	for {
		var f frame
		var err error
		if w.format == "protobuf" {
			f, err = protobufFrame(reader)
		} else if strings.HasPrefix(contentType, "application/cbor") {
			f, err = cborFrame(reader)
		} else {
			f, err = jsonFrame(reader, w.format == "table")
		}
		if err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		if f.kind == "ERROR" {
			if f.code == 410 {
				return errExpired
			}
			return fmt.Errorf("error event: %d %s", f.code, f.message)
		}
		version, err := strconv.ParseUint(f.version, 10, 64)
		if err != nil {
			return fmt.Errorf("event %s without a version: %v", f.kind, err)
		}
		if f.kind == "BOOKMARK" {
			if !w.bookmarks {
				return errors.New("a bookmark that was not requested")
			}
			w.mu.Lock()
			w.bookmarksReceived++
			w.mu.Unlock()
		} else {
			w.mu.Lock()
			w.events = append(w.events, watchEvent{version, f.kind, f.name, f.writer, f.seq, time.Now()})
			w.mu.Unlock()
		}
		w.cursor = f.version
	}
}

func (w *watcher) relist(ctx context.Context) {
	a := w.client.do(ctx, "GET", w.path+"&limit=1", "")
	var list struct{ Metadata meta }
	if a.ok() && json.Unmarshal(a.body, &list) == nil {
		w.cursor = list.Metadata.ResourceVersion
		w.mu.Lock()
		w.listed, _ = strconv.ParseUint(w.cursor, 10, 64)
		w.mu.Unlock()
	}
}

func jsonFrame(reader *bufio.Reader, table bool) (frame, error) {
	line, err := reader.ReadBytes('\n')
	if err == io.EOF && len(strings.TrimSpace(string(line))) > 0 {
		return frame{}, io.ErrUnexpectedEOF
	} else if err != nil {
		return frame{}, err
	}
	var event struct {
		Type   string
		Object struct {
			Kind     string
			Metadata meta
			Data     map[string]string
			Code     int
			Message  string
			Rows     []struct{ Object struct{ Metadata meta } }
		}
	}
	if err := json.Unmarshal(line, &event); err != nil {
		return frame{}, fmt.Errorf("a frame that is not JSON: %v", err)
	}
	o := event.Object
	m := o.Metadata
	if table && event.Type != "ERROR" {
		if o.Kind != "Table" {
			return frame{}, fmt.Errorf("a %s in a table watch", o.Kind)
		}
		if len(o.Rows) > 0 {
			m = o.Rows[0].Object.Metadata
		}
	}
	return frame{event.Type, m.Name, m.ResourceVersion, o.Data["writer"], o.Data["seq"], o.Code, o.Message}, nil
}

func protobufFrame(reader *bufio.Reader) (frame, error) {
	var length [4]byte
	if _, err := io.ReadFull(reader, length[:]); err != nil {
		return frame{}, err // io.EOF at a frame boundary, io.ErrUnexpectedEOF within a frame
	}
	data := make([]byte, binary.BigEndian.Uint32(length[:]))
	if _, err := io.ReadFull(reader, data); err != nil {
		return frame{}, io.ErrUnexpectedEOF
	}
	event, err := fields(data)
	if err != nil {
		return frame{}, err
	}
	f := frame{kind: string(first(event, 1))}
	extension, err := fields(first(event, 2))
	if err != nil {
		return f, err
	}
	raw := first(extension, 1)
	if len(raw) < 4 || string(raw[:4]) != "k8s\x00" {
		return f, errors.New("an object without the k8s prefix")
	}
	unknown, err := fields(raw[4:])
	if err != nil {
		return f, err
	}
	object, err := fields(first(unknown, 2))
	if err != nil {
		return f, err
	}
	if f.kind == "ERROR" { // Status{2: status, 3: message, 4: reason, 6: code}
		f.message = string(first(object, 3))
		for _, field := range object {
			if field.number == 6 {
				f.code = int(field.varint)
			}
		}
		return f, nil
	}
	metadata, err := fields(first(object, 1))
	if err != nil {
		return f, err
	}
	f.name, f.version = string(first(metadata, 1)), string(first(metadata, 6))
	for _, field := range object { // ConfigMap{2: map data}
		if field.number != 2 {
			continue
		}
		entry, err := fields(field.bytes)
		if err != nil {
			return f, err
		}
		switch string(first(entry, 1)) {
		case "writer":
			f.writer = string(first(entry, 2))
		case "seq":
			f.seq = string(first(entry, 2))
		}
	}
	return f, nil
}

type field struct {
	number int
	bytes  []byte
	varint uint64
}

func first(list []field, number int) []byte {
	for _, f := range list {
		if f.number == number {
			return f.bytes
		}
	}
	return nil
}

func fields(data []byte) ([]field, error) {
	var list []field
	for len(data) > 0 {
		key, n := binary.Uvarint(data)
		if n <= 0 {
			return nil, errors.New("protobuf: bad key")
		}
		data = data[n:]
		f := field{number: int(key >> 3)}
		switch key & 7 {
		case 0:
			if f.varint, n = binary.Uvarint(data); n <= 0 {
				return nil, errors.New("protobuf: bad varint")
			}
			data = data[n:]
		case 2:
			size, n := binary.Uvarint(data)
			if n <= 0 || size > uint64(len(data)-n) {
				return nil, errors.New("protobuf: bad length")
			}
			f.bytes, data = data[n:n+int(size)], data[n+int(size):]
		default:
			return nil, fmt.Errorf("protobuf: wire type %d", key&7)
		}
		list = append(list, f)
	}
	return list, nil
}
