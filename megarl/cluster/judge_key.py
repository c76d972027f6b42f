"""Require the run's key in every request to a judge's server.

With VLLM_API_KEY alone, vLLM asks below /v1 and a few other paths, but /invocations generates too, and /pause, /sleep
or /metrics need no key either. vLLM loads this class by its name, so nothing heavy is imported here.
"""

import hmac
import os

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

KEY_VARIABLE = "VLLM_API_KEY"


class RequireKey:
    """An ASGI middleware that answers 401 to requests without the key, whatever their path."""

    def __init__(self, app: ASGIApp) -> None:
        self._app, self._expected = app, f"Bearer {os.environ[KEY_VARIABLE]}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] in ("http", "websocket"):
            if not hmac.compare_digest(given, self._expected):
                await JSONResponse({"error": "the run's key is missing"}, status_code=401)(scope, receive, send)
                return
            # As `http_server.trust` does.
            scope["state"]["connection"].trust()
        await self._app(scope, receive, send)
