"""`python -m tests.e2e.placement_run JOB.json`: a short run in a process of its own.

Writes what it saw as JSON. A process of its own, because a run must be killable and Ray serves one run per process.
"""

import contextlib
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megarl.host.device.platform import apply_environment

apply_environment()


from megarl.cluster.bridge import BridgeSync  # noqa: E402
from megarl.cluster.cluster import Cluster  # noqa: E402
from megarl.config import load_config  # noqa: E402
from megarl.record.recorder import RunRecorder  # noqa: E402
from megarl.train.inputs import open_train_inputs  # noqa: E402
from megarl.train.wiring import build_trainer  # noqa: E402
from megarl.types.messages import ForwardRequest  # noqa: E402
from tests.e2e.checked_trainer import Seen, checked  # noqa: E402
from tests.e2e.support import TP2, move_apart  # noqa: E402

RUN_FILE = Path(__file__).parents[2] / "configs" / "run" / "sums-rl.yaml"
# What the trainer tells ranks and engines, in the words of the memory ledger.
RECORDED = {
    "workers": ("load", "forward", "update", "store_weights", "offload", "onload"),
    "engines": ("flush", "sleep", "wake"),
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run: its settings, where its report goes, whether it pretends to be on several hosts and waits to be killed."""

    settings: list[str]
    report: str
    pretend_hosts: bool = False
    wait: bool = False


def record_calls(cluster: Cluster, calls: list[str]) -> None:
    """Write down what the ranks and engines of a cluster are told."""

    def recorded(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            words = [a if isinstance(a, str) else "+".join(sorted(a)) for a in args if _is_text(a)]
            words += [a.role for a in args if isinstance(a, ForwardRequest)]
            calls.append(" ".join([name, *words]))
            return call(*args, **kwargs)

        return wrapper

    for group, names in RECORDED.items():
        for name in names:
            target = getattr(cluster, group)
            setattr(target, name, recorded(f"{group}.{name}", getattr(target, name)))

    def weight_sync() -> BridgeSync:
        sync = open_sync()
        sync.push = recorded("bridge.push", sync.push)  # type: ignore[method-assign]
        return sync

    open_sync, cluster.weight_sync = cluster.weight_sync, weight_sync  # type: ignore[method-assign]


def _is_text(argument: object) -> bool:
    return isinstance(argument, str) or (
        isinstance(argument, Sequence) and all(isinstance(each, str) for each in argument)
    )


@contextlib.contextmanager
def run(job: Job) -> Iterator[Seen]:
    """Train; the cluster lives as long as the context."""
    config = load_config(RUN_FILE, [*TP2, *job.settings])
    inputs, recorder = open_train_inputs(config), RunRecorder(config)
    with Cluster(config, roles=inputs.roles, log_dir=recorder.paths.root / "logs") as cluster:
        seen = Seen(run_id=cluster.scope.run_id, pids=dict(cluster.pids))
        if job.pretend_hosts:
            move_apart(cluster)
        record_calls(cluster, seen.calls)
        checked(build_trainer(inputs, cluster, recorder), seen).fit()
        yield seen


def main(argv: Sequence[str]) -> None:
    job = Job(**json.loads(Path(argv[0]).read_text()))
    with run(job) as seen:
        report = Path(job.report)
        partial = report.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(seen)))
        partial.rename(report)
        while job.wait:
            time.sleep(1)


if __name__ == "__main__":
    main(sys.argv[1:])
