#!/usr/bin/env python3
"""Issues the serving certificate of each recipe in the documentation, and checks what it may be used for.

The cluster's CA signs them. kube-apiserver accepts a certificate of that CA as the user in its subject unless its
extended key usages exclude clientAuth (ExtKeyUsageClientAuth in apiserver/pkg/authentication/request/x509).
Fails if a page issues a certificate that is also one of a client or a CA, or if no page issues one.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from recipes import blocks

ROOT = Path(__file__).resolve().parents[2]
CA_DIRECTORY = "/etc/kubernetes/pki/"


def commands(text):
    """The commands of a block: lines with those that continue them."""
    found, command = [], ""
    for line in text.splitlines():
        command += line + "\n"
        if not line.endswith("\\"):
            found.append(command)
            command = ""
    return found


def issuing(text):
    """The commands of a block from the request of a certificate to its signature; empty if it signs none."""
    found = commands(text)
    signs = [at for at, command in enumerate(found) if command.startswith("openssl x509 -req")]
    requests = [at for at, command in enumerate(found) if command.startswith("openssl req ")]
    return found[requests[0] : signs[-1] + 1] if signs and requests else []


def openssl(*arguments, cwd):
    return subprocess.run(["openssl", *arguments], cwd=cwd, capture_output=True, text=True, check=False)


def problems(script):
    """Why the certificate that a script issues as tls.crt is not one of a server alone."""
    with tempfile.TemporaryDirectory() as directory:
        openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=kubernetes",
                "-days", "365", "-keyout", "ca.key", "-out", "ca.crt", cwd=directory)
        run = subprocess.run(["bash", "-euo", "pipefail", "-c", script.replace(CA_DIRECTORY, "")],
                             cwd=directory, capture_output=True, text=True, check=False)
        if run.returncode:
            return [f"it fails: {run.stderr.strip()}"]
        found = []
        for purpose, expected in [("sslserver", True), ("sslclient", False)]:
            verified = openssl("verify", "-purpose", purpose, "-CAfile", "ca.crt", "tls.crt", cwd=directory)
            if (verified.returncode == 0) != expected:
                found.append(f"openssl verify -purpose {purpose}: {(verified.stdout + verified.stderr).strip()}")
        shown = openssl("x509", "-in", "tls.crt", "-noout", "-ext", "basicConstraints,keyUsage,extendedKeyUsage",
                        cwd=directory).stdout
        lines = [line.strip() for line in shown.splitlines()]
        for wanted in ["CA:FALSE", "Digital Signature", "TLS Web Server Authentication"]:
            if wanted not in lines:
                found.append(f"it has not exactly {wanted!r}: {lines}")
        return found


def main():
    failed, count = False, 0
    for page in sorted(ROOT.glob("**/*.md")):
        if "target" in page.relative_to(ROOT).parts:
            continue
        for block in blocks(page):
            script = "".join(issuing(block.text)) if block.language == "sh" else ""
            if not script:
                continue
            count += 1
            for problem in problems(script):
                print(f"{page.relative_to(ROOT)}:{block.line}: {problem}")
                failed = True
    print(f"{count} serving certificates issued")
    return failed or count == 0


if __name__ == "__main__":
    sys.exit(main())
