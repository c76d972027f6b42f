"""A trainer that compares its log-probs with its engines' after every sync."""

from dataclasses import dataclass, field

import numpy as np

from megarl.train.loop import Trainer
from megarl.types import Row
from megarl.types.messages import Role


@dataclass(kw_only=True)
class Seen:
    """What a run reports. Log-probs are those of `compared_rows`, end to end."""

    run_id: str = ""
    pids: dict[str, int] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    trainer_logprobs: list[list[float]] = field(default_factory=list)  # [sync][token]
    engine_logprobs: list[list[list[float]]] = field(default_factory=list)  # [sync][engine][token]


def checked(trainer: Trainer, seen: Seen) -> Trainer:
    """The trainer, which now writes into `seen` after every sync."""
    push = trainer.supervisor.push

    def push_and_compare(version: int) -> dict[str, float]:
        metrics = push(version)
        calls = list(seen.calls)
        rows = compared_rows(trainer.inputs.spec.dims.vocab)
        logprobs = trainer.updates.updaters[Role.ACTOR].forward(rows, step=version)["logprobs"]
        sequences = [row.token_ids.tolist() for row in rows]
        engines = trainer.cluster.engines
        found = [engines.prompt_logprobs(sequences, engine=i) for i in range(len(engines.processes))]
        seen.trainer_logprobs.append(np.concatenate(logprobs).tolist())
        seen.engine_logprobs.append([np.concatenate(each).tolist() for each in found])
        # The comparison is no part of the run.
        seen.calls[:] = calls
        return metrics

    trainer.supervisor.push = push_and_compare  # type: ignore[method-assign]
    return trainer


def compared_rows(vocab: int) -> list[Row]:
    """Rows of random tokens that score every token but the first, as an engine's prompt log-probs do."""
    num_rows, num_tokens, rng = 4, 40, np.random.default_rng(0)
    return [
        Row(
            uid=f"s{i}",
            sample_index=0,
            token_ids=rng.integers(3, vocab, num_tokens),
            num_prompt_tokens=1,
            loss_mask=np.ones(num_tokens - 1, dtype=np.bool_),
        )
        for i in range(num_rows)
    ]
