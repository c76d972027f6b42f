"""Play a task of verifiers as an agent; run by a Python that has verifiers and not megarl.

verifiers' own harness asks for turns and calls the tool `multiply`, which verifiers' own server runs. When the harness
has an answer, its user asks twice whether it is sure. With an argument, the number of tokens from which on to do so,
verifiers' chat program compacts its context.
"""

import asyncio
import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.harnesses.null import harness

MAX_TOKENS = 40


class Multiplier(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    def multiply(self, a: int, b: int) -> str:
        """Multiply two numbers."""
        return str(a * b)


class ProductData(vf.TaskData):
    answer: str


class Product(vf.Task[ProductData]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Multiplier(vf.ToolsetConfig())]

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in (trace.last_reply or ""))


def compact_at(num_tokens: str) -> None:
    """Let the harness without a shell of its own compact contexts, as the one that gives the policy a shell does."""
    launch = harness.launch_chat_program

    async def launch_compacting(*arguments: Any, extra_args: Sequence[str] = (), **named: Any) -> Any:
        asked = [*extra_args, "--compaction", f"--summarize-at-tokens={num_tokens}"]
        return await launch(*arguments, extra_args=asked, **named)

    harness.launch_chat_program = launch_compacting


async def main(*summarize_at_tokens: str) -> None:
    for each in summarize_at_tokens:
        compact_at(each)
    row = json.load(sys.stdin)
    config = vf.AgentConfig(
        model="policy",
        harness={"id": "null"},
        runtime={"type": "subprocess"},
        sampling={"max_tokens": row["extra_info"].get("max_tokens", MAX_TOKENS)},
        client={"type": "eval", "base_url": os.environ["OPENAI_BASE_URL"], "api_key_var": "OPENAI_API_KEY"},
    )
    task = Product(ProductData(prompt=row["messages"][-1]["content"], answer=row["ground_truth"]))
    async with vf.make_agent(config) as agent, agent.interaction(task) as talk:
        texts = [(await talk.turn()).last_reply]
        texts += [(await talk.turn(f"Are you sure, {i}?")).last_reply for i in range(2)]
    errors = [str(error) for error in talk.trace.errors]
    print(json.dumps({"reward": talk.trace.reward, "texts": texts, "errors": errors}))


if __name__ == "__main__":
    if "VF_CONFIG" in os.environ:
        Multiplier.run()
    else:
        # verifiers starts the tool's server by the name of its module, which must not be __main__.
        os.environ["PYTHONPATH"] = str(Path(__file__).parent)
        asyncio.run(importlib.import_module(Path(__file__).stem).main(*sys.argv[1:]))
