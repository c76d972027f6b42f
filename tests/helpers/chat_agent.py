"""An agent for whole runs with a model of random weights: it asks for four turns, and returns what it read."""

import asyncio
from typing import Any

from openai import AsyncOpenAI

from megarl.types import Prompt

NUM_TURNS = 4
MAX_TOKENS = 40
# The second turn ends at the first of these letters, of which random turns have one in a while.
STOPS = [*"abcdefghijklmnop"]


async def ask_often(prompt: Prompt, base_url: str, api_key: str) -> dict[str, Any]:
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, *(m.as_dict() for m in prompt.messages)]
    texts = []
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for i in range(NUM_TURNS):
            rest: dict[str, Any] = {"max_tokens": MAX_TOKENS} | ({"stop": STOPS} if i == 1 else {})
            completion = await client.chat.completions.create(model="any", messages=messages, **rest)
            answer = completion.choices[0].message
            texts.append(answer.content)
            messages += [answer, {"role": "user", "content": f"And then, {i}?"}]
    return {"reward": float(len(texts[-1] or "") % 3), "texts": texts}


async def rewrite(prompt: Prompt, base_url: str, api_key: str) -> dict[str, Any]:
    """Ask twice in a chat, once in one of two sub-agents each, again in the first, in a shorter one, and once more.

    Then ask for two answers at once, and go on from the first of them.
    """
    question: list[Any] = [m.as_dict() for m in prompt.messages]
    texts = []
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:

        async def ask(*messages: Any) -> Any:
            completion = await client.chat.completions.create(
                model="any", messages=list(messages), max_tokens=MAX_TOKENS // 2
            )
            texts.append(completion.choices[0].message.content)
            return completion.choices[0].message

        first = await ask(*question)
        chat = [*question, first, {"role": "user", "content": "And then?"}]
        await ask(*chat)
        helpers = ({"role": "user", "content": f"You are helper {i}."} for i in range(2))
        await asyncio.gather(*map(ask, helpers))
        second = await ask(*chat)
        await ask(
            *question, {"role": "assistant", "content": "In short: no."}, {"role": "user", "content": "And then?"}
        )
        chat += [second, {"role": "user", "content": "Done?"}]
        chat += [await ask(*chat), {"role": "user", "content": "Try."}]
        tries = await client.chat.completions.create(model="any", messages=chat, max_tokens=MAX_TOKENS // 2, n=2)
        await ask(*chat, tries.choices[0].message, {"role": "user", "content": "Go on."})
    return {"reward": 1.0, "rewards": {tries.id: [0.25, 0.5]}, "texts": texts}
