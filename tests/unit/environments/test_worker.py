"""The environment worker: every request has one reply, whatever the environment does."""

import asyncio
import contextlib
import errno
import math
import re
import textwrap
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from megarl.config.environments import EnvironmentConfig, EnvironmentEntry
from megarl.environments import Action, Environment, Reply, open_environments
from megarl.environments import worker as workers
from megarl.environments.base import load_object
from megarl.environments.worker import EnvironmentWorker, WorkerSpec
from megarl.errors import ConfigError
from megarl.types import Message, Prompt
from megarl.types.episodes import EpisodeReply, StartRequest, TriesRequest, TurnRequest
from megarl_lab.recipes.tiny_model import make_byte_tokenizer

TOKENIZER = make_byte_tokenizer()
END = 2
HERE = f"{__name__}:"


def ids(text: str) -> list[int]:
    encoded: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return encoded


class Echo(Environment):
    """Repeats what the policy says, with its reward, until it says `stop`; other words make it misbehave."""

    closed: ClassVar[list[str]] = []

    def __init__(self, *, opening: str = "") -> None:
        self.opening = opening

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        self.name = prompt.uid
        if prompt.ground_truth == "raise":
            raise LookupError("no such game\nwith more lines")
        return (Message(role="user", content=self.opening),) if self.opening else ()

    async def reply(self, action: Action) -> Reply:
        if action.text == "raise":
            raise LookupError("no such word")
        if action.text == "sleep":
            await asyncio.sleep(60)
        if action.text == "nothing":
            return Reply()
        if action.text == "exit":
            raise SystemExit(3)
        if action.text == "half":
            return Reply(messages=(Message(role="tool", content="\ud83d"),))
        if action.text == "long":
            return Reply(messages=(Message(role="tool", content="x" * 50_000_000),))
        if action.text == "stubborn":
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
            await asyncio.sleep(0.5)
        if action.text == "block":
            await asyncio.to_thread(threading.Event().wait)
        if action.text == "nan":
            return Reply(done=True, reward=float("nan"))
        text = f"{action.turn}: {action.text}{' (cut)' if action.is_cut else ''}"
        return Reply(
            messages=(Message(role="tool", content=text),),
            done=action.text == "stop",
            reward=0.5,
            details={"words": len(action.text.split())},
        )

    async def close(self) -> None:
        self.closed.append(self.name)


class Resumable(Echo):
    async def resume(self, prompt: Prompt, actions: Sequence[Action]) -> bool:
        self.past = [action.text for action in actions]
        return True

    async def reply(self, action: Action) -> Reply:
        return Reply(done=True, details={"past": "+".join(self.past)})


class Steady(Echo):
    """Goes on anywhere; replies to the first turn with a context of its own, and to the third once more."""

    async def resume(self, prompt: Prompt, actions: Sequence[Action]) -> bool:
        return True

    async def reply(self, action: Action) -> Reply:
        said = await super().reply(action)
        if action.turn == 1:
            return replace(said, messages=(), context=(*said.messages, Message(role="user", content="?")))
        return replace(said, after_turn=1) if action.turn == 3 else said


class Search(Echo):
    """Tries the first turn twice; the tries say what it replies."""

    num_tries = 2

    async def choose(self, actions: Sequence[Action]) -> Reply:
        words = [action.text for action in actions]
        self.num_tries = 9 if "nine" in words else 1
        after = actions[words.index("best")].turn if "best" in words else None
        rewards = {action.turn: float(action.is_cut) for action in actions} | ({7: 1.0} if "seven" in words else {})
        return Reply(messages=(Message(role="tool", content="go"),), after_turn=after, reward=2.0, rewards=rewards)


