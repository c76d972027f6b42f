"""Conversations of a policy that writes turns in channels, as gpt-oss does: tools, and agents of three APIs."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import anthropic
import openai
import pytest

from megarl.types import Prompt
from tests.helpers.agent_talk import Talk, converse
from tests.helpers.harmony import ADD, HEAD, make_harmony_tokenizer

TOKENIZER = make_harmony_tokenizer()
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
NEXT = "<|start|>assistant"
CALL = (
    f"<|channel|>analysis<|message|>A sum.<|end|>{NEXT}<|channel|>commentary<|message|>Let me see.<|end|>{NEXT}"
    '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "b": 2}<|call|>'
)
RESULT = '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"3"<|end|>'
ANSWER = f"<|channel|>analysis<|message|>Easy.<|end|>{NEXT}<|channel|>final<|message|>It is 3."
NAMESPACE = (
    "# Tools\n\n## functions\n\nnamespace functions {\n\n"
    "// Add.\ntype add = (_: {\na: number,\nb: number,\n}) => any;\n\n} // namespace functions<|end|>"
)
ASKED = f"<|start|>user<|message|>1+2?<|end|>{NEXT}"
# What the policy reads and writes: by hand, from the template.
SAID = f"{CALL}{RESULT}{NEXT}{ANSWER}<|return|><|start|>user<|message|>Sure?<|end|>{NEXT}"
READ = (
    f"{HEAD}{ADD}<|end|><|start|>developer<|message|># Instructions\n\nBe brief.\n\n{NAMESPACE}{ASKED}{SAID}"
    "<|channel|>final<|message|>Yes<|return|>"
)


def by_chat(base_url: str, api_key: str) -> list[Any]:
    with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as there:
        chat: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+2?"}]
        function = {"name": "add", "description": "Add.", "parameters": SCHEMA}
        seen = []
        for _ in range(3):
            choice = there.chat.completions.create(
                model="any",
                messages=chat,
                tools=[{"type": "function", "function": function}],  # type: ignore[list-item]
            ).choices[0]
            said: Any = choice.message
            seen.append([(said.model_extra or {}).get("reasoning"), said.content, choice.finish_reason])
            chat.append({key: value for key, value in said.model_dump().items() if key != "reasoning"})
            if said.tool_calls:
                (call,) = said.tool_calls
                assert json.loads(call.function.arguments) == {"a": 1, "b": 2}
                chat.append({"role": "tool", "tool_call_id": call.id, "content": "3"})
            else:
                chat.append({"role": "user", "content": "Sure?"})
        return seen


def by_messages(base_url: str, api_key: str) -> list[Any]:
    url = base_url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=url, api_key=api_key, max_retries=0) as there:
        chat: list[Any] = [{"role": "user", "content": "1+2?"}]
        tools: Any = [{"name": "add", "description": "Add.", "input_schema": SCHEMA}]
        seen = []
        for _ in range(3):
            said = there.messages.create(model="any", max_tokens=900, messages=chat, tools=tools, system="Be brief.")
            kinds: dict[str, Any] = {block.type: block for block in said.content}
            thought, text = kinds.get("thinking"), kinds.get("text")
            reason = {"tool_use": "tool_calls", "end_turn": "stop"}[str(said.stop_reason)]
            seen.append([thought and thought.thinking, text and text.text, reason])
            chat.append({"role": "assistant", "content": said.content})
            if call := kinds.get("tool_use"):
                assert call.input == {"a": 1, "b": 2}
                back: Any = [{"type": "tool_result", "tool_use_id": call.id, "content": "3"}]
            else:
                back = "Sure?"
            chat.append({"role": "user", "content": back})
        return seen


def by_responses(base_url: str, api_key: str) -> list[Any]:
    with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as there:
        chat: list[Any] = [{"role": "user", "content": "1+2?"}]
        tools: Any = [{"type": "function", "name": "add", "description": "Add.", "parameters": SCHEMA}]
        seen = []
        for _ in range(3):
            said = there.responses.create(model="any", input=chat, tools=tools, instructions="Be brief.")
            kinds: dict[str, Any] = {item.type: item for item in said.output}
            thought, call = kinds.get("reasoning"), kinds.get("function_call")
            seen.append([thought and thought.content[0].text, said.output_text, "tool_calls" if call else "stop"])
            chat += [item.model_dump(exclude_none=True) for item in said.output]
            if call:
                assert json.loads(call.arguments) == {"a": 1, "b": 2}
                chat.append({"type": "function_call_output", "call_id": call.call_id, "output": "3"})
            else:
                chat.append({"role": "user", "content": "Sure?"})
        return seen


def talk_of(kind: str, arguments: dict[str, Any], *turns: str, **limits: Any) -> Talk:
    return asyncio.run(converse(arguments, *turns, kind=kind, tokenizer=TOKENIZER, **limits))


@pytest.mark.parametrize("ask", [by_chat, by_messages, by_responses])
def test_clients_get_thoughts_texts_and_calls_and_the_policy_its_own_tokens(ask: Callable[..., list[Any]]) -> None:
    def agent(prompt: Prompt, base_url: str, api_key: str) -> dict[str, Any]:
        return {"seen": ask(base_url, api_key)}

    talk = talk_of("agent", {"agent": agent, "parser": "harmony"}, CALL, ANSWER, "<|channel|>final<|message|>Yes")
    assert talk.last.failure == "", talk.last
    assert TOKENIZER.decode(talk.tokens) == READ
    assert not any(reply.is_context for reply in talk.replies)
    assert talk.last.details["seen"] == [
        ["A sum.", "Let me see.", "tool_calls"],
        ["Easy.", "It is 3.", "stop"],
        [None, "Yes", "stop"],
    ]


def test_a_call_that_cannot_be_read_is_shown_and_a_rewritten_chat_has_calls_as_the_template_writes_them() -> None:
    def agent(prompt: Prompt, base_url: str, api_key: str) -> dict[str, Any]:
        with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as there:
            rest: Any = {
                "model": "any",
                "tools": [
                    {"type": "function", "function": {"name": "add"} | {"description": "Add.", "parameters": SCHEMA}}
                ],
            }
            chat: list[Any] = [{"role": "user", "content": "1+2?"}]
            broken = there.chat.completions.create(messages=chat, **rest).choices[0].message
            said: Any = there.chat.completions.create(messages=chat, **rest).choices[0].message
            chat += [said, {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "3"}]
            there.chat.completions.create(messages=[{"role": "system", "content": "Be."}, *chat], **rest)
        return {"broken": broken.content}

    cut = '<|channel|>commentary to=functions.add<|message|>{"a": 1<|call|>'
    talk = talk_of("agent", {"agent": agent, "parser": "harmony"}, cut, CALL, ANSWER)
    assert talk.last.failure == "", talk.last
    assert talk.last.details["broken"] == '{"a": 1'
    # Words before a call have no field of their own.
    shown = (
        f"<|channel|>analysis<|message|>A sum.\nLet me see.<|end|>{NEXT} to=functions.add<|channel|>commentary json"
        f'<|message|>{{"a": 1, "b": 2}}<|call|>{RESULT}{NEXT}'
    )
    assert talk.replies[2].is_context
    assert str(TOKENIZER.decode(talk.replies[2].token_ids)).endswith(f"Be.\n\n{NAMESPACE}{ASKED}{shown}")


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: A number.
        b: Another one.
    """
    return a + b


def test_tools_are_called_and_a_history_that_is_rendered_keeps_thoughts_up_to_the_answer() -> None:
    plain = f"<|channel|>analysis<|message|>A sum.<|end|>{NEXT} to=functions.add<|channel|>commentary json<|message|>"
    plain += '{"a": 1, "b": 2}<|call|>'
    for history, call, is_anew in (("written", CALL, False), ("rendered", plain, False), ("rendered", CALL, True)):
        talk = talk_of("tools", {"tools": [add], "parser": "harmony"}, call, ANSWER, history=history)
        assert [reply.num_calls for reply in talk.replies] == [0, 1, 0], talk.last
        assert talk.last.done
        assert talk.replies[1].is_context is is_anew
        assert str(TOKENIZER.decode(talk.tokens)).endswith(f"<|call|>{RESULT}{NEXT}{ANSWER}<|return|>")
