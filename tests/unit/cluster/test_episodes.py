"""Environment workers as processes: they are dealt conversations, and replaced when they die or hang."""

import asyncio
import gc
import os
import re
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from megarl.cluster.engines import EngineGroup
from megarl.cluster.episodes import COLLECTED_EVERY, SILENCE_S, EnvironmentWorkerActor, EnvironmentWorkers
from megarl.config.environments import EnvironmentConfig, EnvironmentEntry
from megarl.environments import Action, Environment, Reply
from megarl.environments import worker as environments_worker
from megarl.environments.worker import WorkerSpec
from megarl.errors import ConfigError, WorkerError
from megarl.host import loop
from megarl.rollout.conversations import Conversation, WorkerLostError
from megarl.types import Message, Prompt
from megarl.types.episodes import EpisodeReply, StartRequest, TurnRequest
from megarl_lab.recipes.tiny_model import make_byte_tokenizer
from tests.helpers.remote_processes import attend_until

END = 2
NAMED_S = 2.0


class Moody(Environment):
    """Echoes; `die` ends its process, `block` keeps the event loop from turning, `wait` takes a while."""

    async def reply(self, action: Action) -> Reply:
        if action.text == "die":
            os._exit(7)
        if action.text == "block":
            time.sleep(60)
        if action.text == "wait":
            await asyncio.sleep(0.5)
        if action.text == "keys":
            found = subprocess.run(["printenv"], capture_output=True, text=True, check=True).stdout.splitlines()
            return Reply(done=True, details={"names": [line.partition("=")[0] for line in (*os.environ, *found)]})
        if action.text == "exit":
            raise SystemExit(3)
        if action.text == "keeps a lock":
            return Reply(messages=(Message(role="user", content="kept"),), details={"lock": threading.Lock()})
        if action.text.startswith("/"):
            try:
                await asyncio.sleep(60)
            finally:
                # As the removal of a container is, which takes a while.
                await asyncio.sleep(0.5)
                Path(action.text).touch()
        if action.text == "hang":
            environments_worker.MOST_LATE_CALLS = 1
            begun = threading.Event()

            def wait() -> None:
                begun.set()
                threading.Event().wait()

            call = asyncio.create_task(asyncio.to_thread(wait))
            # A call that is given up before its thread runs never begins, and so is not late.
            while not begun.is_set():
                await asyncio.sleep(0.01)
            await asyncio.wait_for(call, 0.1)
        return Reply(messages=(Message(role="user", content=action.text),), reward=1.0)


@dataclass
class Told:
    """What a test's conversations were told, by their names."""

    hosts: EnvironmentWorkers
    replies: dict[str, list[EpisodeReply]] = field(default_factory=dict)
    lost: dict[str, bool] = field(default_factory=dict)
    talks: dict[str, Conversation] = field(default_factory=dict)

    def start(self, name: str) -> None:
        prompt = Prompt(uid=name, token_ids=(5,), data_source="d", ground_truth="", environment="moody")
        self.talks[name] = self.hosts.start(StartRequest(prompt=prompt))
        loop.spawn(self._hear(name))

    def act(self, name: str, text: str, turn: int = 0) -> None:
        ids = make_byte_tokenizer()(text, add_special_tokens=False)["input_ids"]
        self.hosts.act(self.talks[name], TurnRequest(token_ids=(*ids, END), turn=turn))
        loop.spawn(self._hear(name))

    async def _hear(self, name: str) -> None:
        try:
            reply = await self.talks[name].reply
            self.replies.setdefault(name, []).append(reply)
        except WorkerLostError:
            self.lost[name] = True

    def count(self) -> int:
        return sum(map(len, self.replies.values()))

    def gone(self) -> dict[str, bool]:
        """Those whose host has died, and whether it owed a reply."""
        return {name: name in self.lost for name, talk in self.talks.items() if talk.is_lost}


def spec(model: Path, **settings: int) -> WorkerSpec:
    entries = {"moody": EnvironmentEntry(type=f"{Path(__file__)}:Moody")}
    config = EnvironmentConfig(entries=entries, **settings)  # type: ignore[arg-type]
    return WorkerSpec(model_path=str(model), chat_template={}, names=("moody",), config=config)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def group(ray_session: None, model: Path) -> Iterator[EngineGroup]:
    """No engines, and two hosts."""
    engines = EngineGroup([], timeout_s=10.0)
    settings = spec(model, hosts=2, max_host_restarts=4)
    engines.environment_workers = EnvironmentWorkers(settings, timeout_s=240.0, trouble=engines.trouble)
    yield engines
    engines.environment_workers.close()
    loop.abandon()


