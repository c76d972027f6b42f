"""Real programs of coding agents, of the versions that the Makefile names: `make test-harnesses` installs them.

A test writes the policy's turns: calls of the program's own tools, and answers.
"""

import asyncio
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.agent_talk import Talk, converse

CHECK = "import sys; sys.exit(open('answer.txt').read().strip() != open('expected.txt').read())"
FILES = {"files": {"question.txt": "The number is 41.\n"}, "check_files": {"expected.txt": "41"}}


def call(name: str, arguments: dict[str, Any]) -> str:
    return f"I look.\n<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def solve(harness: str, *turns: str, **arguments: Any) -> Talk:
    entry = {"harness": harness, "check": [sys.executable, "-c", CHECK], **arguments}
    return asyncio.run(converse(entry, *turns, kind="harness", extra_info=FILES, reply_timeout_s=120.0))


SHELLS = {
    "claude-code": lambda command: call("Bash", {"command": command, "description": "Look"}),
    "codex": lambda command: call("exec_command", {"cmd": command}),
}


@pytest.mark.parametrize("harness", SHELLS)
@pytest.mark.parametrize(("number", "reward"), [("41", 1.0), ("42", 0.0)])
def test_an_agent_reads_and_writes_files_by_calls_of_the_policy(harness: str, number: str, reward: float) -> None:
    shell = SHELLS[harness]
    talk = solve(harness, shell("cat question.txt"), shell(f"echo {number} > answer.txt"), "Done.")
    assert (talk.last.done, talk.last.reward) == (True, reward), talk.last
    # One chat: what the policy wrote is never rendered again, nothing is refused, and no request is one of the side.
    assert not {name for name in talk.last.details if name.startswith(("branches", "refused"))}, talk.last.details
    assert [reply.num_calls for reply in talk.replies[1:]] == [1, 1, 0]
    assert all(reply.trains for reply in talk.replies)
    assert talk.text.count("The number is 41.") == 1


def test_sub_agents_of_claude_code_are_branches() -> None:
    task = {"description": "Look", "prompt": "What is the number?", "subagent_type": "general-purpose"}
    talk = solve(
        "claude-code", call("Agent", task), "It is 41.", SHELLS["claude-code"]("echo 41 > answer.txt"), "Done."
    )
    assert (talk.last.done, talk.last.reward) == (True, 1.0), talk.last
    assert talk.last.details["branches_other_beginning"] == 1


def test_a_harness_of_three_lines(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from dataclasses import replace\nfrom megarl.environments.harness import claude_code\n\n"
        "def few_tools(given):\n    return claude_code(replace(given, options=['--tools', 'Bash']))\n"
    )
    talk = solve(f"{mine}:few_tools", SHELLS["claude-code"]("echo 41 > answer.txt"), "Done.")
    assert (talk.last.done, talk.last.reward) == (True, 1.0), talk.last


@pytest.mark.parametrize("harness", SHELLS)
def test_in_bubblewrap_it_reaches_its_own_files_and_its_own_url_alone(harness: str) -> None:
    shell = SHELLS[harness]
    # Another sample's agent, with its URL among its variables and its words; and a service of the host.
    other = [sys.executable, "-c", "import time; time.sleep(1000)", "http://127.0.0.1/s/theirs"]
    with socket.create_server(("127.0.0.1", 0)) as service:
        look = (
            f"touch /var/tmp/mine; curl -s -m 5 http://127.0.0.1:{service.getsockname()[1]} || echo refused; "
            "cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline | tr '\\0' '\\n' | grep 127.0.0.1 | sort -u"
        )
        with subprocess.Popen(other, env={"OPENAI_BASE_URL": other[-1]}) as victim:
            talk = solve(harness, shell(look), shell("echo 41 > answer.txt"), "Done.", sandbox="bubblewrap")
            victim.kill()
    assert (talk.last.done, talk.last.reward) == (True, 1.0), talk.last
    assert "cannot touch '/var/tmp/mine'" in talk.text
    assert "refused" in talk.text.replace(look, "")
    assert "http://127.0.0.1:" in talk.text.replace(look, "")
    assert "theirs" not in talk.text
