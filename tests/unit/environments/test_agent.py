"""Agents with a loop of their own: OpenAI's client asks a host for turns, which the test writes for the policy."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvloop
import yaml

from megarl.config.environments import EnvironmentConfig, EnvironmentEntry
from megarl.environments import open_environments
from megarl.environments.agent import _ask_program, run_program
from megarl.errors import ConfigError
from megarl.types import Prompt
from tests.helpers.agent_talk import TOKENIZER, Talk, converse, lead
from tests.helpers.second_user import needs_second_user
from tests.helpers.strangers import ways_to_take
from tests.helpers.verifier import wait_for_end
from tests.helpers.verifiers_venv import verifiers_command
from tests.helpers.waiting import wait_until

DOCS = Path(__file__).parents[3] / "docs" / "agents.md"
ADD = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
QUESTION = [{"role": "user", "content": "1+2?"}]


def client(base_url: str, api_key: str, **settings: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=base_url, api_key=api_key, **settings)


async def ask(there: openai.AsyncOpenAI, messages: Sequence[Any], **rest: Any) -> Any:
    return await there.chat.completions.create(model="any", messages=list(messages), **rest)


async def use_tools(prompt: Prompt, base_url: str, api_key: str) -> dict[str, Any]:
    """Answers calls of `add`, sending back the client's own objects, until there is a turn without one."""
    messages: list[Any] = [{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}]
    messages += [message.as_dict() for message in prompt.messages]
    seen = []
    async with client(base_url, api_key) as there:
        while True:
            completion = await ask(there, messages, tools=[ADD], temperature=0.3, seed=5)
            seen.append(completion)
            message = completion.choices[0].message
            if not message.tool_calls:
                break
            messages.append(message)
            for call in message.tool_calls:
                total = sum(json.loads(call.function.arguments).values())
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(total)})
    right = message.content == prompt.ground_truth
    return {"reward": float(right), "correct": right, "seen": seen, "level": prompt.extra_info["level"]}


def test_an_agent_with_tools_has_a_conversation_whose_tokens_only_grow() -> None:
    talk = lead(use_tools, f"Let me see.\n{CALL}", "3")
    assert talk.text == (
        "<|im_start|>tools\nadd<|im_end|>\n<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+2?<|im_end|>\n"
        f"<|im_start|>assistant\nLet me see.\n{CALL}<|im_end|>\n<|im_start|>tool\n3<|im_end|>\n"
        "<|im_start|>assistant\n3<|im_end|>"
    )
    assert [reply.num_calls for reply in talk.replies] == [0, 1, 0]
    assert (talk.last.done, talk.last.reward, talk.last.failure) == (True, 1.0, "")
    details = dict(talk.last.details)
    first, last = details.pop("seen")
    assert details == {"correct": True, "level": 2}
    (choice,) = first.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": 2})
    assert (last.choices[0].finish_reason, last.choices[0].message.content) == ("stop", "3")
    # Each byte is a token, and each special token one.
    used = (first.usage.prompt_tokens, first.usage.completion_tokens)
    assert used == (len(talk.replies[0].token_ids), len(f"Let me see.\n{CALL}") + 1)
    assert last.usage.total_tokens == len(talk.tokens)


@pytest.mark.parametrize("turn", ["<tool_call>{nonsense}</tool_call>", f"{CALL[:20]}…"])
def test_what_is_no_whole_call_is_text(turn: str) -> None:
    talk = lead(use_tools, turn)
    assert (talk.last.done, talk.last.num_calls) == (True, 0)
    (choice,) = talk.last.details["seen"][0].choices
    assert choice.message.content == turn
    assert choice.finish_reason == ("length" if turn.endswith("…") else "stop")


