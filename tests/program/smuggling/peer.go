// A reverse proxy of Go's standard library: HTTP/2 and HTTP/1.1 over TLS to HTTP/1.1. kube-apiserver reads requests
// with the same code.
package main

import (
	"log"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
)

func main() {
	listen, upstream, certificate, key := os.Args[1], os.Args[2], os.Args[3], os.Args[4]
	proxy := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: upstream})
	log.Fatal(http.ListenAndServeTLS(listen, certificate, key, proxy))
}
