"""Run in a process of its own (`RankPool`): one cluster whose roles have a layout each, then share one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megarl.algos.build import algorithm_of
from megarl.algos.objectives import SftAlgorithm, ValueLoss
from megarl.cluster.cluster import Cluster
from megarl.cluster.roles import actor_role, roles_of
from megarl.errors import ConfigError
from megarl.train.export import export_model
from megarl.train.passes import CountedObjective, RolePasses, RoleUpdater
from megarl.types import AlgoState, FloatArray, Row
from megarl.types.messages import LoadRequest, Role, RoleSpec
from tests.e2e.support import small_config
from tests.helpers.rank_pool import RankContext
from tests.helpers.rows import random_rows

LAYOUTS = ("actor.layout={tp: 2, sequence_parallel: true}", "reference.layout={dp: 2}", "critic.layout={pp: 2}")
# An ε that is large against the rounding of gradients: weights whose gradient is noise would move by ±lr.
ADAM = ("lr=1e-3", "eps=1e-4")
OBJECTIVES: dict[Role, CountedObjective] = {Role.ACTOR: SftAlgorithm(), Role.CRITIC: ValueLoss()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What roles under some layouts say: outputs before an optimizer step of actor and critic, and its metrics."""

    logprobs: list[FloatArray]
    ref_logprobs: list[FloatArray]
    values: list[FloatArray]
    metrics: list[dict[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Roles under a layout each, under one, and under one after a checkpoint of the first optimizer step of the former.

    refusal: what the cluster says to a run with yet another layout; exported: values of an exported critic.
    """

    names: list[str]
    apart: list[Seen]
    together: list[Seen]
    resumed: Seen
    values_before_export: list[FloatArray]
    exported: list[FloatArray]
    refusal: str


def rows() -> list[Row]:
    made = random_rows([(5, 12), (3, 20), (9, 7), (4, 15), (6, 18), (2, 9), (8, 14), (7, 11)])
    return [row.with_quantities(returns=np.where(row.loss_mask, np.float32(i % 3), 0)) for i, row in enumerate(made)]


class Run:
    """Forward passes and updates of three roles on a cluster."""

    def __init__(self, cluster: Cluster, roles: Sequence[RoleSpec]) -> None:
        cluster.workers.load(LoadRequest(roles=tuple(roles), seed=0))
        self.passes = {role.role: RolePasses(cluster.workers, role) for role in roles}
        self.updaters = {
            role.role: RoleUpdater(cluster.workers, role, OBJECTIVES[role.role], total_steps=2)
            for role in roles
            if role.trainable
        }

    def step(self) -> Seen:
        """Run a forward pass of everyone, then update everyone."""
        outputs = {role: each.forward(rows(), step=1) for role, each in self.passes.items()}
        assert outputs[Role.ACTOR].keys() == outputs[Role.REFERENCE].keys() == {"logprobs", "entropy"}
        return Seen(
            logprobs=outputs[Role.ACTOR]["logprobs"],
            ref_logprobs=outputs[Role.REFERENCE]["logprobs"],
            values=outputs[Role.CRITIC]["values"],
            metrics=[dict(u.update(rows(), AlgoState(), step=1).metrics) for u in self.updaters.values()],
        )


def run(_: RankContext, model: str, critic: str, directory: str) -> Report:
    """Everything on one cluster without engines."""
    learning = [f"{role}.optimizer.{key}" for role in ("actor", "critic") for key in ADAM]
    config = small_config(
        Path(model), "use.algo=ppo", "algo.kl.where=loss", *LAYOUTS, *learning, f"critic.model_path={critic}"
    )
    roles = roles_of(config, algorithm_of(config).requires())
    shared = [replace(role, settings=replace(role.settings, layout=config.actor.layout)) for role in roles]
    checkpoint, export = Path(directory) / "checkpoint", Path(directory) / "export"
    checkpoint.mkdir()
    with Cluster(config, roles=roles, with_engine=False) as cluster:
        cluster.check_serves(config, roles)
        cluster.check_serves(config, shared)
        workers = cluster.workers
        before = Run(cluster, roles)
        apart = [before.step()]
        workers.start_checkpoint(checkpoint, portable=True)
        assert workers.finish_checkpoint(wait=True)
        apart.append(before.step())
        critic_role = roles[-1]
        values = before.passes[Role.CRITIC].forward(rows(), step=1)["values"]
        export_model(workers, critic_role, export)
        after = Run(cluster, shared)
        together = [after.step(), after.step()]
        after = Run(cluster, shared)
        workers.load_checkpoint(checkpoint, same_layout={Role.ACTOR})
        resumed = after.step()
        again = replace(critic_role, model=replace(critic_role.model, path=str(export)), trainable=False)
        workers.load(LoadRequest(roles=(actor_role(config), again), seed=0))
        return Report(
            names=[process.name for process in workers.processes],
            apart=apart,
            together=together,
            resumed=resumed,
            values_before_export=values,
            exported=RolePasses(workers, again).forward(rows(), step=1)["values"],
            refusal=_refusal(cluster, small_config(Path(model), "use.algo=ppo", LAYOUTS[0], "critic.layout={dp: 1}")),
        )


def _refusal(cluster: Cluster, config: object) -> str:
    try:
        cluster.check_serves(config, roles_of(config, algorithm_of(config).requires()))  # type: ignore[arg-type]
    except ConfigError as error:
        return str(error)
    return ""
