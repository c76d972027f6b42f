"""Real SDKs, the newest of each and one of a year before, lead 200 random conversations in each dialect.

The tokens of every branch are those of a rendering by hand, and only text that a client changed is rendered again.
"""

import asyncio
import itertools
import json
import random
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megarl.types import Prompt
from tests.helpers.agent_talk import TOKENIZER, Talk, converse
from tests.helpers.own_venv import python_with

SDKS = {
    "newest": ("openai==3.57.0", "anthropic==2.14.0", "openai-agents==0.24.0"),
    "2025-11": ("openai==2.8.1", "anthropic==0.75.0", "openai-agents==0.6.1"),
}
CLIENT = Path(__file__).parents[2] / "helpers" / "sdk_client.py"
NUM_CONVERSATIONS = 200
WORDS = ("So", "be it", "ä 🙂", "1+2?", "no\n", "\tthen", '"a"', "<b>", "%d")


@dataclass
class Expected:
    """A conversation as a test plans it. turns: what the policy writes. branches: what it then has read and written."""

    plan: dict[str, Any]
    turns: list[str] = field(default_factory=list)
    branches: list[str] = field(default_factory=list)


def message(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def drawn(way: str, rng: random.Random) -> Expected:
    """Draw a conversation, and render it by hand."""

    def words() -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(1, 4)))

    system, tools = rng.choice(["", "Be brief.", "Be\n\nexact. "]), rng.random() < 0.6
    # The Responses API has no stop sequences.
    stops = way in ("chat", "messages") and rng.random() < 0.3
    plan: dict[str, Any] = {"way": way, "system": system, "tools": tools, "stop": ["STOP", "\nEND"] if stops else []}
    plan |= {name: rng.random() < 0.5 for name in ("streams", "reverses", "by_id", "forgets")}
    plan |= {
        "user": [words() for _ in range(rng.randint(1, 4))],
        "changed": words() + "!" if rng.random() < 0.3 else "",
    }
    expected = Expected(plan)
    head = message("tools", "add") if tools else ""
    head += message("system", system) if system else ""
    # As the policy reads it where it wrote it, and where a client's change lets it be rendered: a client may strip what
    # is not more than text.
    written, rendered = "", ""
    for text in plan["user"]:
        written, rendered = written + message("user", text), rendered + message("user", text)
        num_called = rng.randint(0, 2) if tools else 0
        for i in range(num_called + 1):
            # Each turn has a text of its own, by which it is known where the client changed what is before.
            thought, said = (
                f"<think>{words()}</think>\n" if rng.random() < 0.4 else "",
                f"{words()} {len(expected.turns)}",
            )
            sums = [(rng.randint(0, 9), rng.randint(0, 9)) for _ in range(rng.randint(1, 2))] if i < num_called else []
            calls = [{"name": "add", "arguments": {"a": a, "b": b}} for a, b in sums]
            turn = thought + said + "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)
            ends_so = stops and not sums and rng.random() < 0.5
            turn += rng.choice(plan["stop"]) if ends_so else ""
            expected.turns.append(turn)
            kept = turn if sums or ends_so or (thought and way != "chat") else turn.strip()
            results = "".join(message("tool", str(a + b)) for a, b in sums)
            written += message("assistant", turn) + results
            # The template leaves earlier thoughts out.
            rendered += message("assistant", kept.split("</think>")[-1]) + results
    # The text after the mark is not part of a turn.
    expected.branches.append((head + written).removesuffix("\n"))
    if plan["changed"]:
        changed = rendered.replace(message("user", plan["user"][0]), message("user", plan["changed"]), 1)
        expected.turns.append("Anew.")
        whole = head + changed + message("user", "Again.") + message("assistant", "Anew.")
        expected.branches.append(whole.removesuffix("\n"))
    return expected


def branches_of(talk: Talk, turns: list[str]) -> list[str]:
    """Return what the policy has read and written on each branch, the first first."""
    found: list[str] = []
    for reply, turn in zip(talk.replies, turns, strict=False):
        read = str(TOKENIZER.decode(reply.token_ids))
        if reply.is_context or not found:
            found.append("")
        found[-1] += f"{read}{turn}<|im_end|>"
    return found


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", ["chat", "messages", "responses", "agents"])
@pytest.mark.parametrize("age", SDKS)
def test_200_conversations_are_read_as_they_are_rendered_by_hand(age: str, way: str) -> None:
    command = [str(python_with(f"sdks-{age}", *SDKS[age])), str(CLIENT)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        stdin, stdout = client.stdin, client.stdout

        def agent(prompt: Prompt, base_url: str, api_key: str) -> float:
            stdin.write(json.dumps({**expected.plan, "url": base_url}) + "\n")
            stdin.flush()
            assert json.loads(stdout.readline() or "null") == {"ended": base_url}
            return 1.0

        async def talk_all() -> None:
            nonlocal expected
            for seed in range(NUM_CONVERSATIONS):
                expected = drawn(way, random.Random(f"{way} {seed}"))
                talk = await converse({"agent": agent}, *expected.turns, reply_timeout_s=100.0, max_turns=50)
                assert (talk.last.done, talk.last.failure) == (True, ""), (seed, talk.last, expected.plan)
                for got, hand in itertools.zip_longest(branches_of(talk, expected.turns), expected.branches):
                    assert got == hand, (seed, expected.plan)
                num_branches = sum(
                    int(str(count)) for name, count in talk.last.details.items() if name.startswith("branches_")
                )
                assert num_branches == bool(expected.plan["changed"]), (seed, talk.last.details)

        expected = drawn(way, random.Random(0))
        asyncio.run(talk_all())
        stdin.close()
