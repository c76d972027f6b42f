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

from megarl.device.platform import apply_environment

apply_environment()

from megarl.cluster import Cluster, wait_all  # noqa: E402
from megarl.cluster.replication import FileKeeper, ReplicatedFiles  # noqa: E402
from megarl.config import load_config  # noqa: E402
from megarl.record.recorder import RunRecorder  # noqa: E402
from megarl.train.inputs import open_train_inputs  # noqa: E402
from megarl.train.wiring import build_trainer  # noqa: E402
from megarl.types.messages import Role, ScoreRequest, StoreResult  # noqa: E402
from tests.e2e.checked_trainer import Seen, checked  # noqa: E402

RUN_FILE = Path(__file__).parents[2] / "configs" / "run" / "sums-rl.yaml"
# What the trainer tells ranks and engines, in the words of the memory ledger.
RECORDED = {
    "workers": ("load", "score", "update", "store_weights", "offload", "onload"),
    "engines": ("submit", "load_weights", "sleep", "wake"),
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
            words += [a.role for a in args if isinstance(a, ScoreRequest)]
            calls.append(" ".join([name, *words]))
            return call(*args, **kwargs)

        return wrapper

    for group, names in RECORDED.items():
        for name in names:
            target = getattr(cluster, group)
            setattr(target, name, recorded(f"{group}.{name}", getattr(target, name)))


def _is_text(argument: object) -> bool:
    return isinstance(argument, str) or (
        isinstance(argument, Sequence) and all(isinstance(each, str) for each in argument)
    )


def pretend_hosts(cluster: Cluster) -> None:
    """Every rank and every engine on a host of its own: each knows only its own file."""
    ranks, engines = cluster.workers.processes, cluster.engines.processes
    keepers = [
        FileKeeper(process=p, path=cluster.scope.shm_file(f"host-{i}")) for i, p in enumerate([*ranks, *engines])
    ]
    paths = [[str(keeper.path)] for keeper in keepers]

    def store_weights(files: Sequence[Path], *, with_checksums: bool) -> StoreResult:
        calls = [
            (p, p.actor.call.remote("store_weights", path, with_checksums=with_checksums))
            for p, path in zip(ranks, paths, strict=False)
        ]
        return functools.reduce(StoreResult.merged, wait_all(calls, timeout_s=60, doing="storing"))

    def load_weights(files: Sequence[Path], **kwargs: Any) -> list[dict[str, int]]:
        calls = [
            (p, p.actor.call.remote("load_weights", path, **kwargs))
            for p, path in zip(engines, paths[len(ranks) :], strict=True)
        ]
        answers = wait_all(calls, timeout_s=60, doing="loading")
        return [checksums for workers in answers for checksums in workers]

    export = cluster.workers.store_weights
    weights = cluster.scope.shm_file("weights")

    def store(files: Sequence[Path], *, with_checksums: bool = False, role: Role = Role.ACTOR) -> StoreResult:
        if list(files) == [weights]:
            return store_weights(files, with_checksums=with_checksums)
        return export(files, with_checksums=with_checksums, role=role)

    cluster.workers.store_weights = store  # type: ignore[method-assign]
    cluster.engines.load_weights = load_weights  # type: ignore[method-assign]
    cluster.weight_transport = lambda path: ReplicatedFiles(keepers, timeout_s=60)  # type: ignore[method-assign]


@contextlib.contextmanager
def run(job: Job) -> Iterator[Seen]:
    """Train; the cluster lives as long as the context."""
    config = load_config(RUN_FILE, job.settings)
    inputs, recorder = open_train_inputs(config), RunRecorder(config)
    with Cluster(config, roles=inputs.roles, log_dir=recorder.paths.root / "logs") as cluster:
        seen = Seen(run_id=cluster.scope.run_id, pids=dict(cluster.pids))
        if job.pretend_hosts:
            pretend_hosts(cluster)
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
