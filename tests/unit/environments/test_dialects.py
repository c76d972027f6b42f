"""Clients of three APIs lead the same conversation: real SDKs, with the policy's turns written by the tests."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anthropic
import httpx
import openai
import pytest

from megarl.environments.chat_requests import MessageReader, Repeated, RequestError, Said
from megarl.types import Prompt
from tests.helpers.agent_talk import TOKENIZER, Talk, lead

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
CALLS = "".join(
    f'<tool_call>{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>' for a, b in ((1, 2), (3, 4))
)
THOUGHT = "<think>Two sums.</think>\n"
# What the policy reads and writes in all dialects, with a token for each byte: by hand, from the template.
READ = (
    "<|im_start|>tools\nadd<|im_end|>\n<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+2? 3+4?<|im_end|>\n"
    f"<|im_start|>assistant\n{THOUGHT}Let me see.{CALLS}<|im_end|>\n"
    "<|im_start|>tool\n3<|im_end|>\n<|im_start|>tool\n7<|im_end|>\n"
    "<|im_start|>assistant\n3 and 7<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\nYes<|im_end|>"
)


def claude(base_url: str, api_key: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key, max_retries=0)


def total(arguments: Mapping[str, int]) -> str:
    return str(arguments["a"] + arguments["b"])


def by_messages(*, stream: bool, keep_thoughts: bool) -> Callable[..., Mapping[str, Any]]:
    def agent(prompt: Prompt, base_url: str, api_key: str) -> dict[str, Any]:
        with claude(base_url, api_key) as there:
            tools: list[Any] = [{"name": "add", "description": "Add.", "input_schema": SCHEMA}]
            tools.append({"type": "web_search_20250305", "name": "web_search"})
            system: list[Any] = [
                {"type": "text", "text": "x-anthropic-billing-header: cch=1a2b3;"},
                {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
            ]
            rest: dict[str, Any] = {"model": "claude", "max_tokens": 900, "tools": tools, "system": system}

            def ask(messages: list[Any]) -> anthropic.types.Message:
                system[0]["text"] += "0"
                if stream:
                    with there.messages.stream(messages=messages, **rest) as events:
                        return events.get_final_message()
                return there.messages.create(messages=messages, **rest)

            messages: list[Any] = [{"role": "user", "content": "1+2? 3+4?"}]
            first = ask(messages)
            assert first.stop_reason == "tool_use"
            assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
            kept = [block for block in first.content if keep_thoughts or block.type != "thinking"]
            calls = [block for block in first.content if block.type == "tool_use"]
            # They come back in another order.
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": call.id,
                    "content": [{"type": "text", "text": total(call.input)}],
                }
                for call in reversed(calls)
            ]
            messages += [{"role": "assistant", "content": kept}, {"role": "user", "content": results}]
            second = ask(messages)
            messages += [{"role": "assistant", "content": second.content}, {"role": "user", "content": "Sure?"}]
            third = ask(messages)
            assert third.stop_reason == "end_turn"
            used = {"read": third.usage.input_tokens, "wrote": third.usage.output_tokens}
            return {"reward": 1.0, "rewards": {second.id: 0.5}, "thought": first.content[0].thinking, **used}

    return agent


def by_responses(*, stream: bool, by_id: bool) -> Callable[..., Mapping[str, Any]]:
    def agent(prompt: Prompt, base_url: str, api_key: str) -> dict[str, Any]:
        with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as there:
            tools: list[Any] = [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}]
            tools.append({"type": "web_search"})
            rest: dict[str, Any] = {"model": "gpt", "max_output_tokens": 900, "tools": tools}
            said: list[Any] = []
            before: str | None = None

            def ask(*new: Any) -> Any:
                nonlocal before
                said.extend(new)
                named = {"previous_response_id": before} if by_id and before else {}
                given = {"input": list(new) if by_id else said, "instructions": "Be brief.", **named, **rest}
                if stream:
                    with there.responses.stream(**given) as events:
                        found: Any = events.get_final_response()
                else:
                    found = there.responses.create(**given)
                said.extend(item.model_dump(exclude_none=True) for item in found.output)
                before = found.id
                return found

            first = ask({"role": "user", "content": [{"type": "input_text", "text": "1+2? 3+4?"}]})
            assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
            calls = [item for item in first.output if item.type == "function_call"]
            second = ask(
                *(
                    {
                        "type": "function_call_output",
                        "call_id": call.call_id,
                        "output": total(json.loads(call.arguments)),
                    }
                    for call in reversed(calls)
                )
            )
            assert second.output_text == "3 and 7"
            third = ask({"role": "user", "content": "Sure?"})
            assert (third.status, third.output_text) == ("completed", "Yes")
            used = {"read": third.usage.input_tokens, "wrote": third.usage.output_tokens}
            return {"reward": 1.0, "rewards": {second.id: 0.5}, "thought": first.output[0].content[0].text, **used}

    return agent


@pytest.mark.parametrize(
    "agent",
    [
        by_messages(stream=False, keep_thoughts=True),
        by_messages(stream=True, keep_thoughts=False),
        by_responses(stream=False, by_id=False),
        by_responses(stream=True, by_id=True),
    ],
    ids=["messages", "streamed messages without thoughts", "responses", "streamed responses by id"],
)
def test_each_dialect_leads_the_same_conversation(agent: Callable[..., Any]) -> None:
    talk = lead(agent, f"{THOUGHT}Let me see.{CALLS}", "3 and 7", "Yes")
    assert talk.last.failure == "", talk.last
    assert talk.text == READ
    assert not any(reply.is_context for reply in talk.replies)
    assert (talk.last.reward, talk.last.rewards) == (1.0, {1: 0.5})
    assert [reply.num_calls for reply in talk.replies] == [0, 2, 0, 0]
    read = len(talk.tokens) - len("Yes") - 1
    assert talk.last.details == {"thought": "Two sums.", "read": read, "wrote": len("Yes") + 1}


def post(base_url: str, path: str, body: object) -> httpx.Response:
    return httpx.post(f"{base_url}/{path}", json=body, headers={"anthropic-version": "2023-06-01"})


def test_tokens_are_counted_as_the_policy_reads_them() -> None:
    def agent(prompt: Prompt, base_url: str, api_key: str) -> dict[str, Any]:
        chat: Any = [{"role": "user", "content": "1+2?"}]
        tools: Any = [{"name": "add", "input_schema": SCHEMA}]
        with claude(base_url, api_key) as there:
            counted = there.messages.count_tokens(model="any", messages=chat, tools=tools).input_tokens
            asked = there.messages.create(model="any", max_tokens=9, messages=chat, tools=tools)
        with openai.OpenAI(base_url=base_url, api_key=api_key) as there:
            own = [{"type": "function", "name": "add", "parameters": SCHEMA}]
            also: Any = there.responses.input_tokens.count(input="1+2?", tools=own, model="any")  # type: ignore[arg-type]
        return {"counts": [counted, also.input_tokens, asked.usage.input_tokens]}

    talk = lead(agent, "3")
    assert talk.last.details["counts"] == [len(talk.replies[0].token_ids)] * 3


def test_a_tool_that_takes_any_text_gets_it_and_comes_back() -> None:
    def agent(prompt: Prompt, base_url: str, api_key: str) -> dict[str, Any]:
        with openai.OpenAI(base_url=base_url, api_key=api_key) as there:
            rest: Any = {"model": "any", "tools": [{"type": "custom", "name": "patch"}]}
            first = there.responses.create(input="Fix it.", **rest)
            (call,) = first.output
            back = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
            there.responses.create(input=[{"role": "user", "content": "Fix it."}, call.model_dump(), back], **rest)
        return {"type": call.type, "input": call.input}

    talk = lead(agent, '<tool_call>{"name": "patch", "arguments": {"input": "+ a"}}</tool_call>', "Fixed")
    assert talk.last.details == {"type": "custom_tool_call", "input": "+ a"}, talk.last
    assert not any(reply.is_context for reply in talk.replies)


def test_tools_of_a_namespace_have_its_name_before_theirs_and_calls_come_back_with_both() -> None:
    """As Codex sends tools of MCP servers; the policy reads and writes one name."""
    tool = {"type": "function", "name": "add", "parameters": SCHEMA}
    tools: Any = [{"type": "namespace", "name": "mcp__sums__", "tools": [tool]}, {**tool, "name": "plain"}]

    def agent(prompt: Prompt, base_url: str, api_key: str) -> dict[str, Any]:
        with openai.OpenAI(base_url=base_url, api_key=api_key) as there:
            first = there.responses.create(input="1+2?", model="any", tools=tools)
            (call,) = first.output
            back = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
            chat: Any = [{"role": "user", "content": "1+2?"}, call.model_dump(exclude_none=True), back]
            there.responses.create(input=chat, model="any", tools=tools)
        return {"call": [call.namespace, call.name]}

    call = CALLS[: CALLS.index("</tool_call>") + 12].replace("add", "mcp__sums__add")
    talk = lead(agent, call, "3")
    assert talk.last.details == {"call": ["mcp__sums__", "add"]}, talk.last
    assert talk.text.startswith("<|im_start|>tools\nmcp__sums__add plain<|im_end|>\n")
    assert not any(reply.is_context for reply in talk.replies)


def test_models_are_listed_telemetry_is_taken_and_a_doubled_v1_is_read() -> None:
    def agent(prompt: Prompt, base_url: str, api_key: str) -> dict[str, Any]:
        with openai.OpenAI(base_url=f"{base_url}/v1", api_key=api_key) as there:
            models = [each.id for each in there.models.list()]
            one = there.models.retrieve("gpt-9").id
            there.chat.completions.create(model=models[0], messages=[{"role": "user", "content": "1+2?"}])
        with claude(base_url, api_key) as other:
            models += [each.id for each in other.models.list()]
        root = base_url.removesuffix("/v1")
        codes = [httpx.head(root).status_code, post(root, "api/event_logging/batch", {}).status_code]
        return {"models": models, "one": one, "codes": codes}

    talk = lead(agent, "3")
    assert talk.last.details == {"models": ["policy", "policy"], "one": "gpt-9", "codes": [200, 204]}, talk.last


USER = [{"role": "user", "content": "1+2?"}]
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("completions", {"prompt": "1+2?"}, 404, "there is no POST /v1/completions here; there are POST /v1/chat/"),
        ("embeddings", {"input": "1+2?"}, 404, "and GET /v1/models"),
        ("messages/batches", {}, 404, "there is no POST /v1/messages/batches here"),
        ("messages", {"max_tokens": 9}, 400, "messages is missing"),
        ("messages", {"messages": [{"role": "user", "content": [IMAGE]}]}, 400, "got an image, expected text alone"),
        ("messages", {"messages": USER, "stop_sequences": ["END"] * 17}, 400, "stop has 17 texts, expected up to 16"),
        ("messages", {"messages": USER, "tools": [], "tool_choice": {"type": "any"}}, 400, "tool_choice is 'any'"),
        ("messages", {"messages": [*USER, {"role": "assistant", "content": "It is"}]}, 400, "is the assistant's"),
        ("messages", {"messages": USER, "output_config": {"format": {"type": "json_schema"}}}, 400, "response_format"),
        ("responses", {"input": "1+2?", "previous_response_id": "resp_0"}, 400, "expected a response of this"),
        ("responses", {"input": [{"type": "item_reference", "id": "a"}]}, 400, "input[0] is 'item_reference'"),
        ("responses", {"input": "1+2?", "background": True}, 400, "background is True"),
        ("responses", {"input": "1+2?", "text": {"format": {"type": "json_object"}}}, 400, "response_format"),
        ("responses", {}, 400, "input is None"),
        ("chat/completions", {"messages": USER, "stop": 3}, 400, "stop is 3, expected a text or a list of texts"),
    ],
)
def test_what_is_refused_says_why_in_the_form_of_its_dialect_and_is_counted(
    path: str, body: Mapping[str, Any], status: int, says: str
) -> None:
    def agent(prompt: Prompt, base_url: str, api_key: str) -> dict[str, Any]:
        refused = post(base_url, path, body)
        assert post(base_url, "chat/completions", {"messages": USER}).status_code == 200
        return {"status": refused.status_code, "said": refused.json()}

    talk = lead(agent, "3")
    details = dict(talk.last.details)
    assert details["refused_requests"] == 1
    assert details["status"] == status
    error: Any = details["said"]
    assert says in error["error"]["message"]
    assert (error.get("type") == "error") == path.startswith("messages")


def test_an_answer_ends_before_the_first_stop_text_and_the_policy_reads_all_that_it_wrote() -> None:
    """Its turn goes on to the end of that text, as engines stop there; a call that ends with it is one."""
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'

    def agent(prompt: Prompt, base_url: str, api_key: str) -> dict[str, Any]:
        chat: list[Any] = [{"role": "user", "content": "1+2?"}]
        seen: list[Any] = []
        with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as there:
            tools: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
            for stop in (["SO", "END"], "</tool_call>"):
                (first,) = there.chat.completions.create(model="any", messages=chat, tools=tools, stop=stop).choices
                seen.append([first.message.content, first.finish_reason])
                role = {"role": "tool", "tool_call_id": "call_1_0"} if first.message.tool_calls else {"role": "user"}
                chat += [first.message, {**role, "content": "Sure?"}]
        asked: list[Any] = [{"role": "user", "content": "1+2?"}]
        rest: dict[str, Any] = {"model": "any", "max_tokens": 9, "messages": asked, "stop_sequences": ["\n"]}
        with claude(base_url, api_key) as other:
            second = other.messages.create(**rest)
            asked += [{"role": "assistant", "content": second.content}, {"role": "user", "content": "Sure?"}]
            with other.messages.stream(**rest) as events:
                third = events.get_final_message()
        texts = [getattr(each.content[0], "text", "") for each in (second, third)]
        seen += [
            [text, each.stop_reason, each.stop_sequence] for text, each in zip(texts, (second, third), strict=True)
        ]
        return {"seen": seen}

    talk = lead(agent, "3 END", call, "Let me see.\n", "It is 3")
    assert talk.last.details["seen"] == [
        ["3 ", "stop"],
        [None, "tool_calls"],
        ["Let me see.", "stop_sequence", "\n"],
        ["It is 3", "end_turn", None],
    ]
    assert [reply.stop for reply in talk.replies[:-1]] == [("SO", "END"), ("</tool_call>",), ("\n",), ("\n",)]
    assert [reply.is_context for reply in talk.replies[1:-1]] == [False, True, False]
    assert "assistant\n3 END<|im_end|>\n" in talk.text
    assert "assistant\nLet me see.\n<|im_end|>\n<|im_start|>user\nSure?" in talk.text


@pytest.mark.parametrize(("given", "status"), [({}, 200), ({"store": True}, 200), ({"store": False}, 400)])
def test_a_response_that_is_not_stored_is_not_gone_on_from(given: Mapping[str, bool], status: int) -> None:
    def agent(prompt: Prompt, base_url: str, api_key: str) -> dict[str, int]:
        first = post(base_url, "responses", {"input": "1+2?", **given}).json()
        rest = {"input": "Sure?", "previous_response_id": first["id"]}
        return {"status": post(base_url, "responses", rest).status_code}

    assert lead(agent, "3", "Yes").last.details["status"] == status


@pytest.mark.parametrize(
    ("wrote", "sent", "changed"),
    [
        ('{"a": 1.0, "b": [2.50, -0.0]}', '{"b":[2.5,0],"a":1}', 0),
        ('{"a": 1, "b": 2}', '{"a":1,"b":2,"c":"a default"}', 1),
        ('{"a": 1, "b": 2}', '{"a":1}', 1),
        ('{"a": 1, "b": 2}', "{}", 1),
    ],
)
def test_calls_are_known_by_their_ids_whatever_a_client_makes_of_their_arguments(
    wrote: str, sent: str, changed: int
) -> None:
    call = f'<tool_call>{{"name": "add", "arguments": {wrote}}}</tool_call>'
    tools = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]

    def agent(prompt: Prompt, base_url: str, api_key: str) -> None:
        messages: list[Any] = [{"role": "user", "content": "1+2?"}]
        for said in ("3", "Sure?", "Really?"):
            body = {"messages": messages, "tools": tools}
            answer = post(base_url, "chat/completions", body).json()["choices"][0]["message"]
            for each in answer.get("tool_calls", ()):
                each["function"]["arguments"] = sent
            role = {"role": "tool", "tool_call_id": "call_0_0"} if said == "3" else {"role": "user"}
            messages += [answer, {**role, "content": said}]

    talk = lead(agent, call, "3", "Yes")
    assert talk.last.details == ({"changed_calls": changed} if changed else {})
    assert talk.text.count(call) == 1
    assert talk.text.count("<|im_start|>user") == 2


def requests(*bodies: Mapping[str, Any]) -> Callable[..., None]:
    def agent(prompt: Prompt, base_url: str, api_key: str) -> None:
        for body in bodies:
            assert post(base_url, "chat/completions", body).status_code == 200

    return agent


def said(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("second", "cause"),
    [
        ({"messages": said("a")}, "asked_again"),
        ({"messages": said("a", "3", "b"), "tools": [{"type": "function", "function": {"name": "t"}}]}, "other_tools"),
        ({"messages": said("a", "4", "b")}, "rewritten"),
        ({"messages": said("c")}, "other_beginning"),
    ],
)
def test_a_branch_says_why_it_is_one(second: Mapping[str, Any], cause: str) -> None:
    talk = lead(requests({"messages": said("a")}, second), "3", "4")
    assert talk.last.details == {f"branches_{cause}": 1}, talk.last


def trained(models: Sequence[str]) -> list[bool]:
    """Return whether the turn of each request for a model trains."""
    agent = requests(*({"messages": said(model), "model": model} for model in models))
    talk: Talk = lead(agent, *["3"] * len(models))
    assert talk.last.done, talk.last
    return [reply.trains for reply in talk.replies[:-1]]


def test_turns_of_side_models_do_not_train() -> None:
    assert trained(["policy", "side", "claude-haiku-4"]) == [True, False, True]


def test_the_tokens_are_those_of_the_policy() -> None:
    """The byte tokenizer has a token for each byte, so that texts above stand for tokens."""
    assert TOKENIZER.decode(TOKENIZER(READ, add_special_tokens=False)["input_ids"]) == READ


def test_what_requests_repeat_is_read_as_if_each_were_the_first() -> None:
    """Also after forks within results of tools, and where results are missing, too many, or in another order."""

    def outcome(reader: MessageReader, messages: list[dict[str, Any]]) -> list[Said] | str:
        try:
            return reader.read(json.loads(json.dumps(messages)), None)
        except RequestError as error:
            return str(error)

    made = random.Random(0)
    results = [{"role": "tool", "tool_call_id": name, "content": name} for name in "ab"]
    calls = [{"id": name, "function": {"name": "f", "arguments": '{"z": 1, "a": 2}'}} for name in "ab"]
    kinds: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": [{"type": "text", "text": "1"}]}],
        [{"role": "assistant", "content": " said "}],
        [{"role": "assistant", "content": None, "tool_calls": calls}],
        *[made.sample(results, count) for count in (1, 2, 2, 2)],
    ]
    for _ in range(30):
        reader, messages = MessageReader(), list[dict[str, Any]]()
        for _ in range(12):
            messages = messages[: made.randrange(len(messages) + 1)] if made.random() < 0.3 else messages
            messages = [*messages, *(each for _ in range(made.randrange(1, 4)) for each in made.choice(kinds))]
            assert outcome(reader, messages) == outcome(MessageReader(), messages)


def test_a_text_that_requests_repeat_is_kept_once() -> None:
    repeated, first = Repeated[int](), [{"content": "a" * 9}, {"content": "b" * 9}]
    repeated.keep(first, [1, 2])
    fork = json.loads(json.dumps([first[0], {"content": "c"}]))
    assert repeated.find(fork) == [1]
    assert fork[0] is first[0]
