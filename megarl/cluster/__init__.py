"""Start the remote processes of a run (Ray, trainer ranks, vLLM engines) and call them; runs can use them in turn.

    with Cluster(config, roles=inputs.roles) as cluster:
        Trainer(inputs, cluster, recorder).fit()

Ray actors are thin wrappers: the work is in `parallel.worker` and `rollout.engine`.
"""

from megarl.cluster.cluster import Cluster
from megarl.cluster.engines import EngineGroup
from megarl.cluster.processes import wait_all
from megarl.cluster.roster import Process
from megarl.cluster.supervisor import EngineSupervisor
from megarl.cluster.workers import RankGroup, RoleWorkers, RowShards, put_rows

__all__ = [
    "Cluster",
    "EngineGroup",
    "EngineSupervisor",
    "Process",
    "RankGroup",
    "RoleWorkers",
    "RowShards",
    "put_rows",
    "wait_all",
]