@pytest.fixture(autouse=True)
def no_leftover_tasks() -> None:
    """Those that read the hosts' replies last as long as the hosts."""


def told_by(group: EngineGroup) -> Told:
    assert group.environment_workers is not None
    return Told(group.environment_workers)


def wait(group: EngineGroup, until: Callable[[], bool]) -> None:
    attend_until(group, until, timeout_s=90.0, doing=lambda: "talking")


def test_conversations_are_dealt_to_hosts_and_their_replies_come_in_waits(group: EngineGroup) -> None:
    told = told_by(group)
    for name in "abcd":
        told.start(name)
    assert len(group.environment_workers.busy()) == 2
    wait(group, lambda: told.count() == 4)
    assert group.environment_workers.busy() == []
    for name in "abcd":
        told.act(name, f"I am {name}")
    wait(group, lambda: told.count() == 8)
    texts = {name: make_byte_tokenizer().decode(replies[1].token_ids) for name, replies in told.replies.items()}
    assert texts == {name: f"\n<|im_start|>user\nI am {name}<|im_end|>\n<|im_start|>assistant\n" for name in "abcd"}
    assert [replies[1].reward for replies in told.replies.values()] == [1.0] * 4


def test_environments_and_what_they_start_have_no_keys_of_the_user(group: EngineGroup) -> None:
    told = told_by(group)
    told.start("a")
    wait(group, lambda: told.count() == 1)
    told.act("a", "keys")
    wait(group, lambda: told.count() == 2)
    names = told.replies["a"][1].details["names"]
    assert {"PATH", "TMPDIR"} <= set(names)
    assert [name for name in names if name == "HF_TOKEN" or name.startswith("RAY")] == []


@pytest.mark.parametrize("blocks", [False, True], ids=["stopped", "blocked by an environment"])
def test_a_host_that_hangs_is_replaced(group: EngineGroup, blocks: bool) -> None:
    assert group.environment_workers is not None
    told = told_by(group)
    told.start("a")
    wait(group, lambda: told.count() == 1)
    roster = group.environment_workers.processes[0].roster
    # Long enough for the other host, which lives, on a busy machine.
    roster.silence_s = 4.0
    if blocks:
        told.act("a", "block")
    else:
        os.kill(group.environment_workers.processes[told.talks["a"].worker].location.pid, signal.SIGSTOP)
    wait(group, lambda: "a" in told.gone())
    roster.silence_s = SILENCE_S
    assert told.gone() == {"a": blocks}


def test_a_conversation_begins_again_while_its_host_is_replaced(group: EngineGroup) -> None:
    """Before there is another host that its request could go to."""
    told = told_by(group)

    async def go_on() -> None:
        try:
            await told.talks["a"].reply
        except WorkerLostError:
            told.start("a")
            if told.talks["a"].worker != lost:
                told.start("a")

    told.start("a")
    wait(group, lambda: told.count() == 1)
    lost = told.talks["a"].worker
    told.act("a", "die")
    loop.spawn(go_on())
    wait(group, lambda: not told.talks["a"].is_lost and told.talks["a"].reply.done())
    assert told.talks["a"].worker == lost
    told.act("a", "I am back")
    wait(group, lambda: told.talks["a"].reply.done())
    assert told.talks["a"].reply.result().reward == 1.0


def test_a_host_that_dies_is_replaced_and_its_conversations_learn_of_it(
    group: EngineGroup, capsys: pytest.CaptureFixture[str]
) -> None:
    told = told_by(group)
    # One more than the tests before this one took.
    roster = group.environment_workers.processes[0].roster
    roster._max_restarts = roster.num_restarts + 1
    for name in "abcd":
        told.start(name)
    wait(group, lambda: told.count() == 4)
    told.act("a", "die")
    told.act("b", "wait")
    wait(group, lambda: "a" in told.gone())
    # Those of the other host go on.
    assert told.gone() == {"a": True, "c": False}
    told.start("a")
    wait(group, lambda: len(told.replies["a"]) == 2 and len(told.replies["b"]) == 2)
    written = capsys.readouterr()
    assert re.search(r"talking: environment worker \d died on .*; restart (\d) of \1", written.out + written.err)
    # No restart is left.
    told.act("a", "die")
    began = time.monotonic()
    with pytest.raises(WorkerError, match=r"talking: environment worker \d died"):
        wait(group, lambda: False)
    assert time.monotonic() - began < NAMED_S


