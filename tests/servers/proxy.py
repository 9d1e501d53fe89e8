"""A proxy in front of an HTTP server that counts requests and, on demand, does what networks do to some of them."""

import http.client
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import urlsplit

Fault = Literal["reset", "lost answer", "hang", "slow", "500", "503"]
"""reset: the connection breaks in the middle of the body. lost answer: the server does it, and nobody is told."""

HANG_S = 2.0


@dataclass(frozen=True)
class Request:
    """What was asked for."""

    method: str
    path: str
    query: str
    status: int | None


class Proxy:
    """A running proxy.

    Attributes:
        url: Where it listens.
        requests: Those that have been answered by the server, or were hit by a fault (status None).
        fault: Asked for each request; None lets it pass.
    """

    def __init__(self, upstream: str) -> None:
        self.requests: list[Request] = []
        self.fault: Callable[[str, str], Fault | None] = lambda method, path: None
        self._upstream = urlsplit(upstream)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def counts(self) -> dict[str, int]:
        """Requests by method, listings apart."""
        found: dict[str, int] = {}
        for request in self.requests:
            kind = "LIST" if "list-type" in request.query else request.method
            found[kind] = found.get(kind, 0) + 1
        return found

    @contextmanager
    def running(self) -> Iterator["Proxy"]:
        """Serve within the block."""
        thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def handle_any(self) -> None:
                path, _, query = self.path.partition("?")
                fault = proxy.fault(self.command, path)
                length = int(self.headers.get("Content-Length") or 0)
                if fault == "reset":
                    self.rfile.read(length // 2)
                    proxy.requests.append(Request(self.command, path, query, None))
                    self._reset()
                    return
                body = self.rfile.read(length)
                if fault in ("500", "503"):
                    code = "InternalError" if fault == "500" else "SlowDown"
                    answer = f"<Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
                    proxy.requests.append(Request(self.command, path, query, int(fault)))
                    self._answer(int(fault), [("Content-Type", "application/xml")], answer)
                    return
                if fault == "hang":
                    proxy.requests.append(Request(self.command, path, query, None))
                    time.sleep(HANG_S)
                    self._reset()
                    return
                if fault == "slow":
                    time.sleep(0.3)
                status, headers, answer = self._forward(body)
                proxy.requests.append(Request(self.command, path, query, status))
                if fault == "lost answer":
                    self._reset()
                    return
                self._answer(status, headers, answer)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any

            def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
                host, port = proxy._upstream.hostname or "", proxy._upstream.port
                connection = http.client.HTTPConnection(host, port, timeout=60)
                try:
                    headers = {k: v for k, v in self.headers.items() if k.lower() not in ("expect", "connection")}
                    connection.request(self.command, self.path, body, headers)
                    answer = connection.getresponse()
                    return answer.status, answer.getheaders(), answer.read()
                finally:
                    connection.close()

            def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
                self.send_response_only(status)
                hop = ("connection", "transfer-encoding", "content-length", "keep-alive")
                for name, value in headers:
                    if name.lower() not in hop or (self.command == "HEAD" and name.lower() == "content-length"):
                        self.send_header(name, value)
                if self.command != "HEAD":
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def _reset(self) -> None:
                self.close_connection = True
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()

            def log_message(self, *arguments: Any) -> None:
                pass

            def handle(self) -> None:
                with suppress(OSError):
                    super().handle()

            def finish(self) -> None:
                with suppress(OSError, ValueError):
                    super().finish()

        return Handler
