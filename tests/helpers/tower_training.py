"""A rank that trains a model with its vision tower for a step, and saves and reads it as checkpoints and as files."""

import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.algos.objectives import SftAlgorithm
from megarl.config.schema import ActorConfig, ModelConfig
from megarl.types import Row
from megarl.types.messages import LoadRequest, Role, RoleSpec, UpdateRequest, Vision
from tests.helpers.rank_pool import RankContext
from tests.helpers.ranks import join_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerCase:
    """A model whose tower is trained; its rows, for a step, or None to read the checkpoint; files for its weights."""

    model: ModelConfig
    actor: ActorConfig
    vision: Vision
    rows: Sequence[Row] | None
    checkpoint: Path
    files: Sequence[str]


def train_or_read(context: RankContext, case: TowerCase) -> int:
    """Train and save, or read what was saved; write the weights. Return the number of this rank's parameters."""
    # Writers of checkpoints are processes of their own.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    worker = join_layout(context, case.actor.layout)
    role = RoleSpec(role=Role.ACTOR, model=case.model, settings=case.actor, vision=case.vision)
    worker.load(LoadRequest(roles=(role,), seed=0))
    if case.rows is None:
        worker.load_checkpoint(str(case.checkpoint), same_layout=())
    else:
        algorithm = SftAlgorithm()
        request = UpdateRequest(
            step=0,
            objective=algorithm,
            state=algorithm.initial_state(),
            denominators=algorithm.denominators(case.rows),
            temperature=1.0,
            lr=case.actor.optimizer.lr,
        )
        worker.update(case.rows, [[*range(len(case.rows))]], request)
        worker.save_checkpoint(str(case.checkpoint), portable=True)
        assert worker.finish_checkpoint(wait=True)
    worker.store_weights(case.files, with_checksums=False)
    return sum(each.numel() for chunk in worker.roles[Role.ACTOR].chunks for each in chunk.parameters())
