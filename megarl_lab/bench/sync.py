"""Weights from one tensor-parallel layout to another on four CPU processes: megarl's bridge, megatron-core, all-gather.

python -m megarl_lab.bench.sync --out FILE.json

Of every contender: bytes that ranks received from others, messages, memory beyond the shards (the peak of all ranks
added up, with freed memory given back at once; in processes of its own), and the median time of a round. For the times
all contenders are in the same processes and take turns round by round. Times are ratios on a shared machine.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megarl.host.store import open_store
from megarl.record.text_table import align
from megarl_lab.bench.sync_contenders import CONTENDERS, RankResult, SyncJob
from megarl_lab.bench.sync_model import CASES, NUM_RANKS, make_model, model_sizes

_MIB = 1 << 20
# All rounds of all contenders; a rank that is gone is noticed by the others long before.
_RUN_S = 1800.0
# Allocations above this many bytes are given back when freed, so that a peak is what was needed at a time.
_GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 17)}
PEERS = ("megatron-core", "all-gather")
# Shares of the faster peer's time. Full shapes between hosts are packed; only their loader makes a copy.
TIME_LIMITS = {"megarl, gloo, full shape": 1.15}
# An engine gets full shapes: through shared memory within its host, over gloo from another one. Peers use gloo too.
OURS = (
    "megarl, shared memory",
    "megarl, shared memory, full shape",
    "megarl, gloo",
    "megarl, gloo, full shape",
)


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
    plan_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """A condition, and whether it holds."""

    case: str
    name: str
    got: float
    limit: float
    holds: bool


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

    timed = run(arguments.contenders, arguments.rounds, {})
    for name in arguments.contenders:
        memory = [rank[name] for rank in run([name], 0, _GIVE_BACK)]
        yield SyncCost(
            case=case,
            model_bytes=model.num_bytes,
            contender=name,
            wire_bytes=sum(rank.wire_bytes for rank in memory),
            messages=sum(rank.messages for rank in memory),
            staging_mib=sum(rank.staging_bytes for rank in memory) / _MIB,
            seconds=max(rank[name].seconds for rank in timed),
            plan_seconds=max(rank.plan_seconds for rank in memory),
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


def gates(measured: Sequence[SyncCost]) -> Iterator[Gate]:
    """Check one case and size. A third of all-gather's bytes is possible only where receivers sit well."""
    found = {each.contender: each for each in measured}
    peer, gathered, case = found["megatron-core"], found["all-gather"], measured[0].case
    minimum = lacking_bytes(case, measured[0].model_bytes)
    label = f"{case}, {measured[0].model_bytes / 1e6:.0f} MB"
    fastest = min(found[name].seconds for name in PEERS)

    def at_most(name: str, got: float, limit: float) -> Gate:
        return Gate(case=label, name=name, got=got, limit=limit, holds=got <= limit)

    for name in OURS:
        mine = found[name]
        yield Gate(
            case=label,
            name=f"{name}: bytes = Σ R_i",
            got=mine.wire_bytes,
            limit=minimum,
            holds=mine.wire_bytes == minimum,
        )
        if CASES[case].overlapping:
            yield at_most(f"{name}: bytes ≤ 1/3 of all-gather", mine.wire_bytes, gathered.wire_bytes / 3)
        yield at_most(f"{name}: messages ≤ 1/8 of megatron-core", mine.messages, peer.messages / 8)
        yield at_most(f"{name}: staging ÷ megatron-core", mine.staging_mib / peer.staging_mib, 0.5)
        yield at_most(f"{name}: time ÷ the faster peer", mine.seconds / fastest, TIME_LIMITS.get(name, 1.0))


def table(measured: Sequence[SyncCost]) -> list[str]:
    rows = [["case", "model MB", "contender", "transport MB", "messages", "staging MiB", "seconds", "of megatron-core"]]
    for each in measured:
        peer = next(
            other
            for other in measured
            if (other.case, other.model_bytes) == (each.case, each.model_bytes) and other.contender == "megatron-core"
        )
        rows.append(
            [
                each.case,
                f"{each.model_bytes / 1e6:.0f}",
                each.contender,
                f"{each.wire_bytes / 1e6:.1f}",
                str(each.messages),
                f"{each.staging_mib:.0f}",
                f"{each.seconds:.3f}",
                f"{each.seconds / peer.seconds:.2f}",
            ]
        )
    return list(align(rows, left=(0, 2)))


def transfers(arguments: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Measure all cases and sizes; the record, and whether all gates hold."""
    measured, found = list[SyncCost](), list[Gate]()
    for case in arguments.cases:
        for size in arguments.mb:
            some = list(measure(case, int(size * 1e6), arguments))
            measured += some
            found += gates(some) if set(arguments.contenders) == set(CONTENDERS) else ()
            print("\n".join(table(some)), flush=True)
    for gate in found:
        print(
            f"{'holds' if gate.holds else 'FAILS'}  {gate.case}; {gate.name}: {gate.got:,.2f}, limit {gate.limit:,.2f}"
        )
    record = {"measured": [asdict(each) for each in measured], "gates": [asdict(gate) for gate in found]}
    return record, all(gate.holds for gate in found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, nargs="+", default=[50.0, 400.0, 2000.0], help="sizes of the model")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES))
    parser.add_argument("--contenders", nargs="+", choices=tuple(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=7, help="timed, of which the median counts")
    parser.add_argument("--out", type=Path, help="JSON record")
    arguments = parser.parse_args()
    record, holds = transfers(arguments)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
