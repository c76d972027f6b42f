"""Derive the size of Ray's object store from the rows that pass through it in a step."""

import shutil
from pathlib import Path

from megarl.config.derived import Derived
from megarl.config.load import packaged
from megarl.config.models import ModelConfig, MoeConfig
from megarl.config.schema import ClusterConfig
from megarl.host.janitor import SHM_DIR
from megarl.host.memory import host_memory
from megarl.weights.families import read_model_spec

# Room for everything but rows: requests to engines, completions, the results of small calls.
LEAST_MIB = 256
# The smallest store with which Ray starts.
_RAY_LEAST_MIB = 75
# Bytes of the number of an expert.
_EXPERT_BYTES = 2
# The shares of the host's memory and of its shared memory that the store may take. Weight syncs use the latter, too.
_MEMORY_SHARE, _SHM_SHARE = 0.3, 0.5


def object_store(cluster: ClusterConfig, passed: tuple[str, int], *, room: int | None = None) -> Derived | None:
    """Derive `cluster.object_store_mib`; None if the run joins a Ray that has a store already.

    The store holds the rows of two passes, since those of one may still be there when the next begins. passed: what
    `pass_bytes` returns. room: the most bytes that it may take; by default a share of this host's memory.
    """
    if cluster.address is not None:
        return None
    if room is None:
        memory = host_memory()
        room = int(min(_MEMORY_SHARE * memory, _SHM_SHARE * shutil.disk_usage(SHM_DIR).total))
    rows, num_bytes = passed
    needed = (LEAST_MIB << 20) + 2 * num_bytes
    reason = f"{LEAST_MIB} MiB, and twice the {num_bytes / 1e9:,.2f} GB of a pass over {rows}"
    if needed > room:
        reason += f", but at most {_MEMORY_SHARE:.0%} of the host's memory and {_SHM_SHARE:.0%} of {SHM_DIR}"
    mib = max(_RAY_LEAST_MIB, -(-min(needed, room) // 2**20))
    return Derived(key="cluster.object_store_mib", value=mib, reason=reason)


def routing_bytes(model: ModelConfig, moe: MoeConfig) -> int:
    """Return the bytes per token of the experts that a row names, in all layers; 0 until config.json is there."""
    places = [model.path, packaged(model.config_path or "")] if moe.replay_routing else []
    found = next((path for path in map(Path, places) if (path / "config.json").is_file()), None)
    dims = None if found is None else read_model_spec(found).dims
    return 0 if dims is None or dims.experts is None else _EXPERT_BYTES * dims.num_layers * dims.experts.per_token