def host(max_prompt_tokens: int | None = None, marks_texts: bool = False, **limits: Any) -> EnvironmentWorker:
    entries = {
        "echo": EnvironmentEntry(type=f"{HERE}Echo"),
        "opens": EnvironmentEntry(type=f"{HERE}Echo", arguments={"opening": "hi"}),
        "search": EnvironmentEntry(type=f"{HERE}Search"),
        "resumes": EnvironmentEntry(type=f"{HERE}Resumable"),
        "steady": EnvironmentEntry(type=f"{HERE}Steady", arguments={"opening": "hi"}),
    }
    config = EnvironmentConfig(entries=entries, **limits)
    spec = WorkerSpec(
        model_path="",
        chat_template={},
        names=tuple(entries),
        config=config,
        max_prompt_tokens=max_prompt_tokens,
        marks_texts=marks_texts,
    )
    return EnvironmentWorker(spec, TOKENIZER)


def prompt(environment: str = "echo", ground_truth: str = "") -> Prompt:
    question = (Message(role="user", content="?"),)
    return Prompt(
        uid="a", token_ids=(5,), data_source="d", ground_truth=ground_truth, messages=question, environment=environment
    )


def turn(text: str, number: int = 0, *, is_cut: bool = False) -> TurnRequest:
    return TurnRequest(token_ids=[*ids(text), *([] if is_cut else [END])], turn=number, is_cut=is_cut)


def run(coroutine: Coroutine[Any, Any, EpisodeReply]) -> EpisodeReply:
    return asyncio.run(coroutine)


def replies(*turns: TurnRequest | TriesRequest, environment: str = "echo", **limits: Any) -> list[EpisodeReply]:
    """Start a conversation and take these turns."""

    async def talk() -> list[EpisodeReply]:
        there = host(**limits)
        first = await there.start(7, StartRequest(prompt=prompt(environment)))
        return [first, *[await there.act(7, each) for each in turns]]

    return asyncio.run(talk())


def test_a_reply_is_the_glue_to_the_next_turn() -> None:
    first, second, last = replies(turn("one two"), turn("stop", 1))
    assert (first.token_ids, first.is_anew, first.failure) == ((), False, "")
    after = "\n<|im_start|>tool\n0: one two<|im_end|>\n<|im_start|>assistant\n"
    assert TOKENIZER.decode(second.token_ids) == after
    assert (second.done, second.reward, second.details) == (False, 0.5, {"words": 2})
    assert (last.done, last.token_ids) == (True, ())


# As reasoning templates do, this one drops what stands before | in turns of the assistant that have a reply.
WITHOUT_THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] if loop.last or m['role'] != "
    "'assistant' else m['content'].split('|')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_rendered_history_leaves_out_what_the_template_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TOKENIZER, "chat_template", WITHOUT_THOUGHTS)
    _, plain, stripped, kept = replies(turn("3"), turn("hm|4", 1), turn("5", 2), history="rendered")
    inter_turn = "\n<|im_start|>tool\n{}<|im_end|>\n<|im_start|>assistant\n"
    assert (plain.is_context, plain.after_turn) == (False, 0)
    assert TOKENIZER.decode(plain.token_ids) == inter_turn.format("0: 3")
    whole = "<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n3<|im_end|>" + inter_turn.format("0: 3")
    assert stripped.is_context
    assert TOKENIZER.decode(stripped.token_ids) == f"{whole}4<|im_end|>{inter_turn.format('1: hm|4')}"
    assert (kept.is_context, TOKENIZER.decode(kept.token_ids)) == (False, inter_turn.format("2: 5"))
    # By default it is read as it was written.
    assert [reply.is_context for reply in replies(turn("hm|4"))] == [False, False]


def own_texts(reply: EpisodeReply) -> list[str]:
    assert reply.observed is not None
    return [TOKENIZER.decode(reply.token_ids[start:end]) for start, end in reply.observed]


