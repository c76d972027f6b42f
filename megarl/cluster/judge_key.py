"""Ask every request to a judge's server for the key of the run.

With VLLM_API_KEY alone, vLLM asks below /v1 and a few other paths, but /invocations generates too, and /pause, /sleep
or /metrics need no key either. vLLM loads this class by its name, so nothing heavy is imported here.
"""

import hmac
import os
from typing import Any

from starlette.responses import JSONResponse

KEY_VARIABLE = "VLLM_API_KEY"


class RequireKey:
    """An ASGI middleware that answers 401 to requests without the key, whatever their path."""

    def __init__(self, app: Any) -> None:
        self._app, self._expected = app, f"Bearer {os.environ[KEY_VARIABLE]}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] in ("http", "websocket"):
            if not hmac.compare_digest(given, self._expected):
                await JSONResponse({"error": "the run's key is missing"}, status_code=401)(scope, receive, send)
                return
            # As `http_server.trust` does.
            scope["state"]["connection"].trust()
        await self._app(scope, receive, send)
