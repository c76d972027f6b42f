"""Let samples be trees: an agent that calls a sub-agent, asks a question again, shortens its history and goes back.

It asks for one turn after the other, so that a deterministic run gives the same trees each time.
"""

import os
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from megarl.types import Prompt

# Names a file to which the agent adds a byte as it begins a branch.
NOTES = "REWRITING_NOTES"
MAX_TOKENS = 20


def rewriting_settings() -> tuple[str, ...]:
    """Settings of a run whose samples all are trees."""
    entry = f"{{type: agent, arguments: {{agent: {Path(__file__).resolve()}:rewrite}}}}"
    return (
        f"environment.entries={{tree: {entry}}}",
        "environment.default=tree",
        f"environment.pass_env=[{NOTES}]",
        "environment.max_tokens=512",
        "rollout.max_response_tokens=160",
    )


async def rewrite(prompt: Prompt, base_url: str, api_key: str) -> dict[str, Any]:
    """Ask twice in a chat, a sub-agent, the second question again, one after a shorter history, and back again."""
    question: list[Any] = [message.as_dict() for message in prompt.messages]
    texts = []
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:

        async def ask(*messages: Any, begins: bool) -> Any:
            if begins:
                with Path(os.environ[NOTES]).open("ab") as file:
                    file.write(b"(")
            completion = await client.chat.completions.create(
                model="any", messages=list(messages), max_tokens=MAX_TOKENS
            )
            texts.append(completion.choices[0].message.content)
            return completion.choices[0].message

        first = await ask(*question, begins=False)
        chat = [*question, first, {"role": "user", "content": "And then?"}]
        await ask(*chat, begins=False)
        await ask({"role": "user", "content": "You are a helper."}, begins=True)
        second = await ask(*chat, begins=True)
        summary = {"role": "assistant", "content": "In short: no."}
        await ask(*question, summary, {"role": "user", "content": "And then?"}, begins=True)
        await ask(*chat, second, {"role": "user", "content": "Done?"}, begins=True)
    return {"reward": float(len(texts[-1] or "") % 3), "texts": texts}


def num_branches(notes: Path) -> int:
    """Count the branches that were begun."""
    return notes.stat().st_size if notes.exists() else 0
