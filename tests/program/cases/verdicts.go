// Prints whether Go accepts the chains in a directory, one line each: "ok" or the error. kubectl and kubelet verify a
// server like this (crypto/tls, verifyServerCertificate), kube-apiserver a client
// (apiserver/pkg/authentication/request/x509, DefaultVerifyOptions).
//
// Arguments: the directory, the time in seconds since 1970, the number of chains. Chain N is in the files N.bundle and
// N.chain (PEM); N.server has the name of the server, and is empty for a client.
package main

import (
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

func read(dir string, number int, kind string) []byte {
	text, err := os.ReadFile(filepath.Join(dir, fmt.Sprintf("%d.%s", number, kind)))
	if err != nil {
		panic(err)
	}
	return text
}

func verify(dir string, number int, now time.Time) error {
	options := x509.VerifyOptions{
		Roots:         x509.NewCertPool(),
		Intermediates: x509.NewCertPool(),
		CurrentTime:   now,
		DNSName:       string(read(dir, number, "server")),
		KeyUsages:     []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	if options.DNSName == "" {
		options.KeyUsages = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	}
	options.Roots.AppendCertsFromPEM(read(dir, number, "bundle"))
	var leaf *x509.Certificate
	for rest := read(dir, number, "chain"); len(rest) > 0; {
		var block *pem.Block
		block, rest = pem.Decode(rest)
		certificate, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return err
		}
		if leaf == nil {
			leaf = certificate
		} else {
			options.Intermediates.AddCert(certificate)
		}
	}
	_, err := leaf.Verify(options)
	return err
}

func main() {
	seconds, _ := strconv.ParseInt(os.Args[2], 10, 64)
	count, _ := strconv.Atoi(os.Args[3])
	for number := 0; number < count; number++ {
		verdict := "ok"
		if err := verify(os.Args[1], number, time.Unix(seconds, 0)); err != nil {
			verdict = strings.ReplaceAll(err.Error(), "\n", " ")
		}
		fmt.Println(verdict)
	}
}
