"""Real HTTP servers for actuators: one that speaks the scale subresource, and one that hears wishes."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit


@dataclass
class Heard:
    """A request."""

    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: bytes


Answering = Callable[[Heard], tuple[int, Any] | None]
"""Status and JSON; None: the connection is cut."""


@contextmanager
def serving(answer: Answering, certificate: tuple[Path, Path] | None = None) -> Iterator[str]:
    """Answers for the length of the block; its URL."""

    class Handler(BaseHTTPRequestHandler):
        def _handle(self) -> None:
            parts = urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            found = answer(Heard(self.command, parts.path, parse_qs(parts.query), headers, body))
            if found is None:
                self.close_connection = True
                return
            status, value = found
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PATCH = _handle

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    scheme = "http"
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        scheme = "https"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"{scheme}://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@dataclass
class ApiServer:
    """A Deployment and its pods, as an API server has them."""

    replicas: int = 3
    version: int = 7
    token: str = "a token"
    pods: dict[str, str] = field(default_factory=lambda: {"worker-abc-1": "10.0.0.1", "worker-abc-2": "10.0.0.2"})
    """Their addresses."""
    costs: dict[str, str] = field(default_factory=dict)
    heard: list[Heard] = field(default_factory=list)
    lose: int = 0
    """So many answers to changes get lost, after these were made."""
    meddle: Callable[[], None] = lambda: None
    """Called before each change of the scale."""

    SCALE = "/apis/apps/v1/namespaces/prod/deployments/workers/scale"
    PODS = "/api/v1/namespaces/prod/pods"

    def __call__(self, heard: Heard) -> tuple[int, Any] | None:
        self.heard.append(heard)
        if heard.headers.get("authorization") != f"Bearer {self.token}":
            return 401, {"kind": "Status", "message": "Unauthorized"}
        if heard.path == self.SCALE:
            return self._scale(heard)
        if heard.path == self.PODS:
            [selector] = heard.query["fieldSelector"]
            ip = selector.removeprefix("status.podIP=").removesuffix(",status.phase=Running")
            return 200, {"items": [{"metadata": {"name": name}} for name, one in self.pods.items() if one == ip]}
        pod = heard.path.removeprefix(f"{self.PODS}/")
        if pod in self.pods and heard.method == "PATCH":
            [self.costs[pod]] = json.loads(heard.body)["metadata"]["annotations"].values()
            return 200, {"metadata": {"name": pod}}
        return 404, {"kind": "Status", "message": "not found"}

    def _scale(self, heard: Heard) -> tuple[int, Any] | None:
        if heard.method == "PATCH":
            assert heard.headers["content-type"] == "application/merge-patch+json"
            self.meddle()
            patch = json.loads(heard.body)
            if patch["metadata"]["resourceVersion"] != str(self.version):
                return 409, {"kind": "Status", "reason": "Conflict", "message": "the object has been modified"}
            self.replicas, self.version = patch["spec"]["replicas"], self.version + 1
            if self.lose:
                self.lose -= 1
                return None
        return 200, {
            "kind": "Scale",
            "apiVersion": "autoscaling/v1",
            "metadata": {"name": "workers", "namespace": "prod", "resourceVersion": str(self.version)},
            "spec": {"replicas": self.replicas},
            "status": {"replicas": self.replicas},
        }
