"""Ray's own processes, started for one run on this host."""

import math
import os
from collections.abc import Mapping
from pathlib import Path

import ray

from megarl.config.schema import ClusterConfig
from megarl.errors import WorkerError
from megarl.signals import keep_handlers


def start_ray(settings: ClusterConfig, *, num_cpus: float, temp_dir: Path, environment: Mapping[str, str]) -> None:
    """Start Ray with room for `num_cpus` logical CPUs; its workers get `environment`.

    Raises:
        WorkerError: Ray did not come up.
    """
    try:
        with keep_handlers():
            ray.init(
                address="local",
                # Logical CPUs only decide placement: ranks and engines may share a core.
                num_cpus=settings.num_cpus or max(os.cpu_count() or 1, math.ceil(num_cpus)),
                object_store_memory=settings.object_store_mib << 20,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="error",
                _temp_dir=str(temp_dir),
                runtime_env={"env_vars": dict(environment)},
            )
    # Ray raises whatever fits where it fails: OSError, ValueError, RuntimeError and Exception itself.
    except Exception as error:
        raise WorkerError(
            f"Ray did not start ({type(error).__name__}: {error}); free CPUs, memory and room in {temp_dir.parent} and "
            f"/dev/shm, or lower cluster.object_store_mib, and start the run again"
        ) from error