def test_a_synchronous_agent_has_a_thread_and_may_read_streams() -> None:
    def stream(prompt: Prompt, base_url: str, api_key: str) -> dict[str, Any]:
        assert threading.current_thread() is not threading.main_thread()
        with openai.OpenAI(base_url=base_url, api_key=api_key) as there:
            options: Any = {"stream": True, "stream_options": {"include_usage": True}, "tools": [ADD]}
            chunks = list(there.chat.completions.create(model="any", messages=QUESTION, **options))  # type: ignore[call-overload]
        return {"chunks": chunks}

    talk = lead(stream, f"So {CALL}")
    assert (talk.last.done, talk.last.reward) == (True, 0.0)
    told, end, usage = talk.last.details["chunks"]
    delta = told.choices[0].delta
    assert (delta.role, delta.content) == ("assistant", "So")
    assert (delta.tool_calls[0].index, delta.tool_calls[0].function.name) == (0, "add")
    assert end.choices[0].finish_reason == "tool_calls"
    assert usage.usage.completion_tokens == len(f"So {CALL}") + 1


def test_more_agents_wait_in_threads_at_once_than_a_pool_has() -> None:
    def one(prompt: Prompt, base_url: str, api_key: str) -> float:
        httpx.post(f"{base_url}/chat/completions", json={"messages": QUESTION}, timeout=60.0).raise_for_status()
        return 1.0

    async def all_of_them() -> list[Talk]:
        barrier = asyncio.Barrier(40)

        async def lead_one() -> Talk:
            await barrier.wait()
            return await converse({"agent": one}, "3")

        return await asyncio.gather(*(lead_one() for _ in range(40)))

    assert [talk.last.reward for talk in asyncio.run(all_of_them())] == [1.0] * 40


def test_the_example_of_the_documentation(tmp_path: Path) -> None:
    text = DOCS.read_text(encoding="utf-8")
    code, settings = text.partition("    # agent.py\n")[2].split("    environment:\n", 1)
    (tmp_path / "agent.py").write_text(textwrap.dedent(code), encoding="utf-8")
    entries = yaml.safe_load("    environment:\n" + settings.partition("\n\n")[0])["environment"]["entries"]
    assert entries == {"solver": {"type": "agent", "arguments": {"agent": "agent.py:solve"}}}
    agent = f"{tmp_path}/{entries['solver']['arguments']['agent']}"
    talk = asyncio.run(converse({"agent": agent}, "4", " 3"))
    assert (talk.last.done, talk.last.reward) == (True, 1.0)
    assert talk.text == (
        "<|im_start|>user\n1+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
        "<|im_start|>user\nNo. Try again.<|im_end|>\n<|im_start|>assistant\n 3<|im_end|>"
    )
    assert asyncio.run(converse({"agent": agent}, "4", "5", "6")).last.reward == 0.0


