"""Lead conversations by an SDK, as plans tell; run by a Python that has the SDKs and not megarl.

Each line that it reads is a plan with the URL of an endpoint; it prints a line when a conversation has ended. A plan
has the texts of the user, and what else the requests say; calls of tools in the answers are made here.
"""

import asyncio
import json
import sys
from typing import Any

KEY, MODEL = "any", "policy"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}


def total(arguments: Any) -> str:
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    return str(given["a"] + given["b"])


def ordered(plan: dict[str, Any], results: list[Any]) -> list[Any]:
    """Results of parallel calls, in another order where the plan says so."""
    return results[::-1] if plan["reverses"] else results


async def by_chat(plan: dict[str, Any]) -> None:
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=plan["url"], api_key=KEY, max_retries=0) as client:
        # Older clients stream no answers with other tools.
        function = {"name": "add", "description": "Add.", "parameters": SCHEMA, "strict": True}
        rest: dict[str, Any] = {"model": MODEL, "max_tokens": 900, **({"stop": plan["stop"]} if plan["stop"] else {})}
        rest |= {"tools": [{"type": "function", "function": function}]} if plan["tools"] else {}
        messages: list[Any] = [{"role": "developer", "content": plan["system"]}] if plan["system"] else []

        async def ask() -> Any:
            if not plan["streams"]:
                return (await client.chat.completions.create(messages=messages, **rest)).choices[0].message
            async with client.chat.completions.stream(messages=messages, **rest) as events:
                async for _ in events:
                    pass
                return (await events.get_final_completion()).choices[0].message

        for text in plan["user"]:
            messages.append({"role": "user", "content": text})
            while True:
                message = await ask()
                messages.append(message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
                if not message.tool_calls:
                    break
                results = [
                    {"role": "tool", "tool_call_id": call.id, "content": total(call.function.arguments)}
                    for call in message.tool_calls
                ]
                messages += ordered(plan, results)
        if plan["changed"]:
            first = next(message for message in messages if message["role"] == "user")
            first["content"] = plan["changed"]
            messages.append({"role": "user", "content": "Again."})
            await ask()


async def by_messages(plan: dict[str, Any]) -> None:
    from anthropic import AsyncAnthropic

    async with AsyncAnthropic(base_url=plan["url"].removesuffix("/v1"), api_key=KEY, max_retries=0) as client:
        rest: dict[str, Any] = {"model": MODEL, "max_tokens": 900}
        rest |= {"stop_sequences": plan["stop"]} if plan["stop"] else {}
        rest |= {"tools": [{"name": "add", "description": "Add.", "input_schema": SCHEMA}]} if plan["tools"] else {}
        if plan["system"]:
            rest["system"] = [{"type": "text", "text": plan["system"], "cache_control": {"type": "ephemeral"}}]
        messages: list[Any] = []

        async def ask() -> Any:
            if not plan["streams"]:
                return await client.messages.create(messages=messages, **rest)
            async with client.messages.stream(messages=messages, **rest) as events:
                return await events.get_final_message()

        for text in plan["user"]:
            messages.append({"role": "user", "content": text})
            while True:
                message = await ask()
                # Thoughts may be left out later.
                kept = [each for each in message.content if not (plan["forgets"] and each.type == "thinking")]
                messages.append({"role": "assistant", "content": kept})
                calls = [each for each in message.content if each.type == "tool_use"]
                if not calls:
                    break
                results = [
                    {"type": "tool_result", "tool_use_id": call.id, "content": total(call.input)} for call in calls
                ]
                messages.append({"role": "user", "content": ordered(plan, results)})
        if plan["changed"]:
            messages[0] = {"role": "user", "content": plan["changed"]}
            messages.append({"role": "user", "content": "Again."})
            await ask()


async def by_responses(plan: dict[str, Any]) -> None:
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=plan["url"], api_key=KEY, max_retries=0) as client:
        rest: dict[str, Any] = {"model": MODEL, "max_output_tokens": 900}
        function = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}
        rest |= {"tools": [function]} if plan["tools"] else {}
        rest |= {"instructions": plan["system"]} if plan["system"] else {}
        said: list[Any] = []
        before: str | None = None

        async def ask(new: list[Any]) -> Any:
            nonlocal before
            said.extend(new)
            given = {"input": new, "previous_response_id": before} if plan["by_id"] and before else {"input": said}
            if plan["streams"]:
                async with client.responses.stream(**given, **rest) as events:
                    found = await events.get_final_response()
            else:
                found = await client.responses.create(**given, **rest)
            items = [item.model_dump(exclude_none=True) for item in found.output]
            said.extend(item for item in items if not (plan["forgets"] and item["type"] == "reasoning"))
            before = found.id
            return found

        for text in plan["user"]:
            new: list[Any] = [{"role": "user", "content": text}]
            while new:
                calls = [item for item in (await ask(new)).output if item.type == "function_call"]
                results = [
                    {"type": "function_call_output", "call_id": call.call_id, "output": total(call.arguments)}
                    for call in calls
                ]
                new = ordered(plan, results)
        if plan["changed"]:
            said[0], before = {"role": "user", "content": plan["changed"]}, None
            await ask([{"role": "user", "content": "Again."}])


async def by_agents(plan: dict[str, Any]) -> None:
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)

    @agents.function_tool
    def add(a: int, b: int) -> str:
        return str(a + b)

    async with AsyncOpenAI(base_url=plan["url"], api_key=KEY, max_retries=0) as client:
        agent = agents.Agent(
            name="adder",
            instructions=plan["system"] or None,
            model=agents.OpenAIResponsesModel(model=MODEL, openai_client=client),
            tools=[add] if plan["tools"] else [],
        )
        said: list[Any] = []
        for text in plan["user"]:
            said.append({"role": "user", "content": text})
            if plan["streams"]:
                result: Any = agents.Runner.run_streamed(agent, said)
                async for _ in result.stream_events():
                    pass
            else:
                result = await agents.Runner.run(agent, said)
            said = result.to_input_list()
        if plan["changed"]:
            said[0] = {"role": "user", "content": plan["changed"]}
            await agents.Runner.run(agent, [*said, {"role": "user", "content": "Again."}])


async def main() -> None:
    ways = {"chat": by_chat, "messages": by_messages, "responses": by_responses, "agents": by_agents}
    while line := await asyncio.to_thread(sys.stdin.readline):
        plan = json.loads(line)
        await ways[plan["way"]](plan)
        print(json.dumps({"ended": plan["url"]}), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
