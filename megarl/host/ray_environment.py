"""Define Ray's environment variables in the driver and on every host, and save the logs of Ray's workers."""

import shutil
from pathlib import Path

from megarl.host.stage import DIRECTORY
from megarl.storage.writing import dispensable, writing

RAY_ENVIRONMENT = {
    # A token file left by another cluster would break the workers.
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    # Ray would start its workers at niceness 15, but ranks and engines are what the machine is for.
    "RAY_worker_niceness": "0",
    # A worker per CPU would start first, and none of them would fit: all of megarl's have an environment of their own.
    "RAY_prestart_worker_first_driver": "0",
}
# On several hosts, a host that is cut off is noticed within 6 s; by default this takes more than a minute.
HEALTH_CHECKS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1500",
    "RAY_health_check_failure_threshold": "3",
}


def keep_worker_logs(temp_dir: Path, target: Path) -> None:
    """Copy the logs of the workers of the Ray in `temp_dir` to `target`, with the Python stacks that they wrote.

    Storage that refuses only causes a warning: it must not hide why the run failed.
    """
    files = {file: file.name for file in (temp_dir / "session_latest" / "logs").glob("worker-*")}
    files |= {file: f"stacks-{file.name}" for file in (temp_dir / DIRECTORY).glob("*.txt")}
    with dispensable("the workers' logs"), writing(target):
        target.mkdir(parents=True, exist_ok=True)
        for file, name in files.items():
            if file.stat().st_size:
                shutil.copyfile(file, target / name)
