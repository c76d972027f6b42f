"""A reward service that misbehaves as told, on a real socket in threads of this process."""

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

# Gives the status and the body of an answer to a request.
Behaviour = Callable[[dict[str, Any]], tuple[int, bytes]]


def reply(status: int = 200, **fields: Any) -> tuple[int, bytes]:
    return status, json.dumps(fields).encode()


def lengths(body: dict[str, Any]) -> tuple[int, bytes]:
    """Rewards each query by the length of its label."""
    return reply(rewards=[float(len(label)) for label in body["labels"]])


class RewardServer:
    """`requests` are the bodies of what was asked. `behaviour` may be changed at any time."""

    def __init__(self, behaviour: Behaviour = lengths, *, delay_s: float = 0.0, byte_s: float = 0.0) -> None:
        """Waits `delay_s` before an answer, and `byte_s` before each of its bytes."""
        self.behaviour, self.delay_s, self.byte_s = behaviour, delay_s, byte_s
        self.requests: list[dict[str, Any]] = []
        # The answer to a GET.
        self.listing: dict[str, Any] = {}
        self.arrived = threading.Event()
        self._stopped = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.handle(self)

            def do_GET(self) -> None:
                content = json.dumps(outer.listing).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/get_reward"

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["content-length"])))
        self.requests.append(body)
        self.arrived.set()
        self._stopped.wait(self.delay_s)
        if self._stopped.is_set():
            handler.connection.close()
            return
        status, content = self.behaviour(body)
        try:
            handler.send_response(status)
            handler.send_header("content-type", "application/json")
            handler.send_header("content-length", str(len(content)))
            handler.end_headers()
            for i in range(len(content)) if self.byte_s else ():
                time.sleep(self.byte_s)
                handler.wfile.write(content[i : i + 1])
            if not self.byte_s:
                handler.wfile.write(content)
        except OSError:
            return  # who asked has gone

    def kill(self) -> None:
        """No more connections; those that are open are cut."""
        self._stopped.set()
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._stopped.is_set():
            self.kill()
        self._thread.join()