def test_replies_say_which_tokens_are_the_environments_own_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    said = replies(turn("one two"), turn("3", 1, is_cut=True), marks_texts=True)
    assert [own_texts(reply) for reply in said[1:]] == [["0: one two"], ["1: 3 (cut)"]]
    assert replies(turn("one two"))[1].observed is None
    # A context tells again what was said before.
    assert own_texts(replies(turn("a"), turn("b", 1), environment="steady", marks_texts=True)[2]) == []
    # So does a history that is rendered anew, but for its end.
    monkeypatch.setattr(TOKENIZER, "chat_template", WITHOUT_THOUGHTS)
    rendered = replies(turn("hm|4"), turn("5", 1), marks_texts=True, history="rendered")
    assert [own_texts(reply) for reply in rendered[1:]] == [["0: hm|4"], ["1: 5"]]
    assert [reply.is_context for reply in rendered[1:]] == [True, False]


def test_warnings_are_no_observations() -> None:
    class Warns(Echo):
        async def reply(self, action: Action) -> Reply:
            said = (Message(role="tool", content="6"), Message(role="tool", content="careful"))
            return Reply(messages=(*said, Message(role="assistant", content="hm")), warnings=(1,))

    there = host(marks_texts=True)
    there._makers = {"echo": Warns}  # type: ignore[dict-item]

    async def talk() -> EpisodeReply:
        await there.start(1, StartRequest(prompt=prompt()))
        return await there.act(1, turn("one"))

    assert own_texts(run(talk())) == ["6"]


