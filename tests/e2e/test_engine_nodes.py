"""Engines whose workers lie on several nodes, or hold the layers of one pipeline stage each.

All nodes are this host; the engine knows them as several, with workers that meet over the network.
"""

import os
import signal
from pathlib import Path

import pytest

from megarl.cluster.cluster import Cluster
from megarl.errors import EngineDiedError
from megarl.types import row_from_sample
from tests.e2e.support import (
    largest_difference,
    mean_difference,
    open_policy,
    random_prompts,
    random_sequences,
    rows_of,
    small_config,
)
from tests.helpers.checkpoints import make_checkpoint

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
NATS = 1e-5


@pytest.mark.parametrize(
    ("tied", "sizes", "names"),
    [
        # Its process and one worker on each node.
        (True, ("tp=2", "pp=1", "num_nodes=2"), 3),
        (True, ("tp=1", "pp=2", "num_nodes=1"), 2),
        (False, ("tp=1", "pp=2", "num_nodes=2"), 3),
    ],
    ids=["tp-over-nodes", "stages-on-a-node", "stages-over-nodes"],
)
def test_syncs_of_engines_in_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tied: bool, sizes: tuple[str, ...], names: int
) -> None:
    """All workers get what they hold, with checksums; sampling and scoring agree with the trainer; one is replaced."""
    tp, pp, num_nodes = sizes
    config = small_config(
        make_checkpoint(tmp_path / "model", tied=tied),
        "actor.optimizer.lr=0.003",
        "placement.mode=split",
        *(f"rollout.engine.{size}" for size in (tp, pp)),
        f"placement.engines.{num_nodes}",
    )
    sequences = random_sequences(4, 40)
    with Cluster(config) as cluster:
        engine = {name: pid for name, pid in cluster.pids.items() if name.startswith("engine 0")}
        assert list(engine) == ["engine 0", *(f"engine 0 worker {i}" for i in range(names))]
        assert set(engine.values()) <= set(cluster.scope.processes())
        policy = open_policy(cluster, config)
        policy.sync.push(0, verify=True)
        rows = [row_from_sample(sample) for sample in policy.rollout(random_prompts([12] * 4)).samples]
        assert mean_difference([row.quantities["rollout_logprobs"] for row in rows], policy.logprobs(rows)) <= NATS
        policy.update(rows, step=1)
        policy.sync.push(1, verify=True)
        given, trainer = cluster.engines.prompt_logprobs(sequences), policy.logprobs(rows_of(sequences))
        assert largest_difference(given, trainer) <= NATS
        policy.sync.close()
        # Whichever node it is on, the engine is lost with its last worker, and comes back as a whole.
        cluster.engines.processes[0].roster.allow_restarts(["engine 0"], 1)
        os.kill(engine[f"engine 0 worker {names - 1}"], signal.SIGKILL)
        with pytest.raises(EngineDiedError, match="engine 0 died"):
            cluster.engines.prompt_logprobs(sequences)
        assert f"worker {names - 1} of engine 0 died" in capsys.readouterr().out
        cluster.restart_engine(0)
        assert not set(engine.values()) & set(cluster.scope.processes())
        sync = cluster.weight_sync(policy.specs)
        sync.push(1, verify=True)
        assert largest_difference(cluster.engines.prompt_logprobs(sequences), trainer) <= NATS
        sync.close()
