"""Settings of an apiserver beyond those of the rig, which tests choose."""

import json
from dataclasses import dataclass
from typing import Optional

HEALTH = ("/livez", "/readyz", "/healthz")


@dataclass(frozen=True)
class Settings:
    features: tuple = ()  # feature gates that are switched on
    event_ttl: Optional[int] = None  # seconds after which an Event is deleted
    goaway_chance: float = 0  # the share of requests with a GOAWAY; at most 0.02
    shutdown_delay: Optional[int] = None  # seconds from SIGTERM to the last accepted connection, while /readyz fails
    watch_termination: Optional[int] = None  # seconds for which a shutdown ends watches one after another
    request_timeout: Optional[int] = None  # seconds after which a request is answered with 504; 8 in the rig, 60 by default
    serving_cert: Optional[tuple] = None  # certificate and key
    external_hostname: Optional[str] = None  # what /api advertises, in place of the address
    anonymous_paths: Optional[tuple] = None  # structured authentication: no other path is served without a credential

    def flags(self, authentication):
        """The flags; `authentication` is the file to write for structured authentication."""
        flags = []
        if self.features:
            flags.append("--feature-gates=" + ",".join(f"{gate}=true" for gate in self.features))
        if self.event_ttl:
            flags.append(f"--event-ttl={self.event_ttl}s")
        if self.goaway_chance:
            flags.append(f"--goaway-chance={self.goaway_chance}")
        if self.shutdown_delay is not None:
            flags.append(f"--shutdown-delay-duration={self.shutdown_delay}s")
        if self.watch_termination is not None:
            flags.append(f"--shutdown-watch-termination-grace-period={self.watch_termination}s")
        if self.request_timeout is not None:
            flags.append(f"--request-timeout={self.request_timeout}s")
        if self.serving_cert:
            flags += [f"--tls-cert-file={self.serving_cert[0]}", f"--tls-private-key-file={self.serving_cert[1]}"]
        if self.external_hostname:
            flags.append(f"--external-hostname={self.external_hostname}")
        if self.anonymous_paths is not None:
            authentication.write_text(json.dumps({
                "apiVersion": "apiserver.config.k8s.io/v1", "kind": "AuthenticationConfiguration",
                "anonymous": {"enabled": True, "conditions": [{"path": path} for path in self.anonymous_paths]}}))
            flags.append(f"--authentication-config={authentication}")
        return flags


def client_features(*gates):
    """The environment that switches on feature gates of a client on client-go."""
    return {f"KUBE_FEATURE_{gate}": "true" for gate in gates}
