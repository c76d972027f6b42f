"""Calls to groups of remote processes: order, merging, and which failure is reported. Ray is real, the work is not."""

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import ActorDiedError

from megarl.algos.sft import SftAlgorithm
from megarl.cluster import EngineGroup, Process, WorkerGroup, put_rows, wait_all
from megarl.cluster.location import Location
from megarl.cluster.processes import locate, wait_living
from megarl.cluster.ray_session import _wait_for_port
from megarl.cluster.stacks import stacks_directory, write_stacks_on_signal
from megarl.config.schema import LayoutConfig
from megarl.errors import EngineDiedError, NonFiniteError, WorkerError
from megarl.janitor import Janitor
from megarl.parallel.messages import Role, RowScores, StoreResult, UpdateRequest, UpdateResult
from megarl.parallel.platform import apply_environment
from megarl.ray_environment import RAY_ENVIRONMENT
from megarl.rewards.verifier import VerifierOptions, VerifierPool
from megarl.rollout.engine import Completion, GenerationRequest
from megarl.types import AlgoState, Denominators, FinishReason, Row
from tests.helpers.verifier import details_of, job, wait_for_end

NUM_PROCESSES = 4
LAYOUT = LayoutConfig(tp=2, dp=2)


class Worker:
    """Stands in for a rank or an engine: does as it is told, slowly if asked to."""

    def __init__(self, index: int) -> None:
        self.index, self.num_asked, self.workers = index, 0, list[int]()
        write_stacks_on_signal()

    def locate(self) -> Location:
        host, stacks = ray.get_runtime_context().get_node_id(), str(stacks_directory())
        return Location(host=host, address="", device_ids=(), pid=os.getpid(), stacks=stacks)

    def lost_workers(self) -> list[int]:
        self.num_asked += 1
        return self.workers

    def times_asked(self) -> int:
        return self.num_asked

    def lose(self, worker: int) -> None:
        self.workers = [worker]

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, method)(*args, **kwargs)

    def answer(self, after_s: float) -> int:
        time.sleep(after_s)
        return self.index

    def fail(self, error: Exception, after_s: float) -> None:
        time.sleep(after_s)
        raise error

    def die(self, after_s: float) -> None:
        time.sleep(after_s)
        os._exit(1)

    def wait_for_port(self) -> None:
        """Code of megarl that takes long: nothing listens there."""
        _wait_for_port("127.0.0.1:1", time.monotonic() + 60.0)

    # --- as a rank

    def call_with_rows(self, method: str, shards: Any, micro_batches: Any, **kwargs: Any) -> Any:
        return getattr(self, method)(shards.fetch(micro_batches), micro_batches, **kwargs)

    def score(self, rows: dict[int, Row], micro_batches: Any, **_: Any) -> RowScores | None:
        """[replica, first token] for every row, and that negated, from the first rank of each replica."""
        values = {i: np.asarray([self.index // 2, rows[i].token_ids[0]], np.float32) for b in micro_batches for i in b}
        scores = {"logprobs": values, "entropy": {i: -array for i, array in values.items()}}
        return RowScores(scores=scores) if self.index % 2 == 0 else None

    def update(self, rows: dict[int, Row], micro_batches: Any, request: UpdateRequest) -> UpdateResult | None:
        scores = self.score(rows, micro_batches)
        return None if scores is None else UpdateResult(metrics={"lr": request.lr}, before=scores.scores["logprobs"])

    def store_weights(self, files: Sequence[str], *, with_checksums: bool, role: Role) -> StoreResult:
        assert role is Role.CRITIC
        sums = {"w": 2**63 + self.index} if with_checksums else {}
        return StoreResult(num_elements={"w": 10, f"w{self.index}": 1}, checksums=sums)

    # --- as an engine

    def stream(self, requests: Sequence[GenerationRequest]) -> Iterator[dict[int, Completion]]:
        """The first request at the end. A request for no tokens kills the engine, one for -1 fails."""
        for place, request in reversed(list(enumerate(requests))):
            time.sleep(0.1 * (2 - self.index % 3))
            if request.max_tokens == 0:
                os._exit(1)
            if request.max_tokens < 0:
                raise NonFiniteError("weights are spoiled")
            completion = Completion(
                token_ids=np.asarray([request.seed, self.index]),
                logprobs=np.zeros(2, np.float32),
                finish_reason=FinishReason.STOP,
                weight_versions=np.zeros(2, np.int64),
            )
            yield {place: completion}

    def load_weights(self, files: Sequence[str], *, version: int, with_checksums: bool) -> list[dict[str, int]]:
        return [{files[0]: version + self.index}]


@pytest.fixture(scope="module")
def ray_session() -> Iterator[None]:
    janitor = Janitor()
    apply_environment()
    os.environ.update(RAY_ENVIRONMENT)
    try:
        ray.init(
            address="local",
            num_cpus=NUM_PROCESSES,
            object_store_memory=80 << 20,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            _temp_dir=str(janitor.scope.temp_dir),
            runtime_env={"env_vars": {"TMPDIR": str(janitor.scope.temp_dir)}},
        )
        yield
    finally:
        ray.shutdown()
        janitor.close()


@pytest.fixture(scope="module")
def processes(ray_session: None) -> list[Process]:
    return [start(index) for index in range(NUM_PROCESSES)]


def start(index: int) -> Process:
    return Process(name=f"trainer rank {index}", actor=ray.remote(Worker).options(num_cpus=0.5).remote(index))


def start_run(*names: str) -> list[Process]:
    """Processes of one run, who know of each other. Those of earlier ones, which did too, end now."""
    gc.collect()
    return locate({name: start(i).actor for i, name in enumerate(names)}, timeout_s=120.0)


def kill_after(delay_s: float, process: Process) -> None:
    threading.Timer(delay_s, os.kill, (process.location.pid, signal.SIGKILL)).start()


def calls(processes: Sequence[Process], *requests: tuple[Any, ...]) -> list[tuple[Process, Any]]:
    return [(p, p.actor.call.remote(*r)) for p, r in zip(processes, requests, strict=False)]


def test_answers_come_in_the_order_of_the_calls(processes: list[Process]) -> None:
    pending = calls(processes, ("answer", 0.4), ("answer", 0.0), ("answer", 0.2))
    assert wait_all(pending, timeout_s=30.0, doing="waiting") == [0, 1, 2]


def test_who_did_not_answer_is_named(processes: list[Process]) -> None:
    pending = calls(processes, ("answer", 0.0), ("answer", 3.0), ("answer", 0.0))
    ray.get([pending[0][1], pending[2][1]])
    with pytest.raises(WorkerError, match="waiting: no answer from trainer rank 1 within 0 s"):
        wait_all(pending, timeout_s=0.2, doing="waiting")


def test_what_those_who_did_not_answer_do_is_said(ray_session: None) -> None:
    """One is stopped, one waits in code of ours; the stacks of the second are kept."""
    stopped, waiting = start_run("trainer rank 0", "trainer rank 1")
    os.kill(stopped.location.pid, signal.SIGSTOP)
    pending = calls([stopped, waiting], ("answer", 0.0), ("wait_for_port",))
    try:
        with pytest.raises(WorkerError) as caught:
            wait_all(pending, timeout_s=4.0, doing="updating")
    finally:
        os.kill(stopped.location.pid, signal.SIGCONT)
    message = str(caught.value)
    assert message.startswith(
        "updating: no answer from trainer rank 0, trainer rank 1 within 4 s (trainer rank 0 is stopped; "
    )
    assert "trainer rank 1 is at megarl/cluster/ray_session.py:" in message
    assert "in _wait_for_port" in Path(waiting.location.stacks, f"{waiting.location.pid}.txt").read_text()


@pytest.mark.parametrize("first_call", [(), ("answer", 0.0)], ids=["idle", "done"])
def test_the_death_of_a_process_that_nobody_waits_for_ends_the_wait(ray_session: None, first_call: Any) -> None:
    """An engine that has nothing to do, or a rank that has done its part."""
    rank, doomed = start_run("trainer rank 0", "engine 0")
    pending = calls([rank], ("answer", 20.0)) + (calls([doomed], first_call) if first_call else [])
    kill_after(1.0, doomed)
    began = time.monotonic()
    with pytest.raises(WorkerError, match=r"^updating: engine 0 died; see RUN/logs$"):
        wait_all(pending, timeout_s=30.0, doing="updating")
    # Within two seconds of the death; the rest is for a machine that does other things too.
    assert time.monotonic() - began < 1.0 + 2.0 + 7.0


def test_the_death_of_an_engines_worker_ends_the_wait(ray_session: None) -> None:
    rank, engine = start_run("trainer rank 0", "engine 0")
    ray.get(engine.actor.call.remote("lose", 1))
    with pytest.raises(WorkerError, match=r"^updating: worker 1 of engine 0 died; see RUN/logs$"):
        wait_all(calls([rank], ("answer", 20.0)), timeout_s=30.0, doing="updating")


def allow_restarts(engine: Process) -> Process:
    engine.roster.allow_restarts([engine.name], 1)
    return engine


def test_an_idle_engine_that_can_be_restarted_does_not_end_a_wait(ray_session: None) -> None:
    rank, engine = start_run("trainer rank 0", "engine 0")
    kill_after(0.5, allow_restarts(engine))
    assert wait_all(calls([rank], ("answer", 6.0)), timeout_s=60.0, doing="updating") == [0]
    assert engine.roster.lost == {"engine 0": engine}
    assert engine.roster.living == [rank]


def test_a_wait_for_an_engine_that_can_be_restarted_ends(ray_session: None) -> None:
    """Unless nobody needs its answer: then the others are waited for."""
    rank, engine = start_run("trainer rank 0", "engine 0")
    kill_after(0.5, allow_restarts(engine))
    with pytest.raises(EngineDiedError, match=r"^syncing weights: engine 0 died; see RUN/logs$"):
        wait_all(calls([rank, engine], ("answer", 20.0), ("answer", 20.0)), timeout_s=60.0, doing="syncing weights")
    rank, engine = start_run("trainer rank 0", "engine 0")
    kill_after(0.5, allow_restarts(engine))
    pending = calls([rank, engine], ("answer", 3.0), ("answer", 20.0))
    wait_living(pending, timeout_s=60.0, doing="waking engines")
    assert ray.get(pending[0][1], timeout=0) == 0
    assert engine.roster.lost == {"engine 0": engine}


@pytest.mark.parametrize("lose", [True, False], ids=["lost a worker", "failed"])
def test_an_engine_that_fails_has_died_if_it_has_lost_a_worker(lose: bool, ray_session: None) -> None:
    """vLLM raises some error of its own. The engine, which would live on, is ended."""
    (engine,) = start_run("engine 0")
    allow_restarts(engine)
    if lose:
        ray.get(engine.actor.call.remote("lose", 1))
    with pytest.raises(WorkerError) as caught:
        wait_all(calls([engine], ("fail", RuntimeError("cancelled"), 0.0)), timeout_s=30.0, doing="syncing weights")
    what = "worker 1 of engine 0 died" if lose else "engine 0 failed with RuntimeError: cancelled"
    assert str(caught.value) == f"syncing weights: {what}; see RUN/logs"
    assert isinstance(caught.value, EngineDiedError) is lose
    if lose:
        with pytest.raises(ActorDiedError):
            ray.get(engine.actor.call.remote("answer", 0.0))
    else:
        assert ray.get(engine.actor.call.remote("answer", 0.0)) == 0


def test_who_is_busy_with_something_else_is_asked_once(ray_session: None) -> None:
    rank, engine = start_run("trainer rank 0", "engine 0")
    # It works for longer than the wait lasts, on a busy machine too.
    working = calls([engine], ("answer", 8.0))
    assert wait_all(calls([rank], ("answer", 2.0)), timeout_s=30.0, doing="updating") == [0]
    assert wait_all(working, timeout_s=30.0, doing="generating") == [1]
    assert ray.get(engine.actor.call.remote("times_asked")) == 1


def test_a_process_that_died_earlier_is_the_cause_of_an_error(ray_session: None) -> None:
    rank, doomed = start_run("trainer rank 0", "engine 0")
    os.kill(doomed.location.pid, signal.SIGKILL)
    pending = calls([rank], ("fail", RuntimeError("Connection closed by peer"), 0.1))
    with pytest.raises(WorkerError, match=r"^updating: engine 0 died; see RUN/logs$"):
        wait_all(pending, timeout_s=30.0, doing="updating")


def test_a_dead_process_is_the_cause_and_not_its_peers_errors(processes: list[Process]) -> None:
    """As with a rank: its peers' collectives fail first, with what sounds like a network problem."""
    doomed = start(7)
    ray.get(doomed.actor.call.remote("answer", 0.0))
    pending = calls([processes[0], doomed], ("fail", RuntimeError("Connection closed by peer"), 0.0), ("die", 0.3))
    with pytest.raises(WorkerError, match="updating: trainer rank 7 died; see RUN/logs"):
        wait_all(pending, timeout_s=30.0, doing="updating")


def test_megarls_own_error_is_raised_as_it_is(processes: list[Process]) -> None:
    pending = calls(
        processes, ("fail", RuntimeError("gloo"), 0.0), ("fail", NonFiniteError("step 3: loss is nan"), 0.2)
    )
    with pytest.raises(NonFiniteError, match=r"^step 3: loss is nan$"):
        wait_all(pending, timeout_s=30.0, doing="updating")


def test_other_errors_name_the_process(processes: list[Process]) -> None:
    pending = calls(processes, ("answer", 0.0), ("fail", KeyError("lm_head"), 0.0))
    with pytest.raises(WorkerError, match="loading: trainer rank 1 failed with KeyError: 'lm_head'; see RUN/logs"):
        wait_all(pending, timeout_s=30.0, doing="loading")


def rows(count: int) -> list[Row]:
    """Row i holds token i."""
    return [
        Row(uid=f"u{i}", sample_index=0, token_ids=np.asarray([i, 1]), num_prompt_tokens=1, loss_mask=np.ones(1, bool))
        for i in range(count)
    ]


def test_only_the_shards_of_the_wanted_rows_are_fetched(ray_session: None, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = put_rows(rows(130))
    assert len(shards.refs) == 3
    fetched: list[Any] = []
    get = ray.get

    def recording_get(refs: list[Any]) -> Any:
        fetched.extend(refs)
        return get(refs)

    monkeypatch.setattr(ray, "get", recording_get)
    got = shards.fetch([[129, 3], [128]])
    assert {i: int(row.token_ids[0]) for i, row in got.items()} == {3: 3, 128: 128, 129: 129}
    assert fetched == [shards.refs[0], shards.refs[2]]


PLAN = [[[4, 0], [2]], [[1], [3]]]
# Which replica has which row, and the row's own token: what `Worker.score` answers.
SCORES = {0: [0, 0], 1: [1, 1], 2: [0, 2], 3: [1, 3], 4: [0, 4]}


def test_scores_of_all_replicas_come_in_row_order(processes: list[Process]) -> None:
    """Four ranks: two replicas of two tensor-parallel neighbours."""
    group = WorkerGroup(processes, layout=LAYOUT, timeout_s=30.0)
    scored = group.score(Role.ACTOR, rows(5), PLAN, temperature=1.0, step=1)
    assert scored.keys() == {"logprobs", "entropy"}
    assert [s.tolist() for s in scored["logprobs"]] == [SCORES[i] for i in range(5)]
    assert [s.tolist() for s in scored["entropy"]] == [[-x for x in SCORES[i]] for i in range(5)]


def test_update_merges_log_probs_and_reports_once(processes: list[Process]) -> None:
    request = UpdateRequest(
        step=1,
        objective=SftAlgorithm(),
        state=AlgoState(),
        denominators=Denominators(loss=1.0, tokens=1.0),
        temperature=1.0,
        lr=0.25,
    )
    result = WorkerGroup(processes, layout=LAYOUT, timeout_s=30.0).update(rows(5), PLAN, request)
    assert result.metrics == {"lr": 0.25}
    assert {i: v.tolist() for i, v in result.before.items()} == SCORES


def test_written_elements_and_checksums_add_up(processes: list[Process]) -> None:
    group = WorkerGroup(processes, layout=LAYOUT, timeout_s=30.0)
    stored = group.store_weights(Role.CRITIC, [Path("f")], with_checksums=True)
    assert stored.num_elements == {"w": 40, "w0": 1, "w1": 1, "w2": 1, "w3": 1}
    # 4 · 2⁶³ is 0 modulo 2⁶⁴.
    assert stored.checksums == {"w": 0 + 1 + 2 + 3}


def request(seed: int, *, max_tokens: int = 2) -> GenerationRequest:
    return GenerationRequest(token_ids=(seed,), seed=seed, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=max_tokens)


def collected(group: EngineGroup, requests: Sequence[GenerationRequest]) -> dict[int, list[int]]:
    """Tokens by position, in the order in which they came."""
    found: dict[int, list[int]] = {}
    group.collect(
        group.submit(requests), lambda i, completion: found.update({i: completion.token_ids.tolist()}), timeout_s=30.0
    )
    return found


def test_requests_are_dealt_out_and_told_of_as_they_finish(processes: list[Process]) -> None:
    group = EngineGroup(processes[:3], timeout_s=30.0)
    found = collected(group, [request(seed) for seed in range(7)])
    assert found == {seed: [seed, seed % 3] for seed in range(7)}
    # An engine takes its requests from the last to the first; none waits for another engine.
    assert [[i for i in found if i % 3 == engine] for engine in range(3)] == [[6, 3, 0], [4, 1], [5, 2]]
    assert list(found)[-1] == 0
    assert collected(group, [request(0)]) == {0: [0, 0]}


def test_failures_while_results_stream_in(processes: list[Process]) -> None:
    group = EngineGroup(processes[:2], timeout_s=30.0)
    with pytest.raises(NonFiniteError, match="weights are spoiled"):
        collected(group, [request(0, max_tokens=-1), request(1), request(2)])
    # A process of its own: it dies.
    group = EngineGroup([processes[0], start(1)], timeout_s=30.0)
    with pytest.raises(WorkerError, match="generating: trainer rank 1 died"):
        collected(group, [request(0), request(1, max_tokens=0), request(2), request(3)])
    group = EngineGroup([processes[0]], timeout_s=30.0)
    with pytest.raises(WorkerError, match="generating: no answer from trainer rank 0 within 0 s"):
        group.collect(group.submit([request(0)]), lambda i, completion: None, timeout_s=0.05)


def test_what_others_generate_is_taken_when_an_engine_dies(ray_session: None) -> None:
    engines = start_run("engine 0", "engine 1")
    allow_restarts(engines[1])
    # Engine 1 finishes its last request, and dies at the one before.
    requests = [request(0), request(1), request(2), request(3, max_tokens=0), request(4), request(5)]
    assert collected(EngineGroup(engines, timeout_s=30.0), requests).keys() == {0, 2, 4, 5}
    assert engines[1].roster.lost == {"engine 1": engines[1]}


def test_every_engine_loads_the_same_files(processes: list[Process]) -> None:
    loaded = EngineGroup(processes[:3], timeout_s=30.0).load_weights([Path("f")], version=5, with_checksums=True)
    assert loaded == [{"f": 5}, {"f": 6}, {"f": 7}]


class Judge:
    """An actor that owns a verifier pool, made and used in a thread that is not the main one."""

    def __init__(self) -> None:
        self.pool = VerifierPool(VerifierOptions(num_workers=1, soft_limit_s=0.2, deadline_s=0.6))

    def judge(self) -> tuple[bool, list[str], dict[str, Any]]:
        scorers = ("same_text", "loop", "block_signals", "process")
        verdicts = self.pool.score_all([job(scorer) for scorer in scorers])
        is_main = threading.current_thread() is threading.main_thread()
        return is_main, [verdict.outcome for verdict in verdicts], details_of(verdicts[-1])

    def hang(self) -> None:
        self.pool.score_all([job("block_signals")] * 100)


def test_a_verifier_pool_in_an_actor(ray_session: None) -> None:
    judge = ray.remote(Judge).options(num_cpus=0.5, max_concurrency=2).remote()
    is_main, outcomes, worker = ray.get(judge.judge.remote(), timeout=60)
    assert not is_main
    assert outcomes == ["scored", "timed_out", "timed_out", "scored"]
    judge.hang.remote()
    time.sleep(0.2)
    ray.kill(judge)
    wait_for_end(int(worker["pid"]))
    wait_for_end(int(worker["parent"]))