# What a client's package, which takes seconds to import, does with its variables.
ASK = """
import json, os, urllib.request

def ask(messages):
    url, key = os.environ["OPENAI_BASE_URL"] + "/chat/completions", os.environ["OPENAI_API_KEY"]
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(url, json.dumps({"messages": messages}).encode(), headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""


def program(tmp_path: Path, code: str) -> dict[str, Any]:
    path = tmp_path / "agent.py"
    path.write_text(ASK + textwrap.dedent(code), encoding="utf-8")
    return {"command": [sys.executable, str(path)]}


def test_a_program_reads_the_row_and_its_last_line_is_the_reward(tmp_path: Path) -> None:
    command = program(
        tmp_path,
        """
        import sys

        row = json.load(sys.stdin)
        text = ask(row["messages"])
        print("said", text)
        print(json.dumps({"reward": float(text == row["ground_truth"]), "level": row["extra_info"]["level"]}))
        """,
    )
    # In an actor of Ray, the loop is uvloop's, and runs in another thread than the main one.
    talks: list[Talk] = []

    def lead_in_thread() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            talks.append(runner.run(converse(command, "3")))

    thread = threading.Thread(target=lead_in_thread)
    thread.start()
    thread.join(240.0)
    (talk,) = talks
    assert (talk.last.done, talk.last.reward, talk.last.details) == (True, 1.0, {"level": 2}), talk.last
    assert talk.text == "<|im_start|>user\n1+2?<|im_end|>\n<|im_start|>assistant\n3<|im_end|>"


def test_a_program_gets_the_keys_that_are_passed_on_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_AUTH_TOKEN", "HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "SEARCH_API_KEY"):
        monkeypatch.setenv(name, "of the user")
    monkeypatch.setenv("OPENAI_API_KEY", "of the user")
    command = program(
        tmp_path,
        f"""
        ask({QUESTION!r})
        print(json.dumps({{"names": sorted(name for name, value in os.environ.items() if value == "of the user")}}))
        """,
    )
    talk = asyncio.run(converse(command, "3", pass_env=("SEARCH_API_KEY",)))
    assert talk.last.details == {"names": ["SEARCH_API_KEY"]}, talk.last


@pytest.mark.parametrize(
    ("answered", "read"),
    [
        ([0, 1], ("zero", "one")),
        # OpenAI's API tells results apart by their ids, templates by their places.
        ([1, 0], ("zero", "one")),
        ([1], None),
        ([0, 0], None),
        ([0, 1, 2], None),
    ],
    ids=str,
)
def test_results_are_read_in_the_order_of_the_calls(answered: list[int], read: tuple[str, str] | None) -> None:
    async def agent(prompt: Prompt, base_url: str, api_key: str) -> None:
        async with client(base_url, api_key) as there:
            first = await ask(there, QUESTION, tools=[ADD])
            said = first.choices[0].message
            ids = [*(each.id for each in said.tool_calls), "call_of_nobody"]
            texts = ("zero", "one", "two")
            results = [{"role": "tool", "tool_call_id": ids[i], "content": texts[i]} for i in answered]
            messages = [*QUESTION, said.model_dump(exclude_none=True), *results]
            if read is None:
                with pytest.raises(
                    openai.BadRequestError, match=r"messages\[2\] has results of the calls .*, expected one of"
                ):
                    await ask(there, messages, tools=[ADD])
            else:
                await ask(there, messages, tools=[ADD])

    talk = lead(agent, CALL * 2, "3")
    assert talk.last.failure == "", talk.last
    if read is not None:
        assert all(f"<|im_start|>tool\n{each}<|im_end|>" in talk.text for each in read)
        assert talk.text.index(read[0]) < talk.text.index(read[1])


def test_an_agent_may_forbid_calls() -> None:
    """The policy reads the tools all the same; its call is the text of the answer, and the chat goes on after it."""

    async def agent(prompt: Prompt, base_url: str, api_key: str) -> dict[str, Any]:
        async with client(base_url, api_key) as there:
            completion = await ask(there, QUESTION, tools=[ADD], tool_choice="none")
            answer = completion.choices[0]
            more = [*QUESTION, answer.message, {"role": "user", "content": "In words?"}]
            await ask(there, more, tools=[ADD], tool_choice="none")
            return {"reward": 1.0, "text": answer.message.content, "ended": answer.finish_reason}

    talk = lead(agent, CALL, "Three")
    assert talk.last.details == {"text": CALL, "ended": "stop"}, talk.last
    assert [reply.num_calls for reply in talk.replies] == [0, 0, 0]
    assert talk.text == (
        f"<|im_start|>tools\nadd<|im_end|>\n<|im_start|>user\n1+2?<|im_end|>\n<|im_start|>assistant\n{CALL}<|im_end|>\n"
        "<|im_start|>user\nIn words?<|im_end|>\n<|im_start|>assistant\nThree<|im_end|>"
    )


@pytest.mark.long
@pytest.mark.timeout(600)
def test_verifiers_compacts_its_context_and_goes_on() -> None:
    """After a call of its tool its harness asks for a summary, and goes on from this alone."""
    call = '<tool_call>{"name": "multiplier_multiply", "arguments": {"b": 21, "a": 37}}</tool_call>'
    command = {"command": verifiers_command(summarize_at_tokens=1)}
    talk = asyncio.run(
        converse(command, f"So {call}", "Multiplied: 777", "It is 777", "3", "3.", reply_timeout_s=300.0)
    )
    assert (talk.last.done, talk.last.reward, talk.last.failure) == (True, 1.0, ""), talk.last
    assert talk.last.details == {"texts": ["It is 777", "3", "3."], "errors": [], "branches_other_beginning": 1}
    assert [reply.num_calls for reply in talk.replies] == [0, 1, 0, 0, 0, 0]
    asked = [TOKENIZER.decode(reply.token_ids) for reply in talk.replies]
    assert "CONTEXT CHECKPOINT COMPACTION" in asked[1]
    rebuilt = "<|im_start|>tools\nmultiplier_multiply<|im_end|>\n<|im_start|>user\nAnother language model started to"
    assert asked[2].startswith(rebuilt)
    assert asked[2].endswith("Multiplied: 777<|im_end|>\n<|im_start|>assistant\n")
    assert [reply.is_context for reply in talk.replies[1:4]] == [False, True, False]


CHATTER = """
import sys
for stream in (sys.stdout, sys.stderr):
    for _ in range(16 << 10):
        stream.write("é" * 1023 + "\\n")