def test_a_rendered_history_goes_on_at_another_host_as_it_would_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each of its turns; with a host that is not given the replies, the conversation begins again."""
    monkeypatch.setattr(TOKENIZER, "chat_template", WITHOUT_THOUGHTS)
    turns = [turn(text, number) for number, text in enumerate(("a|1", "b|2", "c|3", "d|4", "e|5"))]

    def told(reply: EpisodeReply) -> EpisodeReply:
        return replace(reply, seconds=0.0)

    async def talk() -> None:
        one = host(history="rendered")
        whole = [await one.start(1, StartRequest(prompt=prompt("steady")))]
        whole += [await one.act(1, each) for each in turns]
        # A context of its own, a template that drops the thoughts before it, and the branch from there.
        assert [reply.is_context for reply in whole] == [False, True, True, True, True, True]
        for num_done in range(1, len(turns)):
            past = tuple(each.token_ids for each in turns[:num_done])
            parts = tuple(reply.part for reply in whole[: num_done + 1] if reply.part is not None)
            request = StartRequest(prompt=prompt("steady"), turns=past, chat=parts)
            other = host(history="rendered")
            assert told(await other.start(2, request)) == EpisodeReply()
            rest = [await other.act(2, each) for each in turns[num_done:]]
            assert [told(reply) for reply in rest] == [told(reply) for reply in whole[num_done + 1 :]]
            assert (await other.start(3, replace(request, chat=()))).is_anew

    asyncio.run(talk())


def test_an_environment_chooses_among_tries_and_rewards_each() -> None:
    tries = TriesRequest(tries=(turn("best"), turn("so", 1, is_cut=True)))
    first, reply = replies(tries, environment="search")
    assert first.num_tries == 2
    assert (reply.num_tries, reply.after_turn) == (1, 0)
    # The reward is that of the try that was chosen.
    assert (reply.reward, reply.rewards) == (1.0, {0: 2.0})
    assert TOKENIZER.decode(reply.token_ids) == "\n<|im_start|>tool\ngo<|im_end|>\n<|im_start|>assistant\n"


def test_the_search_of_the_documentation() -> None:
    page = (Path(__file__).parents[3] / "docs" / "environments.md").read_text(encoding="utf-8")
    code = page.partition("    # search.py\n")[2].partition("\n`choose` gets")[0]
    names: dict[str, Any] = {}
    exec(textwrap.dedent(code), names)
    search = names["Search"]()
    assert search.num_tries == 4
    reply = asyncio.run(search.choose([Action(text="2", turn=0), Action(text="1+1=2", turn=1)]))
    assert (search.num_tries, reply.after_turn, reply.rewards) == (1, 1, {1: 0.1})


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("no", "name"), "after_turn is None, expected a turn so far: [0, 1]"),
        (("best", "nine"), "num_tries is 9, expected 1 to environment.max_turns=8"),
        (("best", "seven"), "rewards has the turn 7, expected turns so far: [0, 1]"),
    ],
)
def test_what_an_environment_says_wrong_of_tries_costs_the_sample(words: tuple[str, str], reason: str) -> None:
    tries = TriesRequest(tries=tuple(turn(word, number) for number, word in enumerate(words)))
    assert replies(tries, environment="search")[1].reason == f"ValueError: {reason}"


def test_a_cut_turn_gets_its_end_and_tools_may_speak_as_users() -> None:
    _, reply = replies(turn("one", is_cut=True), tool_role="user")
    assert (
        TOKENIZER.decode(reply.token_ids)
        == "<|im_end|>\n<|im_start|>user\n0: one (cut)<|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_environment_may_open_the_conversation() -> None:
    (reply,) = replies(environment="opens")
    assert TOKENIZER.decode(reply.token_ids) == (
        "<|im_start|>user\n?<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(("limit", "failure"), [(16, ""), (15, "raised")])
def test_an_opening_must_leave_the_prompt_within_its_limit(limit: int, failure: str) -> None:
    """Of bytes and marks: 5 marks, 3 roles of a token each, 3 characters, 5 line feeds: 16 tokens."""
    (reply,) = replies(environment="opens", max_prompt_tokens=limit)
    reason = "ValueError: the opening makes a prompt of 16 tokens, data.max_prompt_tokens is 15" if failure else ""
    assert (reply.failure, reply.reason) == (failure, reason)


@pytest.mark.parametrize(
    ("word", "failure", "reason"),
    [
        ("raise", "raised", "LookupError: no such word"),
        ("sleep", "timed_out", "no reply within environment.reply_timeout_s"),
        (
            "nothing",
            "raised",
            "ValueError: the reply has no messages, and does not end the conversation; set done=True",
        ),
        ("nan", "raised", "ValueError: the reward is nan, expected a finite number"),
        ("exit", "raised", "SystemExit: 3"),
        (
            "long",
            "raised",
            "ValueError: the reply has 50000000 characters, expected at most 1000000; shorten it",
        ),
        ("stubborn", "timed_out", "no reply within environment.reply_timeout_s"),
        ("block", "timed_out", "no reply within environment.reply_timeout_s"),
    ],
)
def test_what_goes_wrong_in_an_environment_is_a_reply(word: str, failure: str, reason: str) -> None:
    _, reply = replies(turn(word), reply_timeout_s=1.0)
    # Where the environment itself raised it, its file and line are there.
    place = f" ({__file__}:" if word in ("raise", "exit") else ""
    assert (reply.failure, re.sub(r"\d+\)$", "", reply.reason) if place else reply.reason) == (failure, reason + place)


def test_half_a_character_is_no_failure() -> None:
    _, reply = replies(turn("half"))
    assert TOKENIZER.decode(reply.token_ids) == "\n<|im_start|>tool\n\ufffd<|im_end|>\n<|im_start|>assistant\n"


class Drained(Environment):
    """Fails as in a process that has nothing left, except for prompts whose truth is `fine`."""

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        if prompt.ground_truth == "raise":
            raise LookupError("no such game")
        if prompt.ground_truth == "memory":
            raise MemoryError
        if prompt.ground_truth == "files":
            try:
                raise OSError(errno.EMFILE, "Too many open files")
            except OSError as error:
                raise ConnectionError("no connection") from error
        return ()


@pytest.mark.parametrize(
    ("truths", "is_worn_out"),
    [
        (["files"] * 4, True),
        (["memory"] * 4, True),
        (["files"] * 3, False),
        # It has some left.
        (["files", "files", "fine", "files", "files", "fine"], False),
        # That is the environment's own affair.
        (["raise"] * 6, False),
    ],
    ids=str,
)
def test_a_host_that_has_nothing_left_is_worn_out(truths: Sequence[str], is_worn_out: bool) -> None:
    entries = {"drained": EnvironmentEntry(type=f"{HERE}Drained")}
    config = EnvironmentConfig(entries=entries)
    drained = EnvironmentWorker(
        WorkerSpec(model_path="", chat_template={}, names=("drained",), config=config), tokenizer=TOKENIZER
    )

    async def ask() -> list[EpisodeReply]:
        made = [
            Prompt(uid="a", token_ids=(5,), data_source="s", ground_truth=truth, environment="drained")
            for truth in truths
        ]
        return [await drained.start(key, StartRequest(prompt=each)) for key, each in enumerate(made)]

    told = asyncio.run(ask())
    assert bool(told[-1].worn_out) == is_worn_out
    assert not any(reply.worn_out for reply in told[:-1])
    if truths[0] == "files":
        assert told[0].reason.startswith(
            f"ConnectionError: no connection, from OSError: [Errno 24] Too many open files ({__file__}:"
        )


def test_a_host_whose_calls_hang_says_that_it_is_worn_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "MOST_LATE_CALLS", 2)
    monkeypatch.setattr(workers, "late_calls", lambda: ["search", "read", "search", "search"])
    (reply,) = replies()
    assert reply.worn_out == (
        "4 calls never returned: search 3 times, read 1 times; give what they wait for a time limit of its own"
    )
    monkeypatch.setattr(workers, "MOST_LATE_CALLS", 5)
    assert replies()[0].worn_out == ""


def test_details_are_sent_as_plain_values() -> None:
    details = {"a": np.float32(0.5), "b": np.True_, "c": [1, "\ud83d"], "d": 10**400, "e": {1}, "f": (2, None)}
    sent = workers.sendable(EpisodeReply(reward=1.0, details=details))
    assert sent.details == {"a": 0.5, "b": True, "c": [1, "\ufffd"], "d": math.inf, "e": "{1}", "f": [2, None]}
    assert (sent.reward, sent.failure) == (1.0, "")


@pytest.mark.parametrize(
    ("details", "reason"),
    [
        ({"a": "x" * 100_001}, "ValueError: details of 100010 characters, expected at most 100000; shorten them"),
        ({("a", 1): 2}, "TypeError: keys must be str, int, float, bool or None, not tuple"),
    ],
)
def test_details_that_cannot_be_sent_cost_the_sample(details: Mapping[Any, Any], reason: str) -> None:
    sent = workers.sendable(EpisodeReply(reward=1.0, details=details))
    assert (sent.failure, sent.reason) == ("raised", reason)


def test_an_environment_that_cannot_start_fails_its_sample() -> None:
    reply = run(host().start(1, StartRequest(prompt=prompt(ground_truth="raise"))))
    assert (reply.failure, reply.reason) == ("raised", f"LookupError: no such game ({__file__}:50)")


def test_a_conversation_over_its_time_fails() -> None:
    async def talk() -> EpisodeReply:
        there = host(episode_timeout_s=0.05)
        await there.start(1, StartRequest(prompt=prompt()))
        await asyncio.sleep(0.1)
        return await there.act(1, turn("one"))

    reply = run(talk())
    assert (reply.failure, reply.reason) == ("timed_out", "no reply within environment.episode_timeout_s")


def test_a_conversation_goes_on_only_where_its_environment_can() -> None:
    async def talk(environment: str) -> tuple[EpisodeReply, EpisodeReply]:
        there = host()
        past = StartRequest(prompt=prompt(environment), turns=([*ids("one"), END], [*ids("two"), END]))
        return await there.start(1, past), await there.act(1, turn("stop", 2))

    started, ended = asyncio.run(talk("resumes"))
    assert (started.is_anew, ended.details) == (False, {"past": "one+two"})
    started, _ = asyncio.run(talk("echo"))
    assert started.is_anew


def test_hundreds_of_conversations_wait_at_once_and_all_are_closed() -> None:
    Echo.closed.clear()

    async def talk() -> float:
        there = host()
        keys = range(300)
        await asyncio.gather(*(there.start(key, StartRequest(prompt=prompt())) for key in keys))
        began = time.monotonic()
        await asyncio.gather(*(there.act(key, turn("one")) for key in keys))
        took = time.monotonic() - began
        await asyncio.gather(*(there.close(key) for key in keys))
        return took

    took = asyncio.run(talk())
    assert len(Echo.closed) == 300
    print(f"{300 / took:.0f} turns/s")


def test_rows_name_no_code(tmp_path: Path) -> None:
    """Only the configuration does, as the default or an entry."""
    module, mark = tmp_path / "evil.py", tmp_path / "mark"
    module.write_text(f"open({str(mark)!r}, 'w')")
    with pytest.raises(
        ConfigError, match=r"environment '.*evil.py:Game': rows name code, which only the configuration may; "
    ):
        open_environments(EnvironmentConfig(), [f"{module}:Game"])
    assert not mark.exists()
    name = f"{HERE}Echo"
    assert list(open_environments(EnvironmentConfig(default=name), [name])) == [name]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"type": "calculater"}, "did you mean 'calculator'"),
        (
            {"type": "no.such.module:Thing"},
            r"mine.type: got no.such.module:Thing, but there is no module no; install it",
        ),
        ({"type": f"{HERE}Nothing"}, "has no 'Nothing'; name one of what it has: .*Echo"),
        ({"type": f"{HERE}Echo", "arguments": {"open": 1}}, r"entries.mine.arguments: got \{'open': 1\}; .*open"),
        ({"type": f"{HERE}EpisodeReply"}, "EpisodeReply has no start; derive it from megarl.environments.Environment"),
    ],
)
def test_a_wrong_entry_is_refused_at_the_start(entry: Mapping[str, Any], message: str) -> None:
    config = EnvironmentConfig(entries={"mine": EnvironmentEntry(**entry)})
    with pytest.raises(ConfigError, match=message):
        open_environments(config, ["mine"])


def test_a_file_may_define_dataclasses_and_is_run_once(tmp_path: Path) -> None:
    """With annotations that are strings, dataclasses look their module up by name."""
    file, log = tmp_path / "game.py", tmp_path / "log"
    file.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        f"with open({str(log)!r}, 'a') as log:\n"
        "    log.write('run ')\n"
        "@dataclass\n"
        "class State:\n"
        "    turn: int = 1\n"
    )
    assert load_object(f"{file}:State", "environment.entries.mine.type")().turn == 1
    assert load_object(f"{file}:dataclass", "environment.entries.mine.type")
    assert log.read_text() == "run "


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise SystemExit(3)", r"entries.mine.type: .*mine.py:1: SystemExit"),
        ("x = (\n", r"entries.mine.type: .*mine.py:1: .*never closed"),
        (None, r"entries.mine.type: .*mine.py: no such file, expected a Python file with an environment"),
    ],
)
def test_a_file_that_does_not_load_is_named_with_its_key(source: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    if source is not None:
        file.write_text(source)
    with pytest.raises(ConfigError, match=message):
        load_object(f"{file}:Game", "environment.entries.mine.type")


class Slow(Echo):
    """Is made where an event loop runs, after so many seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        asyncio.get_running_loop()
        time.sleep(seconds)


def test_a_constructor_that_hangs_is_refused_at_the_start() -> None:
    entries = {
        name: EnvironmentEntry(type=f"{HERE}Slow", arguments={"seconds": seconds})
        for name, seconds in (("quick", 0), ("stuck", 600))
    }
    config = EnvironmentConfig(entries=entries, reply_timeout_s=2.0)
    assert list(open_environments(config, ["quick"])) == ["quick"]
    with pytest.raises(ConfigError, match=r"environment\.entries\.stuck\.type: no environment was made within 2 s"):
        open_environments(config, ["quick", "stuck"])
