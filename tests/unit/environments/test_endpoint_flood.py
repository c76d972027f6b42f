"""The chats' endpoint goes on while another process holds as many of its connections as it can."""

import subprocess
import sys
from typing import Any

import httpx
import psutil

from tests.helpers.http_flood import flood

# Answers the turns of two chats, with 512 descriptors.
SERVER = """
import asyncio, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))
from megarl.environments.base import Action
from megarl.environments.endpoint import Chat, chat_server

async def lead(chat):
    turn = 0
    while True:
        await chat.next_questions()
        chat.answer([Action(text="yes", turn=turn)])
        turn += 1

async def main():
    chats = [Chat(None), Chat(None)]
    print(*map(chat_server().open, chats), flush=True)
    await asyncio.gather(*map(lead, chats))

asyncio.run(main())
"""


def test_agents_go_on_beside_500_idle_connections_and_40_bodies_that_do_not_end() -> None:
    """Also those that were connected before; the bodies come from an agent, who has a key."""
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            mine, theirs = (f"{url}/chat/completions" for url in server.stdout.readline().split())
            process, messages = psutil.Process(server.pid), list[Any]()

            def ask(client: httpx.Client) -> None:
                messages.append({"role": "user", "content": "go on?"})
                answer = client.post(mine, json={"messages": messages}).raise_for_status()
                messages.append(answer.json()["choices"][0]["message"])

            with httpx.Client(timeout=60.0, trust_env=False, limits=httpx.Limits(keepalive_expiry=None)) as connected:
                ask(connected)
                before = process.memory_info().rss
                with flood(theirs):
                    ask(connected)
                    for _ in range(3):
                        with httpx.Client(timeout=60.0, trust_env=False) as new:
                            ask(new)
                    assert process.memory_info().rss - before <= 32 << 20
                    assert process.num_fds() < 512
            assert [message["content"] for message in messages[1::2]] == ["yes"] * 5
        finally:
            server.kill()