"""


@pytest.mark.parametrize(
    ("last", "outcome"),
    [
        ("print('{\"reward\": 0.5}')", {"reward": 0.5}),
        ("sys.exit('no luck')", "the agent's program ended with 1: no luck"),
        ("print('9' * (1 << 20))", "the last line of the agent's program has over 1048576 bytes; shorten it"),
    ],
)
def test_of_all_that_a_program_writes_only_the_end_is_kept(last: str, outcome: object) -> None:
    """32 MiB on each stream."""
    prompt = Prompt(uid="a", token_ids=(1,), data_source="d", ground_truth="1")
    tracemalloc.start()
    try:
        returned: object = asyncio.run(
            _ask_program([sys.executable, "-c", CHATTER + last], prompt, "http://127.0.0.1", os.environ)
        )
    except RuntimeError as error:
        returned = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert returned == outcome
    assert peak < 8 << 20


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_program_may_end_without_reading(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """Workers run on uvloop, whose pipes are closed as soon as their program has ended."""
    with asyncio.Runner(loop_factory=loop) as runner:
        for text in ("", "x" * (1 << 20)):
            ended = [runner.run(run_program(["true"], text, os.environ)) for _ in range(5)]
            assert [each.exit_code for each in ended] == [0] * 5


def test_a_program_that_fails_costs_the_sample(tmp_path: Path) -> None:
    talk = asyncio.run(converse(program(tmp_path, "import sys; sys.exit('no luck')"), "3"))
    assert (talk.last.failure, talk.last.reason) == (
        "raised",
        "RuntimeError: the agent's program ended with 1: no luck",
    )


def test_nothing_of_a_program_is_left_when_its_conversation_ends(tmp_path: Path) -> None:
    """It is stopped while it waits for a turn, with what it started."""
    command = program(
        tmp_path,
        f"""
        import subprocess
        print(subprocess.Popen(["sleep", "600"]).pid, file=open({str(tmp_path / "pid")!r}, "w"), flush=True)
        ask({QUESTION!r})
        """,
    )
    talk = asyncio.run(converse(command))
    assert talk.last.failure == "", talk.last
    child = int((tmp_path / "pid").read_text(encoding="utf-8"))
    wait_for_end(child, seconds=10.0)


def test_the_first_request_is_the_prompt_and_has_its_limit() -> None:
    async def agent(prompt: Prompt, base_url: str, api_key: str) -> None:
        async with client(base_url, api_key) as there:
            await ask(there, [{"role": "user", "content": "x" * 100}], max_completion_tokens=7)

    talk = lead(agent)
    assert (talk.last.max_turn_tokens, talk.last.failure) == (7, "")
    talk = lead(agent, max_prompt_tokens=len(talk.tokens))
    assert talk.last.failure == ""
    talk = lead(agent, max_prompt_tokens=len(talk.tokens) - 1)
    assert re.fullmatch(
        r"ValueError: the opening makes a prompt of \d+ tokens, data.max_prompt_tokens is \d+", talk.last.reason
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 0}, "n is 0, expected a whole number of at least 1"),
        ({"logprobs": True}, "logprobs is True, expected it to be left out"),
        ({"stop": ["\n"] * 17}, "stop has 17 texts, expected up to 16 of up to 1000 characters"),
        ({"response_format": {"type": "json_object"}}, "response_format is"),
        ({"tool_choice": "required", "tools": [ADD]}, "tool_choice is 'required'"),
        ({"functions": [ADD["function"]]}, "functions is"),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, "chat_template_kwargs is"),
        ({"extra_body": {"guided_json": {"type": "object"}}}, "guided_json is"),
        ({"extra_body": {"structured_outputs": {"regex": "a+"}}}, "structured_outputs is"),
        ({"extra_body": {"stop_token_ids": [7]}}, "stop_token_ids is"),
        ({"max_tokens": 0}, "max_tokens is 0, expected a whole number of at least 1"),
        ({"messages": []}, "messages is missing or empty"),
        ({"messages": [{"role": "critic", "content": "hm"}]}, r"messages\[0\] is .*a role among system"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
            r"messages\[0\].content: got an image, expected text alone: the run has no data.image_key",
        ),
        ({"messages": [*QUESTION, {"role": "assistant", "content": "It"}]}, "the last message is the assistant's"),
        ({"messages": [{"role": "user", "content": 5}]}, "the body is not what this API takes: TypeError"),
    ],
)
def test_a_request_that_cannot_be_honoured_is_refused_and_costs_nothing_else(
    fields: Mapping[str, Any], message: str
) -> None:
    async def agent(prompt: Prompt, base_url: str, api_key: str) -> float:
        async with client(base_url, api_key) as there:
            with pytest.raises(openai.BadRequestError, match=message):
                await ask(there, **{"messages": QUESTION} | dict(fields))
            await ask(there, QUESTION, n=1, logprobs=False, stop=[], tool_choice="auto")
            return 1.0

    talk = lead(agent, "3")
    assert (talk.last.reward, talk.last.failure) == (1.0, "")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"messages":' * 3000, "RecursionError"),
        ('{"messages": [{"role": "user", "content": "\\ud83d"}]}', "half of a character"),
        ('{"model": "\\uDE00", "messages": [{"role": "user", "content": "hi"}]}', "half of a character"),
        ('{"messages": [{"role": "user", "content": "hi"}], "max_tokens": ' + "1" * 5000 + "}", "Exceeds the limit"),
        (b"\xff\xfe{", "UnicodeDecodeError"),
    ],
)
def test_a_body_that_is_no_text_is_refused_and_costs_nothing_else(body: Any, message: str) -> None:
    async def agent(prompt: Prompt, base_url: str, api_key: str) -> float:
        async with httpx.AsyncClient() as there:
            refused = await there.post(f"{base_url}/chat/completions", content=body)
        assert (refused.status_code, message in refused.json()["error"]["message"]) == (400, True), refused.text
        async with client(base_url, api_key) as there:
            return float((await ask(there, QUESTION)).choices[0].message.content)

    talk = lead(agent, "3")
    assert (talk.last.reward, talk.last.failure) == (3.0, "")


def test_a_call_that_cannot_be_sent_is_left_in_the_text() -> None:
    nested = '<tool_call>{"name": "add", "arguments": {"a": ' + "[" * 900 + "]" * 900 + "}}</tool_call>"
    for text in ('<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>', nested):

        async def agent(prompt: Prompt, base_url: str, api_key: str, text: str = text) -> float:
            async with client(base_url, api_key) as there:
                message = (await ask(there, QUESTION, tools=[ADD])).choices[0].message
                return float(message.content == text or bool(message.tool_calls))

        talk = lead(agent, text)
        assert (talk.last.reward, talk.last.failure) == (1.0, "")


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_may_ask_for_several_answers_and_go_on_from_any(stream: bool) -> None:
    async def agent(prompt: Prompt, base_url: str, api_key: str) -> dict[str, Any]:
        async with client(base_url, api_key) as there:
            first = await ask(there, QUESTION, n=3, stream=stream)
            texts = ["", "", ""]
            if stream:
                async for chunk in first:
                    name = chunk.id
                    for choice in chunk.choices:
                        texts[choice.index] += choice.delta.content or ""
            else:
                name, texts = first.id, [choice.message.content for choice in first.choices]
                assert first.usage.completion_tokens == 6
            second = await ask(there, [*QUESTION, said(texts[1]), {"role": "user", "content": "sure?"}])
            return {"reward": 1.0, "rewards": {name: [0.0, 0.5, 0.25], second.id: 2.0}, "texts": texts}

    talk = lead(agent, ("3", "4", "5"), "yes")
    opened, chosen, last = talk.replies
    assert (opened.num_tries, chosen.num_tries) == (3, 1)
    assert (chosen.after_turn, chosen.is_context) == (1, False)
    assert TOKENIZER.decode(chosen.token_ids) == "\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"
    assert (last.reward, last.rewards) == (3.0, {0: 0.0, 1: 0.5, 2: 0.25})
    assert last.details == {"texts": ["3", "4", "5"]}


def test_rewards_of_completions_that_there_are_not_cost_the_sample() -> None:
    async def agent(prompt: Prompt, base_url: str, api_key: str) -> dict[str, Any]:
        async with client(base_url, api_key) as there:
            first = await ask(there, QUESTION, n=2)
            return {"rewards": {first.id: 1.0}}

    talk = lead(agent, ("3", "4"))
    assert re.fullmatch(r"ValueError: rewards\['chatcmpl-.*'\] is 1.0, expected .* each of 2 choices", talk.last.reason)


@pytest.mark.parametrize(
    ("second", "fields"),
    [
        ([{"role": "user", "content": "2+2?"}, said("3")], {}),
        ([*QUESTION, said("4")], {}),
        ([], {}),
        ([*QUESTION, said("3"), said("4")], {}),
        ([*QUESTION, said("3")], {"tools": [ADD]}),
    ],
)
def test_a_rewritten_conversation_is_read_as_it_was_sent(second: list[Any], fields: Mapping[str, Any]) -> None:
    chat = [*second, {"role": "user", "content": "sure?"}]

    async def agent(prompt: Prompt, base_url: str, api_key: str) -> float:
        async with client(base_url, api_key) as there:
            await ask(there, QUESTION)
            return float((await ask(there, chat, **fields)).choices[0].message.content)

    talk = lead(agent, "3", "5")
    tools = fields.get("tools")
    text = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in chat)
    text = ("<|im_start|>tools\nadd<|im_end|>\n" if tools else "") + f"{text}<|im_start|>assistant\n"
    assert (talk.replies[1].is_context, TOKENIZER.decode(talk.replies[1].token_ids)) == (True, text)
    assert talk.last.reward == 5.0


def test_a_chat_goes_on_after_the_turn_that_it_repeats() -> None:
    first = [*QUESTION, said("3"), {"role": "user", "content": "sure?"}]

    async def agent(prompt: Prompt, base_url: str, api_key: str) -> float:
        async with client(base_url, api_key) as there:
            await ask(there, QUESTION)
            await ask(there, [{"role": "user", "content": "2+2?"}])
            await ask(there, first)
            await ask(there, first)
        return 1.0

    talk = lead(agent, "3", "4", "yes", "no")
    begun, other, back, again, end = talk.replies
    assert TOKENIZER.decode(begun.token_ids) == "<|im_start|>user\n1+2?<|im_end|>\n<|im_start|>assistant\n"
    assert (other.is_context, other.token_ids[3:7]) == (True, tuple(TOKENIZER("2+2?").input_ids))
    for reply in (back, again):
        inter_turn = "\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"
        assert (reply.is_context, reply.after_turn, TOKENIZER.decode(reply.token_ids)) == (False, 0, inter_turn)
    assert (end.done, end.reward) == (True, 1.0)


def test_requests_side_by_side_are_answered_together_in_an_order_of_their_own() -> None:
    """The policy says 3, 4 and 5 to 1+2?, 1+2? and 2+2?, whichever came first."""

    async def agent(prompt: Prompt, base_url: str, api_key: str) -> dict[str, Any]:
        async with client(base_url, api_key) as there:
            other = [{"role": "user", "content": "2+2?"}]
            found = await asyncio.gather(ask(there, other), ask(there, QUESTION), ask(there, QUESTION))
        texts = [each.choices[0].message.content for each in found]
        return {"other": texts[0], "same": sorted(texts[1:])}

    talk = lead(agent, "3", "4", "5")
    begun, end = talk.replies
    same, other = begun.beside
    assert TOKENIZER.decode(same.token_ids) == TOKENIZER.decode(begun.token_ids)
    assert TOKENIZER.decode(other.token_ids) == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert (same.is_context, other.is_context) == (True, True)
    details = {"other": "5", "same": ["3", "4"], "branches_asked_again": 1, "branches_other_beginning": 1}
    assert (end.done, end.details) == (True, details)


def test_sub_agents_are_answered_together_until_each_has_ended() -> None:
    """Two calls of one turn are sub-agents that ask at times of their own; one has two turns, the other one."""

    async def agent(prompt: Prompt, base_url: str, api_key: str) -> list[Any] | float:
        async with client(base_url, api_key) as there:

            async def sub_agent(name: str, delay_s: float, num_calls: int) -> Any:
                messages: list[Any] = [{"role": "user", "content": name}]
                for _ in range(num_calls):
                    messages.append((await ask(there, messages, tools=[ADD])).choices[0].message)
                    call = messages[-1].tool_calls[0]
                    await asyncio.sleep(delay_s)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": "3"})
                return (await ask(there, messages, tools=[ADD])).choices[0].message.content

            first = (await ask(there, QUESTION, tools=[ADD])).choices[0].message
            texts = await asyncio.gather(sub_agent("a", 0.1, 1), sub_agent("b", 0.0, 1))
            results = [
                {"role": "tool", "tool_call_id": call.id, "content": text}
                for call, text in zip(first.tool_calls, texts, strict=True)
            ]
            return float((await ask(there, [*QUESTION, first, *results], tools=[ADD])).choices[0].message.content)

    talk = lead(agent, f"{CALL}{CALL}", CALL, CALL, "one", "two", "3", think_s=2.0)
    assert talk.last.reward == 3.0, talk.last
    assert [len(reply.beside) for reply in talk.replies] == [0, 1, 1, 0, 0]
    assert [reply.num_calls for reply in talk.replies] == [0, 2, 2, 0, 0]
    assert talk.replies[2].after_turn == 1
    assert [each.after_turn for each in talk.replies[2].beside] == [2]
    assert (talk.replies[3].after_turn, talk.last.details) == (0, {"branches_other_beginning": 2})


def test_a_client_that_gave_up_waiting_may_ask_again() -> None:
    async def agent(prompt: Prompt, base_url: str, api_key: str) -> float:
        async with client(base_url, api_key, timeout=0.3, max_retries=0) as impatient:
            with pytest.raises(openai.APITimeoutError):
                await ask(impatient, QUESTION)
        async with client(base_url, api_key) as there:
            return float((await ask(there, QUESTION)).choices[0].message.content)

    assert lead(agent, "3", think_s=4.0).last.reward == 3.0


async def raises(prompt: Prompt, base_url: str, api_key: str) -> None:
    raise LookupError("no such row")


async def raises_later(prompt: Prompt, base_url: str, api_key: str) -> None:
    async with client(base_url, api_key) as there:
        await ask(there, QUESTION)
    raise LookupError("no such answer")


async def leaves(prompt: Prompt, base_url: str, api_key: str) -> None:
    raise SystemExit(3)


def leaves_its_thread(prompt: Prompt, base_url: str, api_key: str) -> None:
    raise SystemExit(3)


async def never_asks(prompt: Prompt, base_url: str, api_key: str) -> float:
    return 1.0


async def hangs(prompt: Prompt, base_url: str, api_key: str) -> None:
    await asyncio.sleep(60)


def hangs_in_a_thread(prompt: Prompt, base_url: str, api_key: str) -> None:
    time.sleep(3)


async def hangs_later(prompt: Prompt, base_url: str, api_key: str) -> None:
    async with client(base_url, api_key) as there:
        await ask(there, QUESTION)
    await asyncio.sleep(60)


async def returns_text(prompt: Prompt, base_url: str, api_key: str) -> str:
    async with client(base_url, api_key) as there:
        await ask(there, QUESTION)
    return "well done"


async def returns_nan(prompt: Prompt, base_url: str, api_key: str) -> float:
    await returns_text(prompt, base_url, api_key)
    return float("nan")


LATE = "no reply within environment.reply_timeout_s"


@pytest.mark.parametrize(
    ("agent", "failure", "reason"),
    [
        (raises, "raised", "LookupError: no such row"),
        (raises_later, "raised", "LookupError: no such answer"),
        (leaves, "raised", "SystemExit: 3"),
        (leaves_its_thread, "raised", "SystemExit: 3"),
        (never_asks, "raised", "RuntimeError: the agent ended without a request"),
        (hangs, "timed_out", LATE),
        (hangs_in_a_thread, "timed_out", LATE),
        (hangs_later, "timed_out", LATE),
        (returns_text, "raised", "TypeError: the agent returned str, expected a number or a mapping with reward"),
        (returns_nan, "raised", "ValueError: the reward is nan, expected a finite number"),
    ],
)
def test_what_goes_wrong_in_an_agent_costs_the_sample(agent: Callable[..., Any], failure: str, reason: str) -> None:
    settings = {"reply_timeout_s": 1.5} if failure == "timed_out" else {}
    talk = lead(agent, "3", **settings)
    # Where the agent's own code raised it, its file and line are there.
    told, num_places = re.subn(rf" \({re.escape(__file__)}:\d+\)$", "", talk.last.reason)
    assert (talk.last.failure, told) == (failure, reason)
    assert num_places == (agent in (raises, raises_later, leaves))


def test_an_agent_whose_conversation_ends_is_stopped() -> None:
    """The policy's turn never comes, since a limit ended all: a coroutine is cancelled, and a thread refused."""
    ends: list[str] = []

    async def waits(prompt: Prompt, base_url: str, api_key: str) -> None:
        async with client(base_url, api_key) as there:
            try:
                await ask(there, QUESTION)
            except asyncio.CancelledError:
                ends.append("cancelled")
                raise

    refused = threading.Event()

    def waits_in_a_thread(prompt: Prompt, base_url: str, api_key: str) -> None:
        with openai.OpenAI(base_url=base_url, api_key=api_key) as there:
            try:
                there.chat.completions.create(model="any", messages=QUESTION)  # type: ignore[arg-type]
            except openai.BadRequestError as error:
                ends.append(str(error))
            with contextlib.suppress(openai.NotFoundError):
                there.chat.completions.create(model="any", messages=QUESTION)  # type: ignore[arg-type]
                return
            refused.set()

    async def both() -> None:
        await converse({"agent": waits})
        await converse({"agent": waits_in_a_thread})
        await asyncio.to_thread(refused.wait, 10)

    asyncio.run(both())
    assert ends[0] == "cancelled"
    assert "the conversation has ended" in ends[1]
    assert refused.is_set()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, r"got agent=None and command=\[\], expected one of them"),
        ({"agent": raises, "command": ["true"]}, "expected one of them"),
        ({"agent": f"{__name__}:nobody"}, "has no 'nobody'"),
        ({"command": ["no-such-program-here"]}, "there is no program 'no-such-program-here'"),
        ({"agent": raises, "parser": "hermse"}, "did you mean 'hermes'"),
    ],
)
def test_wrong_arguments_are_refused_at_the_start(arguments: Mapping[str, Any], message: str) -> None:
    config = EnvironmentConfig(entries={"mine": EnvironmentEntry(type="agent", arguments=arguments)})
    with pytest.raises(ConfigError, match=message):
        open_environments(config, ["mine"])


HOST = """
import asyncio, sys
from megarl.environments.agent import AgentEnvironment
from megarl.environments.endpoint import chat_server
from megarl.types import Prompt

async def main():
    agent = AgentEnvironment(command=["sh", "-c", "echo $$ > $0; sleep 600", sys.argv[1]])
    print(chat_server().held.getsockname()[1], flush=True)
    await agent.start(Prompt(uid="a", token_ids=(1,), data_source="d", ground_truth="1"))

asyncio.run(main())
"""


@needs_second_user
def test_nobody_else_can_answer_an_agent_whose_host_has_died(tmp_path: Path) -> None:
    """A program that does what the policy writes would do what another user writes."""
    started = tmp_path / "started"
    with subprocess.Popen([sys.executable, "-c", HOST, str(started)], stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        port = int(host.stdout.readline())
        wait_until(lambda: started.is_file() and started.read_text().endswith("\n"), "the agent's start", process=host)
        host.kill()
    try:
        assert ways_to_take(port) == []
    finally:
        os.killpg(int(started.read_text()), signal.SIGKILL)
    taken = partial(ways_to_take, port)
    wait_until(lambda: "127.0.0.1 SO_REUSEADDR" in taken(), "a free port", seen=taken)