def test_a_host_outlives_what_environments_raise_and_find_and_is_replaced_when_it_is_worn_out(
    ray_session: None, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engines = EngineGroup([], timeout_s=10.0)
    settings = spec(model, hosts=1, max_host_restarts=1)
    engines.environment_workers = EnvironmentWorkers(settings, timeout_s=240.0, trouble=engines.trouble)
    told = told_by(engines)
    for name in "ab":
        told.start(name)
    wait(engines, lambda: told.count() == 2)
    told.act("a", "exit")
    told.act("b", "keeps a lock")
    wait(engines, lambda: told.count() == 4)
    assert told.replies["a"][1].reason.startswith("SystemExit: 3 (")
    assert re.match("<unlocked _thread.lock object", told.replies["b"][1].details["lock"])
    told.act("a", "hang", 1)
    wait(engines, lambda: "b" in told.gone())
    assert told.gone() == {"a": False, "b": False}
    written = capsys.readouterr()
    why = "environment worker 0 is worn out: 1 calls never returned: wait 1 times; give what they wait for a time limit"
    assert f"warning: {why} of its own on " in written.out + written.err
    # Nobody's conversation began again, and a step counts what happened in it.
    counted = [engines.environment_workers.metrics() for _ in range(2)]
    assert counted == [{"environment/restarts": 1.0}, {"environment/restarts": 0.0}]
    told.start("c")
    wait(engines, lambda: "c" in told.replies)
    told.act("c", "hang")
    with pytest.raises(WorkerError, match=re.escape(why)):
        wait(engines, lambda: False)
    engines.environment_workers.close()


@pytest.mark.parametrize("whole_run", [False, True])
def test_what_conversations_have_begun_is_undone_when_they_or_the_workers_end(
    ray_session: None, model: Path, tmp_path: Path, whole_run: bool
) -> None:
    engines = EngineGroup([], timeout_s=10.0)
    engines.environment_workers = EnvironmentWorkers(spec(model), timeout_s=240.0, trouble=engines.trouble)
    told = told_by(engines)
    told.start("a")
    wait(engines, lambda: told.count() == 1)
    told.act("a", str(tmp_path / "undone"))
    began = time.monotonic()
    # For the request to leave.
    loop.wait(asyncio.sleep(0.2))
    if not whole_run:
        engines.environment_workers.end(told.talks["a"])
        loop.wait(asyncio.sleep(0.2))
    engines.environment_workers.close()
    assert (tmp_path / "undone").exists()
    assert time.monotonic() - began < 30
    loop.abandon()


def test_a_wrong_environment_is_named_when_hosts_start(ray_session: None, model: Path) -> None:
    wrong = WorkerSpec(model_path=str(model), chat_template={}, names=("modest",), config=EnvironmentConfig())
    with pytest.raises(ConfigError, match=r"^environment: unknown environment 'modest'"):
        EnvironmentWorkers(wrong, timeout_s=240.0, trouble=asyncio.Event())


class Cycle:
    """Holds itself, as a client of an agent does by what belongs to it."""

    def __init__(self) -> None:
        self.itself = self


class Closing:
    async def close(self, key: int) -> None: ...


def test_what_conversations_leave_in_cycles_is_freed_when_some_have_ended() -> None:
    actor = EnvironmentWorkerActor.__new__(EnvironmentWorkerActor)
    actor._worker, actor._num_ended = Closing(), 0  # type: ignore[assignment]
    actor._requests, actor._ending = {}, set()
    gc.disable()
    try:
        left = weakref.ref(Cycle())
        asyncio.run(actor.end(range(COLLECTED_EVERY - 1)))
        assert left() is not None
        asyncio.run(actor.end([COLLECTED_EVERY]))
        assert left() is None
    finally:
        gc.enable()
