"""Weights from one tensor-parallel layout to another on four CPU processes: megarl's bridge and megatron-core.

python -m megarl_lab.bench.sync --out FILE.json

Of every contender: bytes that ranks received from others, messages, memory beyond the shards (the peak of all ranks
added up, with freed memory given back at once; in processes of its own), and the median time of a round. For the times
all contenders are in the same processes and take turns round by round. Times are ratios on a shared machine.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megarl.host.store import open_store
from megarl.record.text_table import align
from megarl_lab.bench.sync_contenders import CONTENDERS, RankResult, SyncJob
from megarl_lab.bench.sync_model import CASES, NUM_RANKS, make_model, model_sizes

_MIB = 1 << 20
# All rounds of all contenders; a rank that is gone is noticed by the others long before.
_RUN_S = 1800.0
# Allocations above this many bytes are given back when freed, so that a peak is what was needed at a time.
_GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 17)}
# Shares of the time of megatron-core, which uses gloo too. Between hosts full shapes are packed, and copied once more.
TIME_LIMITS = {"megarl, shared memory": 1.0, "megarl, gloo": 1.15}
PEER = "megatron-core"


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncCost:
    """Results of all ranks together; seconds of the slowest."""

    case: str
    model_bytes: int
    contender: str
    wire_bytes: int
    messages: int
    staging_mib: float
    seconds: float


def run_ranks(job: SyncJob, environment: dict[str, str]) -> list[dict[str, RankResult]]:
    """Every rank in a process of its own."""
    command = [sys.executable, "-m", "megarl_lab.bench.sync_contenders", json.dumps(asdict(job))]
    setting = {
        **environment,
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONWARNINGS": "ignore",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, env=setting, encoding="utf-8", errors="replace")
        for rank in range(NUM_RANKS)
    ]
    try:
        answers = [rank.communicate(timeout=_RUN_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{', '.join(job.contenders)}: a rank failed; see above")
    return [
        {name: RankResult(**result) for name, result in json.loads(answer.splitlines()[-1]).items()}
        for answer in answers
    ]


def measure(case: str, num_bytes: int, arguments: argparse.Namespace) -> Iterator[SyncCost]:
    """Memory of each contender in a run of its own, time of all in another."""
    width = model_sizes(num_bytes, arguments.layers)
    model = make_model(case, width, arguments.layers)

    def run(contenders: Sequence[str], rounds: int, environment: dict[str, str]) -> list[dict[str, RankResult]]:
        store = open_store("127.0.0.1")
        with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
            job = SyncJob(
                contenders=tuple(contenders),
                case=case,
                width=width,
                num_layers=arguments.layers,
                rounds=rounds,
                port=store.port,
                directory=directory,
            )
            return run_ranks(job, environment)

    timed = run(list(CONTENDERS), arguments.rounds, {})
    for name in list(CONTENDERS):
        memory = [rank[name] for rank in run([name], 0, _GIVE_BACK)]
        yield SyncCost(
            case=case,
            model_bytes=model.num_bytes,
            contender=name,
            wire_bytes=sum(rank.wire_bytes for rank in memory),
            messages=sum(rank.messages for rank in memory),
            staging_mib=sum(rank.staging_bytes for rank in memory) / _MIB,
            seconds=max(rank[name].seconds for rank in timed),
        )


def lacking_bytes(case: str, model_bytes: int) -> int:
    """Σ R_i, by counting shards: what ranks want less what they have of it, in units of a quarter of the model."""
    quarters = {
        "TP4 → 2 × TP2, overlapping": 4 * (2 - 1),
        "TP4 → 2 × TP2, in order": 2 * (2 - 1) + 2 * (2 - 0),
        "2 × TP2 → TP4, in order": 2 * (1 - 1) + 2 * (1 - 0),
        "PP2 × TP2 → 2 × TP2, in order": 4 * (2 - 1),
    }
    return quarters[case] * model_bytes // 4


def faults(measured: Sequence[SyncCost]) -> list[str]:
    """Say in words which limits are exceeded in one case and size."""
    costs = {each.contender: each for each in measured}
    peer, minimum = costs[PEER], lacking_bytes(measured[0].case, measured[0].model_bytes)
    found = []
    for name, most in TIME_LIMITS.items():
        mine = costs[name]
        shares = {
            "bytes ÷ those that ranks lack": (mine.wire_bytes / minimum, 1.0),
            "messages ÷ megatron-core's": (mine.messages / peer.messages, 1 / 8),
            "staging ÷ megatron-core's": (mine.staging_mib / peer.staging_mib, 0.5),
            "time ÷ megatron-core's": (mine.seconds / peer.seconds, most),
        }
        found += [f"{name}: {what} {got:.3g}, limit {limit:g}" for what, (got, limit) in shares.items() if got > limit]
    return found


def table(measured: Sequence[SyncCost]) -> list[str]:
    rows = [["case", "model MB", "contender", "transport MB", "messages", "staging MiB", "seconds", "of megatron-core"]]
    peer = next(each.seconds for each in measured if each.contender == PEER)
    for each in measured:
        sizes = f"{each.wire_bytes / 1e6:.1f}", str(each.messages), f"{each.staging_mib:.0f}"
        times = f"{each.seconds:.3f}", f"{each.seconds / peer:.2f}"
        rows.append([each.case, f"{each.model_bytes / 1e6:.0f}", each.contender, *sizes, *times])
    return list(align(rows, left=(0, 2)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, nargs="+", default=[2000.0], help="sizes of the model")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES))
    parser.add_argument("--rounds", type=int, default=7, help="timed, of which the median counts")
    parser.add_argument("--out", type=Path, help="JSON record")
    arguments = parser.parse_args()
    measured, found = list[SyncCost](), list[str]()
    for case, size in itertools.product(arguments.cases, arguments.mb):
        some = list(measure(case, int(size * 1e6), arguments))
        measured += some
        found += [f"{case}, {size:g} MB: {fault}" for fault in faults(some)]
        print("\n".join(table(some)), flush=True)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps([asdict(each) for each in measured], indent=2) + "\n", encoding="utf-8")
    if found:
        raise SystemExit("\n".join(found))


if __name__ == "__main__":
    main()
