"""Define Ray's environment variables in the driver and on every host, and save the logs of Ray's workers."""

import secrets
import shutil
from pathlib import Path

from megarl.host.janitor import RunScope
from megarl.host.stage import DIRECTORY
from megarl.host.temp_dir import RAY_DIRECTORY
from megarl.host.writing import dispensable, writing

RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    # Ray would start its workers at niceness 15, but ranks and engines are what the machine is for.
    "RAY_worker_niceness": "0",
    # How long the first of Ray's processes may take to come up on a busy machine; by default 30 s.
    "RAY_gcs_server_port_wait_time_s": "120",
    # Ray would end the driver 60 s after the loss of the gcs_server, while the run still tells trackers how it ended.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "300",
    # A worker per CPU would start first, and none of them would fit: all of megarl's have an environment of their own.
    "RAY_prestart_worker_first_driver": "0",
    # Ray's dashboard, which no run has, would show every call: the gcs_server keeps 40 to 140 KiB of a step for that.
    "RAY_task_events_report_interval_ms": "0",
}
# How many of Ray's health checks in a row a host has to miss before it counts as lost.
NUM_MISSED = 6
TOKEN_VARIABLE = "RAY_AUTH_TOKEN"


def health_checks(timeout_s: float) -> dict[str, str]:
    """Return variables by which Ray takes a host for lost that has not answered for `timeout_s`.

    Each check takes half of its share of the time, and the pause after it the other half. A network that refuses
    connections at once therefore still has half of the time to recover.
    """
    half_ms = str(round(1000 * timeout_s / NUM_MISSED / 2))
    return {
        "RAY_health_check_initial_delay_ms": "1000",
        "RAY_health_check_period_ms": half_ms,
        "RAY_health_check_timeout_ms": half_ms,
        "RAY_health_check_failure_threshold": str(NUM_MISSED),
        # Before a host counts as lost, processes must not close their connections to it, which looks like their death
        # (by default after 20 s), and the host must not end its Ray because the first host is silent (after 60 s).
        "RAY_grpc_keepalive_timeout_ms": str(round(1000 * max(20.0, timeout_s))),
        "RAY_gcs_rpc_server_reconnect_timeout_s": str(round(max(60.0, 2 * timeout_s))),
    }


def fresh_token() -> dict[str, str]:
    """Return variables by which all processes of one Ray refuse whoever does not know their secret, made here.

    They outrank the files in which other clusters' tokens may lie.
    """
    return {"RAY_AUTH_MODE": "token", TOKEN_VARIABLE: secrets.token_hex(16)}


def keep_worker_logs(scope: RunScope, target: Path) -> None:
    """Copy the logs of the run's Ray and its workers on this host to `target`, with Python stacks that these wrote.

    Storage that refuses only causes a warning: it must not hide why the run failed.
    """
    files: dict[Path, str] = {}
    for directory in scope.temp_dirs():
        logs = directory / RAY_DIRECTORY / "session_latest" / "logs"
        files |= {file: file.name for kind in ("worker-*", "raylet.*", "gcs_server.*") for file in logs.glob(kind)}
        files |= {file: f"stacks-{file.name}" for file in (directory / DIRECTORY).glob("*.txt")}
    with dispensable("the workers' logs"), writing(target):
        target.mkdir(parents=True, exist_ok=True)
        for file, name in files.items():
            if file.stat().st_size:
                shutil.copyfile(file, target / name)
