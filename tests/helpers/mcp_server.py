"""An MCP server for tests: on its standard streams, or with a port as argument by HTTP."""

import asyncio
import os
import signal
import sys

from mcp.server.mcpserver import MCPServer
from mcp_types import CallToolResult, EmbeddedResource, ImageContent, ResourceLink, TextContent, TextResourceContents

server = MCPServer("tests", log_level="CRITICAL")
notes: list[str] = []


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def note(text: str) -> str:
    """Keep a note, and say all notes of this process."""
    notes.append(text)
    return " ".join(notes)


@server.tool()
async def doze(seconds: float) -> str:
    """Sleep."""
    await asyncio.sleep(seconds)
    return "awake"


@server.tool()
def whoami() -> str:
    """Say the process and the variables NAME and KEY."""
    return f"{os.getpid()} {os.environ.get('NAME')} {os.environ.get('KEY')}"


@server.tool()
def freeze() -> str:
    """Stop, and answer nothing any more."""
    os.kill(os.getpid(), signal.SIGSTOP)
    return "awake"


@server.tool()
def chatter(count: int) -> str:
    """Return so many MiB."""
    return "x" * (count << 20)


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(1)


@server.tool()
def parts(kind: str) -> CallToolResult:
    """Return what is not text alone."""
    image = ImageContent(type="image", data="AAAA", mime_type="image/png")
    file = EmbeddedResource(
        type="resource", resource=TextResourceContents(uri="file:///a.txt", mime_type="text/plain", text="inside")
    )
    link = ResourceLink(type="resource_link", name="b", uri="file:///b.bin", mime_type="application/x-b")
    limited = {"code": "RATE_LIMITED", "retry_after": 30}
    results = {
        "contents": CallToolResult(content=[TextContent(type="text", text="see"), file, link, image]),
        "structured": CallToolResult(content=[], structured_content=limited),
        "failed": CallToolResult(content=[], structured_content=limited, is_error=True),
        "shown": CallToolResult(content=[image], structured_content=limited),
        "empty": CallToolResult(content=[]),
    }
    return results[kind]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run()
