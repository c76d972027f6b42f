"""Fifty steps of a session are those of plain torch under every layout, for each objective; adapters train, too."""

from pathlib import Path

import numpy as np
import pytest

from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.compare import assert_within
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

# Of weights and losses.
AFTER_50, AFTER_50_SGD = 1e-4, 1e-5
NAMES = ("cross_entropy", "ppo_clip", "importance_sampling")
# With so large an epsilon and no momentum, AdamW at lr · epsilon is gradient descent at lr, to 1e-8.
SGD_EPS = 1e8


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), tied=True)


@pytest.mark.long
@pytest.mark.parametrize("sgd", [False, True], ids=["adamw", "sgd"])
@pytest.mark.parametrize("layout", ["{tp: 2, dp: 1}", "{dp: 2}", "{pp: 2, dp: 1}"])
@pytest.mark.timeout(900)
def test_fifty_steps_are_those_of_plain_torch(path: Path, tmp_path: Path, layout: str, sgd: bool) -> None:
    """Every step sees other rows, in passes of two and four rows."""
    settings = [f"actor.layout={layout}"]
    settings += [f"actor.optimizer={{eps: {SGD_EPS}, weight_decay: 0.0, warmup_steps: 0}}"] if sgd else []
    with open_session(path, tmp_path, *settings) as session:
        session.save(tmp_path / "start")
        for name in NAMES:
            session.load(tmp_path / "start")
            loop = TorchLoop(path, weight_decay=DECAY, eps=EPS, sgd=sgd)
            for number in range(50):
                rows, lr = as_read(rows_of(number), name), 1e-2 if sgd else 1e-4
                counts = session.denominators(rows, name)
                loss = session.accumulate(rows[:2], name, denominators=counts)["actor/loss"]
                loss += session.accumulate(rows[2:], name, denominators=counts)["actor/loss"]
                expected = loop.accumulate(rows, name)
                metrics = session.step(lr * SGD_EPS, (0.0, 0.0), CLIP) if sgd else session.step(lr, BETAS, CLIP)
                norm = loop.step(lr, betas=BETAS, clip=CLIP)
                if number == 0:
                    assert_within(f"{name}: first loss", loss, expected, atol=FIRST)
                    assert_within(f"{name}: norm", metrics["actor/grad_norm"] / norm, 1.0, atol=1e-5)
                    assert_same_model(session, loop, tmp_path / f"{name}-1", atol=FIRST)
            limit = AFTER_50_SGD if sgd else AFTER_50
            assert_within(f"{name}: last loss", loss, expected, atol=limit)
            assert_same_model(session, loop, tmp_path / f"{name}-50", atol=limit)


@pytest.mark.long
def test_adapters(path: Path, tmp_path: Path) -> None:
    """Only they move: the reference, which is the actor without them, stays where it was."""
    rows = as_read(rows_of(), "cross_entropy")
    overrides = ("actor.lora={rank: 4, alpha: 8}", "algo.kl={where: loss, coef: 0.1}")
    with open_session(path, tmp_path, *overrides) as session:
        before = session.logprobs(rows, "reference")
        for _ in range(3):
            losses = session.accumulate(rows, "cross_entropy")["actor/loss"]
            session.step(1e-2)
        assert session.accumulate(rows, "cross_entropy")["actor/loss"] < losses
        for one, other in zip(before, session.logprobs(rows, "reference"), strict=True):
            np.testing.assert_array_equal(one, other)
        session.export(tmp_path / "export")
        assert (tmp_path / "export" / "adapter" / "adapter_config.json").is_file()
