"""Sessions on a small model without engines, and rows with all that their objectives read."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.torch import load_file

import megarl
from megarl.types import Row
from tests.e2e.support import RUN_FILE
from tests.helpers.checkpoints import VOCAB_SIZE
from tests.helpers.compare import assert_within
from tests.helpers.rows import random_rows
from tests.helpers.torch_loop import TorchLoop

CASES = [(5, 12), (3, 20), (9, 7), (4, 15), (6, 9), (2, 18)]
BETAS, CLIP, EPS, DECAY = (0.8, 0.9), 0.5, 1e-4, 0.1
# Of weights and losses.
FIRST = 1e-6


def rows_of(seed: int = 0) -> list[Row]:
    """Rows with all that the objectives read; old log-probs are near the model's. Some have labels of their own."""
    rng, made = np.random.default_rng(seed), list[Row]()
    for row in random_rows(CASES, seed=seed):
        base = np.full(row.num_response_tokens, -np.log(512.0))
        off = {name: base + rng.uniform(-0.4, 0.4, len(base)) for name in ("old_logprobs", "rollout_logprobs")}
        if row.uid in ("p1", "p4"):
            row = replace(row, labels=rng.integers(0, VOCAB_SIZE, len(base), dtype=np.int32))
        own = {"advantages": rng.normal(size=len(base)), "correction": rng.uniform(0.0, 2.0, len(base))}
        made.append(row.with_quantities(**{name: x.astype(np.float32) for name, x in (off | own).items()}))
    return made


def as_read(rows: Sequence[Row], name: str) -> list[Row]:
    """The rows with what this objective's formula in `TorchLoop` reads."""
    kept = {"cross_entropy": (), "ppo_clip": ("advantages", "old_logprobs")}
    return [row.only(kept.get(name, ("advantages", "rollout_logprobs", "correction"))) for row in rows]


def open_session(path: Path, directory: Path, *overrides: str) -> megarl.Session:
    return megarl.Session(
        RUN_FILE,
        [
            f"model.path={path}",
            "data.train=[]",
            "data.max_prompt_tokens=128",
            "rollout.max_response_tokens=64",
            f"run.dir={directory}",
            f"actor.optimizer={{eps: {EPS}, weight_decay: {DECAY}, warmup_steps: 0}}",
            "actor.micro_batch_tokens=192",
            *overrides,
        ],
        with_engines=False,
    )


def assert_same_model(session: megarl.Session, loop: TorchLoop, directory: Path, *, atol: float) -> None:
    session.export(directory)
    got, expected = load_file(directory / "model.safetensors"), loop.weights()
    errors = {name: (value - expected[name]).abs().max().item() for name, value in got.items()}
    worst = max(errors, key=errors.__getitem__)
    assert_within(f"weights (worst: {worst})", errors[worst], 0.0, atol=atol)
