"""Verified responses per second: the pool, TRL, verl and a fork per item, on clean and on hostile input.

    python -m megarl_lab.bench.verify --out runs/verify --peers .venv-conformance/bin/python [--data DIR]

`--peers` is an interpreter with trl, verl and math-verify. Contenders get the same items, in slices and by turns, so
that what else the machine does meets all of them. On larger sizes only the pool is run. Verdicts are compared item by
item: with TRL's, which are math-verify's under the same settings, the pool must agree on clean items wherever both
claim one. The answers to the gates are at the end of the table and in `verify.json`.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from megarl.record.text_table import align
from megarl_lab.bench.verify_contenders import CONTENDERS, PEERS, children
from megarl_lab.bench.verify_items import Item, make_items, save

OURS, TRL = "megarl", "TRL accuracy_reward"
# Rate of pathological items → how many items all contenders get; each such item costs peers seconds.
COMPARED = {0.0: 600, 0.001: 600, 0.01: 600}
NUM_SLICES = 3
# Slices of those that are slow; of the others, all.
FEWER_SLICES = {"fork per item": 1}
SWEPT = (300, 3000, 30000)
CLEAN_GATE, HARD_GATE, HARD_RATE = 1.5, 3.0, 0.01


class ContenderProcess:
    """A contender, ready to verify."""

    def __init__(self, name: str, interpreter: str, log: IO[str]) -> None:
        command = [interpreter, "-m", "megarl_lab.bench.verify_contenders", name]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
            encoding="utf-8",
            errors="replace",
        )
        self._name = name
        self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._name} ended; see contenders.log")
        return json.loads(line)

    def verify(self, file: Path, start: int, end: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        before = _cpu_seconds(self._process.pid)
        print(file, start, end, file=self._process.stdin, flush=True)
        record = self._read()
        return {**record, "cpu_seconds": _cpu_seconds(self._process.pid) - before}

    def close(self) -> None:
        self._process.communicate()


def _cpu_seconds(pid: int) -> float:
    """Add up a process, its descendants, and those of them that it has reaped."""
    pids, ticks = [pid], 0
    for each in pids:
        # Those that end meanwhile are counted by who reaps them.
        with suppress(FileNotFoundError, ProcessLookupError):
            pids += children(each)
            ticks += sum(
                map(int, Path(f"/proc/{each}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[11:15])
            )
    return ticks / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierRate:
    """One contender on a list of items, or its first slices. `slices`: items/s of each; `figures` are the pool's."""

    contender: str
    items: int
    rate: float
    blocking: int
    per_second: float
    cpu_ms_per_item: float
    slices: list[float]
    verdicts: list[float | None]
    figures: dict[str, Any]


