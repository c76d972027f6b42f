"""Programs per second of the code sandbox, against an interpreter per run without any isolation.

python -m megarl_lab.bench.sandbox --rounds 5 --runs 20

Rounds are interleaved, and the median of each contender's rounds is printed: other load on the machine meets all alike.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

from megarl.record.text_table import align
from megarl_sandbox import Isolation, RunWithInput, Sandbox, SandboxOptions

_SOURCE = "print(input())"


def _interpreter(runs: int) -> None:
    for _ in range(runs):
        command = [sys.executable, "-I", "-S", "-c", _SOURCE]
        assert subprocess.run(command, input=b"x", stdout=subprocess.PIPE, check=True).stdout == b"x\n"


def _sandbox(sandbox: Sandbox, tasks: int, runs: int) -> None:
    """`runs` runs, `tasks` of each program."""
    for _ in range(runs // tasks):
        with sandbox.program(_SOURCE) as program:
            for _ in range(tasks):
                assert program.run(RunWithInput(text="x")).stdout == b"x\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--runs", type=int, default=20, help="per round and contender; a multiple of 10")
    arguments = parser.parse_args()
    with Sandbox() as isolated, Sandbox(SandboxOptions(isolation=Isolation.LIMITS_ONLY)) as limited:
        contenders: dict[str, Callable[[int], None]] = {
            "an interpreter per run, no isolation": _interpreter,
            "namespaces, 1 test per program": partial(_sandbox, isolated, 1),
            "namespaces, 10 tests per program": partial(_sandbox, isolated, 10),
            "limits_only, 1 test per program": partial(_sandbox, limited, 1),
        }
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for contender in contenders.values():
            contender(10)  # starts what is started once
        for _ in range(arguments.rounds):
            for name, contender in contenders.items():
                start = time.perf_counter()
                contender(arguments.runs)
                seconds[name].append(time.perf_counter() - start)
    base, *_ = medians = [statistics.median(spent) for spent in seconds.values()]
    rows = [
        [name, f"{1000 * median / arguments.runs:.1f}", f"{arguments.runs / median:.0f}", f"{base / median:.2f}"]
        for name, median in zip(contenders, medians, strict=True)
    ]
    print("\n".join(align([["", "ms per run", "runs/s", "speed relative to the first"], *rows])))


if __name__ == "__main__":
    main()
