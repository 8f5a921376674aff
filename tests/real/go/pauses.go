package main

import (
	"sync"
	"time"
)

// pauses measures how long this process did not run, because it was stopped or the machine was busy. That time is not
// the server's, so latencies do not include it.
var pauses = newPauseClock()

const (
	tick = 10 * time.Millisecond
	// Timers are late by up to this much without a pause.
	tolerance = 40 * time.Millisecond
)

// pauseClock adds up how late a periodic timer fires.
type pauseClock struct {
	mu       sync.Mutex
	lastTick time.Time
	paused   time.Duration
}

func newPauseClock() *pauseClock {
	c := &pauseClock{lastTick: time.Now()}
	go func() {
		for {
			time.Sleep(tick)
			c.mu.Lock()
			c.paused, c.lastTick = c.current(), time.Now()
			c.mu.Unlock()
		}
	}()
	return c
}

// current includes a pause that has just ended, even if the timer's goroutine has not run yet.
func (c *pauseClock) current() time.Duration {
	if late := time.Since(c.lastTick) - tick; late > tolerance {
		return c.paused + late
	}
	return c.paused
}

// total is the time since the start of the process during which it did not run.
func (c *pauseClock) total() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.current()
}