def run(processes: dict[str, ContenderProcess], file: Path, items: list[Item], rate: float) -> list[VerifierRate]:
    """All contenders, one slice each in turn; each round begins with another one."""
    records: dict[str, list[dict[str, Any]]] = {name: [] for name in processes}
    num_slices = NUM_SLICES if len(processes) > 1 else 1
    bounds = [len(items) * i // num_slices for i in range(num_slices + 1)]
    names = list(processes)
    for i in range(num_slices):
        turn = names[i % len(names) :] + names[: i % len(names)]
        for name in (name for name in turn if i < FEWER_SLICES.get(name, num_slices)):
            records[name].append(processes[name].verify(file, bounds[i], bounds[i + 1]))
    sizes = [end - start for start, end in pairwise(bounds)]
    return [_measured(name, each, sizes, items, rate) for name, each in records.items()]


def _measured(
    name: str, records: list[dict[str, Any]], sizes: list[int], items: list[Item], rate: float
) -> VerifierRate:
    sums = ("correct", "wrong", "parse_failed", "timed_out", "crashed", "replaced", "late")
    figures: dict[str, Any] = {key: sum(record[key] for record in records) for key in sums if key in records[0]}
    if figures:
        figures["max_seconds"] = max(record["max_seconds"] for record in records)
        figures["restored"] = all(record["workers"] == record["expected"] for record in records)
    done = sum(sizes[: len(records)])
    return VerifierRate(
        contender=name,
        items=len(items),
        rate=rate,
        blocking=sum(item.kind == "blocking" for item in items),
        per_second=done / sum(record["seconds"] for record in records),
        cpu_ms_per_item=1000 * sum(record["cpu_seconds"] for record in records) / done,
        slices=[size / record["seconds"] for size, record in zip(sizes, records, strict=False)],
        verdicts=[verdict for record in records for verdict in record["verdicts"]],
        figures=figures,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictAgreement:
    """Agreement of a contender with TRL on clean items: verdicts that both claim, and how many of these are equal."""

    contender: str
    rate: float
    items: int
    both: int
    equal: int
    examples: list[str]


def compare(measured: Sequence[VerifierRate], items: list[Item]) -> list[VerdictAgreement]:
    [reference] = [each for each in measured if each.contender == TRL]
    found = []
    for each in measured:
        pairs = zip(items, each.verdicts, reference.verdicts, strict=False)
        both = [(i, a, b) for i, a, b in pairs if i.kind == "clean" and a is not None and b is not None]
        different = [
            f"{a} but TRL {b}: gold {i.gold!r}, response ends {i.response[-60:]!r}" for i, a, b in both if a != b
        ]
        clean = sum(item.kind == "clean" for item in items)
        found.append(
            VerdictAgreement(
                contender=each.contender,
                rate=each.rate,
                items=clean,
                both=len(both),
                equal=len(both) - len(different),
                examples=different[:5],
            )
        )
    return found


def gates(measured: list[VerifierRate], agreements: list[VerdictAgreement]) -> list[tuple[str, str, bool]]:
    """Return each limit with its measurement, and whether that is enough."""

    def ratio(rate: float) -> float:
        compared = [each for each in measured if (each.items, each.rate, each.blocking) == (COMPARED[rate], rate, 0)]
        speed = {each.contender: each.per_second for each in compared}
        return speed[OURS] / speed[TRL]

    pools = [each for each in measured if each.figures]
    late = sum(each.figures["late"] for each in pools)
    ours = [each for each in agreements if each.contender == OURS]
    both, equal = sum(each.both for each in ours), sum(each.equal for each in ours)
    lost = [each for each in pools if not each.figures["restored"]]
    return [
        (f"≥ {CLEAN_GATE}× TRL on clean input", f"{ratio(0.0):.2f}×", ratio(0.0) >= CLEAN_GATE),
        (f"≥ {HARD_GATE}× TRL at {HARD_RATE:.0%}", f"{ratio(HARD_RATE):.2f}×", ratio(HARD_RATE) >= HARD_GATE),
        ("verdicts as math-verify's where both claim one", f"{equal} of {both}", equal == both > 0),
        ("none past deadline + 1 s", f"{late} late", late == 0),
        ("workers restored after every run", f"{len(lost)} runs without", not lost),
    ]


def table(measured: list[VerifierRate]) -> list[str]:
    header = "items|hostile|contender|items/s|× TRL|CPU ms|timed out|crashed|replaced|longest s"
    reference = {(each.items, each.rate): each.per_second for each in measured if each.contender == TRL}
    rows = []
    for each in measured:
        base = reference.get((each.items, each.rate))
        counts = [str(each.figures.get(name, "")) for name in ("timed_out", "crashed", "replaced")]
        longest = f"{each.figures['max_seconds']:.2f}" if each.figures else ""
        hostile = f"{each.rate:.1%}" + (f", {each.blocking} deaf" if each.blocking else "")
        times = f"{each.per_second / base:.2f}" if base else ""
        rows.append(
            (
                str(each.items),
                hostile,
                each.contender,
                f"{each.per_second:.1f}",
                times,
                f"{each.cpu_ms_per_item:.1f}",
                *counts,
                longest,
            )
        )
    return align([header.split("|"), *rows], left=(2,))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--peers", required=True, help="interpreter with trl, verl and math-verify")
    parser.add_argument("--data", type=Path, help="directory with gsm8k/ and eval/; items are generated without it")
    parser.add_argument("--sizes", type=int, nargs="*", default=SWEPT, help="numbers of items for the pool alone")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    measured: list[VerifierRate] = []
    agreements: list[VerdictAgreement] = []

    def items_file(count: int, rate: float, blocking: int) -> tuple[Path, list[Item]]:
        items = make_items(count, rate, data=options.data, seed=count, blocking=blocking)
        file = options.out / f"items-{count}-{rate}-{blocking}.jsonl"
        save(items, file)
        return file, items

    with ExitStack() as stack:
        log = stack.enter_context((options.out / "contenders.log").open("w", encoding="utf-8"))
        processes = {}
        for name in CONTENDERS:
            processes[name] = ContenderProcess(name, options.peers if name in PEERS else sys.executable, log)
            stack.callback(processes[name].close)
        for rate, count in COMPARED.items():
            file, items = items_file(count, rate, 0)
            found = run(processes, file, items, rate)
            measured += found
            agreements += compare(found, items)
            print("\n".join(table(found)), flush=True)
        # A job that is deaf to signals is in the sizes that have room for one hostile item.
        for count, rate in [(count, rate) for count in options.sizes for rate in COMPARED]:
            file, items = items_file(count, rate, blocking=min(1, round(count * rate)))
            measured += run({OURS: processes[OURS]}, file, items, rate)
            print("\n".join(table(measured[-1:])[-1:]), flush=True)
    report = gates(measured, agreements)
    rows = [(what, got, "met" if met else "MISSED") for what, got, met in report]
    print("\n".join([*table(measured), "", *align([("gate", "measured", ""), *rows], left=(0, 1, 2))]))
    for each in agreements:
        print(f"{each.contender}, {each.rate:.1%}: {each.equal} of {each.both} as TRL's, of {each.items} clean items")
    record = {
        "gates": [{"gate": what, "measured": got, "met": met} for what, got, met in report],
        "measured": [{k: v for k, v in asdict(each).items() if k != "verdicts"} for each in measured],
        "agreement": [asdict(each) for each in agreements],
    }
    (options.out / "verify.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
