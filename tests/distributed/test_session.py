"""A session trains as plain torch does, and says after a failure what it still has."""

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import megarl
from megarl.algos.objectives import OwnObjective
from megarl.algos.preference import preference_objective
from megarl.config.schema import TrainPreferenceConfig
from megarl.errors import ConfigError, DataError, RunError
from megarl.types import PolicyOutputs, RowBatch
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.compare import assert_within
from tests.helpers.rows import random_rows
from tests.helpers.session_cases import (
    BETAS,
    CLIP,
    DECAY,
    EPS,
    FIRST,
    as_read,
    assert_same_model,
    open_session,
    rows_of,
)
from tests.helpers.torch_loop import TorchLoop


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), tied=True)


@pytest.fixture(scope="module")
def session(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[megarl.Session]:
    """Two replicas."""
    with open_session(path, tmp_path_factory.mktemp("runs")) as opened:
        yield opened


def test_calls_add_up_to_a_step_of_plain_torch(session: megarl.Session, path: Path, tmp_path: Path) -> None:
    loop, rows = TorchLoop(path, weight_decay=DECAY, eps=EPS), as_read(rows_of(), "cross_entropy")
    for row, got in zip(rows, session.logprobs(rows), strict=True):
        expected = np.where(row.loss_mask, loop.logprobs(row).detach().numpy(), 0)
        assert_within("log-probs", got, expected, atol=1e-5)
    before, counts = session.num_steps, session.denominators(rows, "cross_entropy")
    for number in range(2):
        losses = [
            session.accumulate(rows[i : i + 2], "cross_entropy", denominators=counts)["actor/loss"] for i in (0, 2, 4)
        ]
        session.logprobs(rows)
        assert_within("loss", sum(losses), loop.accumulate(rows, "cross_entropy"), atol=FIRST)
        metrics = session.step(1e-3, BETAS, CLIP)
        assert_within("norm", metrics["actor/grad_norm"], loop.step(1e-3, betas=BETAS, clip=CLIP), atol=1e-5)
        assert_same_model(session, loop, tmp_path / str(number), atol=FIRST * (1 + number))
    assert session.num_steps == before + 2
    directory, losses = tmp_path / "saved", []
    session.save(directory)
    for _ in range(2):
        losses.append(session.accumulate(rows, "cross_entropy")["actor/loss"])
        session.step(1e-3)
        losses.append(session.accumulate(rows, "cross_entropy")["actor/loss"])
        session.load(directory)
    assert losses[:2] == losses[2:]
    assert not session.num_accumulated
    with pytest.raises(ConfigError, match="exists; give a new directory"):
        session.save(directory)


def test_pairs_of_rows_stay_together(session: megarl.Session, tmp_path: Path) -> None:
    """DPO's loss and its gradient are those of plain torch, though two replicas share the rows."""
    rows = [
        row.only(()).with_quantities(ref_logprobs=row.quantities["rollout_logprobs"]) for row in rows_of() + rows_of(1)
    ]
    dpo, half = preference_objective(TrainPreferenceConfig(objective="dpo", beta=0.5)), len(rows) // 2
    session.export(tmp_path / "model")
    loop = TorchLoop(tmp_path / "model")
    ratios = [
        (loop.logprobs(row) - torch.from_numpy(row.quantities["ref_logprobs"]))[torch.from_numpy(row.loss_mask)].sum()
        for row in rows
    ]
    margins = torch.stack([chosen - rejected for chosen, rejected in zip(ratios[:half], ratios[half:], strict=True)])
    expected = -F.logsigmoid(0.5 * margins).mean()
    expected.backward()
    assert_within("loss", session.accumulate(rows, dpo)["actor/loss"], expected.item(), atol=1e-5)
    assert_within("norm", session.step(1e-9)["actor/grad_norm"], loop.step(1e-9), atol=1e-5)
    with pytest.raises(DataError, match="got 5 for an objective over pairs, expected an even number: all chosen rows"):
        session.accumulate(rows[:5], dpo)
    long = [row.with_quantities(ref_logprobs=np.zeros(60, np.float32)) for row in random_rows([(50, 60), (40, 60)])]
    with pytest.raises(DataError, match=r"have 210 tokens, expected at most actor.micro_batch_tokens=192 for a pair"):
        session.accumulate(long, dpo)


def own_loss(rows: RowBatch, out: PolicyOutputs) -> torch.Tensor:
    return -out.logprobs


def fails_on_ranks(rows: RowBatch, out: PolicyOutputs) -> torch.Tensor:
    if out.logprobs.abs().sum() and "p1/0" in rows.labels:
        raise LookupError("this row is not known")
    return -out.logprobs


def test_what_a_session_has_after_a_failure(session: megarl.Session, tmp_path: Path) -> None:
    rows = as_read(rows_of(), "cross_entropy")
    expected = session.accumulate(rows, "cross_entropy")["actor/loss"]
    assert session.accumulate(rows, OwnObjective(function=own_loss))["actor/loss"] == expected
    for objective, error, message in (
        ("no_such_loss", ConfigError, "unknown objective 'no_such_loss'; expected one of: algorithm, "),
        ("ppo_clip", DataError, "fails on row p0/0: KeyError: .*advantages was not computed"),
        (OwnObjective(function=lambda rows, out: out.logprobs.sum()), DataError, r"has shape \(\), expected \(1, 12\)"),
    ):
        with pytest.raises(error, match=message):
            session.accumulate(rows, objective)
    with pytest.raises(ConfigError, match="expected a number > 0 for 'tokens'"):
        session.accumulate(rows, "cross_entropy", denominators={"tokens": 0.0})
    with pytest.raises(RunError, match="save: accumulated gradients wait for a step"):
        session.save(tmp_path / "saved")
    assert session.num_accumulated == {"actor": 2}
    with pytest.raises(Exception, match="this row is not known") as failed:
        session.accumulate(rows, OwnObjective(function=fails_on_ranks))
    assert failed.value.__notes__ == [
        "session: the gradients of 2 earlier calls are discarded, and the weights of the actor are those after the "
        "last step"
    ]
    with pytest.raises(RunError, match="the actor has no accumulated gradients; call accumulate first"):
        session.step(1e-3)
    assert session.accumulate(rows, "cross_entropy")["actor/loss"] == expected
    session.discard()
    with pytest.raises(ConfigError, match="sample: the session was opened with with_engines=False"):
        session.sample(["1+1=?"])
    with pytest.raises(ConfigError, match="role: got 'reference', expected one of actor; "):
        session.logprobs(rows, "reference")


@pytest.mark.long
def test_a_call_costs_little(session: megarl.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `accumulate` and `step` do besides the calls of the ranks, which the trainer does, too."""
    rows, inside = as_read(rows_of(), "cross_entropy"), list[float]()

    def timed(call: Callable[..., object]) -> Callable[..., object]:
        def run(*arguments: object) -> object:
            began = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                inside.append(time.perf_counter() - began)

        return run

    workers = session._parts.workers
    for name in ("accumulate", "apply"):
        monkeypatch.setattr(workers, name, timed(getattr(workers, name)))
    outside = []
    for _ in range(20):
        for call in (lambda: session.accumulate(rows, "cross_entropy"), lambda: session.step(1e-6)):
            began = time.perf_counter()
            call()
            outside.append(time.perf_counter() - began - inside[-1])
    print(
        f"median overhead {1000 * statistics.median(outside):.2f} ms, worst {1000 * max(outside):.2f} ms; "
        f"ranks {1000 * statistics.median(inside):.1f} ms a call"
    )
    assert statistics.median(outside) <= 5e-3
