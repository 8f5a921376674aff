package main

import (
	"sync"
	"time"
)

// What the machine takes away from all of this process at once, by stopping it or by running
// something else, is no delay of the server's: it is measured here and left out of latencies.
var clock = newStandstill()

const (
	tick  = 10 * time.Millisecond
	usual = 40 * time.Millisecond // so late is any timer now and then
)

// standstill looks every tick whether the process still runs.
type standstill struct {
	mu    sync.Mutex
	at    time.Time
	stood time.Duration
}

func newStandstill() *standstill {
	s := &standstill{at: time.Now()}
	go func() {
		for {
			time.Sleep(tick)
			s.mu.Lock()
			s.stood, s.at = s.now(), time.Now()
			s.mu.Unlock()
		}
	}()
	return s
}

// now is with what has just ended, even if the goroutine above has not had its turn.
func (s *standstill) now() time.Duration {
	if late := time.Since(s.at) - tick; late > usual {
		return s.stood + late
	}
	return s.stood
}

// soFar is for how long the process has stood still since its start.
func (s *standstill) soFar() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.now()
}
