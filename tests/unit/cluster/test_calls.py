"""Calls to groups of remote processes: order, merging, and which failure is reported."""

import inspect
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from megarl.algos.objectives import SftAlgorithm
from megarl.cluster.engine_slots import wait_started
from megarl.cluster.engines import EngineGroup
from megarl.cluster.processes import wait_all
from megarl.cluster.remotes import Process, results
from megarl.cluster.row_shards import put_rows
from megarl.cluster.workers import RankGroup, RoleWorkers
from megarl.config.schema import ActorConfig, LayoutConfig, ModelConfig
from megarl.errors import NonFiniteError, WorkerError
from megarl.rewards.verifier import VerifierOptions, VerifierPool
from megarl.types import AlgoState, Row
from megarl.types.messages import ForwardRequest, Head, LoadRequest, MicroBatchPlan, Role, RoleSpec, UpdateRequest
from tests.helpers.remote_processes import Worker, calls, collected, request, start_run
from tests.helpers.verifier import details_of, job, wait_for_end

LAYOUT = LayoutConfig(tp=2, dp=2)


def test_answers_come_in_the_order_of_the_calls(processes: list[Process[Worker]]) -> None:
    pending = calls(processes, ("answer", 0.4), ("answer", 0.0), ("answer", 0.2))
    assert wait_all(pending, timeout_s=120.0, doing="waiting") == [0, 1, 2]


def test_processes_have_the_priority_of_who_starts_them(processes: list[Process[Worker]]) -> None:
    """Ray's own choice would let any neighbour starve them."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert [os.getpriority(os.PRIO_PROCESS, process.location.pid) for process in processes] == [own] * len(processes)


def test_who_did_not_answer_is_named(processes: list[Process[Worker]]) -> None:
    pending = calls(processes, ("answer", 0.0), ("answer", 1.0), ("answer", 0.0))
    results([pending[0], pending[2]])
    with pytest.raises(WorkerError, match="waiting: no answer from trainer rank 1 within 0 s"):
        wait_all(pending, timeout_s=0.2, doing="waiting")
    # The next test finds it idle.
    results([pending[1]])


def test_a_wait_for_engines_says_which_are_still_starting(
    ray_session: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compiling a model for the first time takes minutes, in which nothing else is printed."""
    pending = calls(start_run("engine 0", "engine 1"), ("answer", 0.0), ("answer", 2.5))
    results([pending[0]])
    assert wait_started(pending, timeout_s=120.0, doing="starting the engines", every_s=1.0) == [0, 1]
    first = capsys.readouterr().err.splitlines()[0]
    assert re.match(r"starting the engines: 1 of 2 after [12] s; engine 1 is ", first)


def test_megarls_own_error_is_raised_as_it_is(processes: list[Process[Worker]]) -> None:
    pending = calls(
        processes, ("fail", RuntimeError("gloo"), 0.0), ("fail", NonFiniteError("step 3: loss is nan"), 0.2)
    )
    with pytest.raises(NonFiniteError, match=r"^step 3: loss is nan$"):
        wait_all(pending, timeout_s=120.0, doing="updating")


def test_other_errors_name_the_process_and_the_line_of_code_that_is_not_megarls(
    processes: list[Process[Worker]],
) -> None:
    pending = calls(processes, ("answer", 0.0), ("fail", KeyError("lm_head"), 0.0))
    lines, start = inspect.getsourcelines(Worker.fail)
    line = start + next(i for i, text in enumerate(lines) if "raise" in text)
    said = f"loading: trainer rank 1 failed at {inspect.getfile(Worker)}:{line} with KeyError: 'lm_head'; see RUN/logs"
    with pytest.raises(WorkerError, match=re.escape(said)):
        wait_all(pending, timeout_s=120.0, doing="loading")


def rows(count: int) -> list[Row]:
    """Row i holds token i."""
    return [
        Row(uid=f"u{i}", sample_index=0, token_ids=np.asarray([i, 1]), num_prompt_tokens=1, loss_mask=np.ones(1, bool))
        for i in range(count)
    ]


PLAN = MicroBatchPlan([[[4, 0], [2]], [[1], [3]]])


