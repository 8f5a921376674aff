package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"
)

// With -cached-reads, each client reads one object and its list in turn, from any cache, and counts the reads that show
// an older version than an earlier read of the same client.
var cachedReads = flag.String("cached-reads", "", "read this ConfigMap and its list with resourceVersion=0 instead, as each of -clients")

type staleReport struct {
	Reads  int `json:"reads"`
	Back   int `json:"back"`
	Failed int `json:"failed"`
	// The largest difference, in revisions; the slowest read; the first read that went back, and the first failure.
	Furthest     uint64  `json:"furthest"`
	SlowestMs    float64 `json:"slowest_ms"`
	FirstBack    string  `json:"first_back"`
	FirstFailure string  `json:"first_failure"`
}

func runCachedReads() error {
	var report staleReport
	var mu sync.Mutex
	var readers sync.WaitGroup
	ctx, stop := context.WithTimeout(context.Background(), *duration)
	defer stop()
	path := collection("configmaps")
	for _, one := range strings.Split(*historyIDs, ",") {
		name, token, _ := strings.Cut(one, "=")
		c, err := newClient(*server)
		if err != nil {
			return err
		}
		c.token = token
		readers.Add(1)
		go func() {
			defer readers.Done()
			var list, object uint64 // the newest versions that this client has seen
			repeat(ctx, *interval, 0, func(turn int) {
				one := path + "/" + *cachedReads + "?resourceVersion=0"
				if turn%2 == 0 {
					one = path + "?resourceVersion=0"
				}
				ctx, cancel := requestContext()
				defer cancel()
				answer := c.do(ctx, "GET", one, "")
				mu.Lock()
				defer mu.Unlock()
				report.Reads++
				if ms := float64(answer.took().Microseconds()) / 1000; ms > report.SlowestMs {
					report.SlowestMs = ms
				}
				var body struct {
					Metadata meta
					Items    []struct{ Metadata meta }
				}
				if !answer.ok() || json.Unmarshal(answer.body, &body) != nil {
					if report.Failed++; report.FirstFailure == "" {
						report.FirstFailure = fmt.Sprintf("%s %s: %d %v %.300s", name, one, answer.code, answer.err, answer.body)
					}
					return
				}
				back := uint64(0)
				see := func(newest *uint64, text string) {
					version, _ := strconv.ParseUint(text, 10, 64)
					if version < *newest && *newest-version > back {
						back = *newest - version
					} else if version > *newest {
						*newest = version
					}
				}
				if turn%2 == 0 {
					see(&list, body.Metadata.ResourceVersion)
					for _, i := range body.Items {
						if i.Metadata.Name == *cachedReads {
							see(&object, i.Metadata.ResourceVersion)
						}
					}
				} else {
					see(&object, body.Metadata.ResourceVersion)
				}
				if back > 0 {
					if report.Back++; report.FirstBack == "" {
						report.FirstBack = fmt.Sprintf("%s %s at %s: %d revisions", name, one, time.Now().Format("15:04:05.000"), back)
					}
					if back > report.Furthest {
						report.Furthest = back
					}
				}
			})
		}()
	}
	fmt.Println("ready")
	readers.Wait()
	text, err := json.Marshal(report)
	fmt.Println(string(text))
	return err
}
