"""Tensor-parallel weights to another tensor parallelism on CPU processes: megarl's bridge, megatron-core, all-gather.

python -m tools.bench.reshard --out FILE.json

Of every contender, in fresh processes: bytes that ranks received from others, messages, memory beyond the shards (the
peak of all ranks added up, with freed memory given back at once), and the median time of a round, in runs of their own.
Times are ratios on a shared machine, and nothing passes or fails by them.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megarl.text_table import align
from tools.bench.reshard_contenders import CONTENDERS, LAYER, NUM_HALVES, NUM_RANKS, Job, RankResult

_MIB = 1 << 20
# Allocations above this many bytes are given back when freed, so that a peak is what was needed at a time.
_GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 17)}
_TIMEOUT_S = 300.0
OURS = ("megarl, shared memory", "megarl, gloo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Of all ranks together; seconds of the slowest."""

    contender: str
    wire_bytes: int
    messages: int
    staging_mib: float
    seconds: float
    plan_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """What must hold, and whether it does."""

    name: str
    got: float
    limit: float
    holds: bool


def run_ranks(job: Job, environment: dict[str, str]) -> list[RankResult]:
    """Every rank in a process of its own."""
    command = [sys.executable, "-m", "tools.bench.reshard_contenders", json.dumps(asdict(job))]
    setting = {
        **environment,
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONWARNINGS": "ignore",
    }
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, env=setting, text=True)
        for rank in range(NUM_RANKS)
    ]
    try:
        answers = [rank.communicate(timeout=_TIMEOUT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{job.contender}: a rank failed; see above")
    return [RankResult(**json.loads(answer.splitlines()[-1])) for answer in answers]


def free_port() -> int:
    """The first of two ports in a row that are free."""
    for start in range(20000, 60000, 7):
        try:
            for port in (start, start + 1):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return start
    raise SystemExit("no two free ports in a row")


def measure(contender: str, arguments: argparse.Namespace) -> Measured:
    """Memory in one run, time in another."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:

        def job(rounds: int) -> Job:
            return Job(
                contender=contender,
                width=arguments.width,
                num_layers=arguments.layers,
                rounds=rounds,
                bucket_mib=arguments.bucket_mib,
                port=free_port(),
                directory=directory,
            )

        memory, timed = run_ranks(job(1), _GIVE_BACK), run_ranks(job(arguments.rounds), {})
    return Measured(
        contender=contender,
        wire_bytes=sum(rank.wire_bytes for rank in memory),
        messages=sum(rank.messages for rank in memory),
        staging_mib=sum(rank.staging_bytes for rank in memory) / _MIB,
        seconds=max(rank.seconds for rank in timed),
        plan_seconds=max(rank.plan_seconds for rank in timed),
    )


def gates(measured: Sequence[Measured], model_bytes: int) -> list[Gate]:
    """A rank needs a half and has a quarter of it, so it lacks a quarter."""
    found = {each.contender: each for each in measured}
    peer, gathered = found["megatron-core"], found["all-gather"]
    minimum = NUM_RANKS * (model_bytes // NUM_HALVES - model_bytes // NUM_RANKS)
    result = []
    for name in OURS:
        mine = found[name]
        result += [
            Gate(name=f"{name}: bytes = Σ R_i", got=mine.wire_bytes, limit=minimum, holds=mine.wire_bytes == minimum),
            _at_most(f"{name}: bytes ≤ 1/3 of all-gather", mine.wire_bytes, gathered.wire_bytes / 3),
            _at_most(f"{name}: messages ≤ 1/8 of megatron-core", mine.messages, peer.messages / 8),
            _at_most(f"{name}: staging MiB ≤ 0.5 × megatron-core", mine.staging_mib, peer.staging_mib / 2),
        ]
    return result


def _at_most(name: str, got: float, limit: float) -> Gate:
    return Gate(name=name, got=got, limit=limit, holds=got <= limit)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=1024, help="a layer has 12 × width² parameters")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5, help="timed, of which the median counts")
    parser.add_argument("--bucket-mib", type=int, default=24)
    parser.add_argument("--out", type=Path, help="JSON record")
    arguments = parser.parse_args()
    elements = sum(shape[0] * shape[1] for shape, _ in LAYER.values()) * arguments.width**2 * arguments.layers
    model_bytes = 4 * elements
    print(f"{model_bytes / 1e6:.0f} MB of float32, tensor-parallel 4 → 2 on {NUM_RANKS} ranks", flush=True)
    measured = [measure(name, arguments) for name in CONTENDERS]
    rows = [["contender", "wire MB", "messages", "staging MiB", "seconds", "plan s"]]
    rows += [
        [
            each.contender,
            f"{each.wire_bytes / 1e6:.1f}",
            str(each.messages),
            f"{each.staging_mib:.0f}",
            f"{each.seconds:.3f}",
            f"{each.plan_seconds:.3f}",
        ]
        for each in measured
    ]
    print("\n".join(align(rows)))
    found = gates(measured, model_bytes)
    for gate in found:
        print(f"{'holds' if gate.holds else 'FAILS'}  {gate.name}: {gate.got:,.1f}, limit {gate.limit:,.1f}")
    if arguments.out is not None:
        settings = {"width": arguments.width, "layers": arguments.layers, "bucket_mib": arguments.bucket_mib}
        record = {
            "settings": settings,
            "model_bytes": model_bytes,
            "measured": [asdict(each) for each in measured],
            "gates": [asdict(gate) for gate in found],
        }
        arguments.out.write_text(json.dumps(record, indent=2) + "\n")
    return 0 if all(gate.holds for gate in found) else 1


if __name__ == "__main__":
    sys.exit(main())