def test_a_rank_fetches_its_own_rows_and_no_others(ray_session: None, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = put_rows(rows(130), PLAN)
    fetched: list[Any] = []
    get = ray.get

    def recording_get(ref: Any) -> Any:
        fetched.append(ref)
        return get(ref)

    monkeypatch.setattr(ray, "get", recording_get)
    assert {i: int(row.token_ids[0]) for i, row in shards[0].fetch().items()} == {4: 4, 0: 0, 2: 2}
    assert {i: int(row.token_ids[0]) for i, row in shards[1].fetch().items()} == {1: 1, 3: 3}
    assert fetched == [shard.ref for shard in shards]


def test_rows_come_out_of_a_shard_as_they_went_in(ray_session: None) -> None:
    one = Row(
        uid="a",
        sample_index=3,
        token_ids=np.asarray([7, 8, 9], np.int32),
        num_prompt_tokens=1,
        loss_mask=np.asarray([False, True]),
        quantities={"advantages": np.asarray([0.5, 1.5], np.float32)},
        routed_experts=np.asarray([[[1]], [[2]], [[-1]]], np.int16),
        num_uncounted=2,
    )
    other = Row(
        uid="b",
        sample_index=0,
        token_ids=np.asarray([1, 2, 4], np.int32),
        num_prompt_tokens=2,
        loss_mask=np.asarray([True]),
        quantities={"advantages": np.asarray([2.5], np.float32)},
        nucleus=np.asarray([[4, 5]], np.int32),
    )
    full, empty = put_rows([one, other], MicroBatchPlan([[[1], [0]], [[], []]]))
    assert empty.fetch() == {}
    got = full.fetch()
    for row, found in ((one, got[0]), (other, got[1])):
        assert (found.uid, found.sample_index) == (row.uid, row.sample_index)
        assert found.token_ids.dtype == np.int32
        assert found.token_ids.tolist() == row.token_ids.tolist()
        assert (found.num_prompt_tokens, found.num_uncounted) == (row.num_prompt_tokens, row.num_uncounted)
        assert found.loss_mask.tolist() == row.loss_mask.tolist()
        assert found.quantities["advantages"].tolist() == row.quantities["advantages"].tolist()
    assert got[0].routed_experts is not None
    assert got[0].routed_experts.tolist() == [[[1]], [[2]], [[-1]]]
    assert got[0].nucleus is got[1].routed_experts is None
    assert got[1].nucleus is not None
    assert got[1].nucleus.tolist() == [[4, 5]]


ACTOR = RoleSpec(role=Role.ACTOR, model=ModelConfig(), settings=ActorConfig(layout=LAYOUT))
CRITIC = RoleSpec(role=Role.CRITIC, model=ModelConfig(), settings=ActorConfig(layout=LAYOUT), head=Head.SCALAR)
# Which replica has which row, and the row's own token: what `Worker.forward` answers.
ANSWERS = {0: [0, 0], 1: [1, 1], 2: [0, 2], 3: [1, 3], 4: [0, 4]}


def loaded(processes: list[Process[Worker]]) -> RoleWorkers:
    """Ranks that host an actor and a critic."""
    workers = RoleWorkers([RankGroup(layout=LAYOUT, processes=processes)], timeout_s=120.0)
    workers.load(LoadRequest(roles=(ACTOR, CRITIC), seed=0))
    return workers


def test_answers_of_all_replicas_come_in_row_order(processes: list[Process[Worker]]) -> None:
    """Four ranks: two replicas of two tensor-parallel neighbours."""
    answers = loaded(processes).forward(rows(5), PLAN, ForwardRequest(role=Role.ACTOR, step=1))
    assert answers.keys() == {"logprobs", "entropy"}
    assert [s.tolist() for s in answers["logprobs"]] == [ANSWERS[i] for i in range(5)]
    assert [s.tolist() for s in answers["entropy"]] == [[-x for x in ANSWERS[i]] for i in range(5)]


def test_update_merges_log_probs_and_reports_once(processes: list[Process[Worker]]) -> None:
    request = UpdateRequest(
        step=1,
        objective=SftAlgorithm(),
        state=AlgoState(),
        denominators={"tokens": 1.0},
        temperature=1.0,
        lr=0.25,
    )
    result = loaded(processes).update(rows(5), PLAN, request)
    assert result.metrics == {"lr": 0.25}
    assert {i: v.tolist() for i, v in result.before.items()} == ANSWERS


def test_written_elements_and_checksums_add_up(processes: list[Process[Worker]]) -> None:
    stored = loaded(processes).store_weights([Path("f")], with_checksums=True, role=Role.CRITIC)
    assert stored.num_elements == {"w": 40, "w0": 1, "w1": 1, "w2": 1, "w3": 1}
    # 4 · 2⁶³ is 0 modulo 2⁶⁴.
    assert stored.checksums == {"w": 0 + 1 + 2 + 3}


def test_requests_are_dealt_out_and_told_of_as_they_finish(processes: list[Process[Worker]]) -> None:
    group = EngineGroup(processes[:3], timeout_s=120.0)
    found = collected(group, [request(seed) for seed in range(7)])
    assert found == {seed: [seed, seed % 3] for seed in range(7)}
    # An engine takes its requests from the last to the first; none waits for another engine.
    assert [[i for i in found if i % 3 == engine] for engine in range(3)] == [[6, 3, 0], [4, 1], [5, 2]]
    assert list(found)[-1] == 0
    assert collected(group, [request(0)]) == {0: [0, 0]}


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
