"""Judged answers per second, and how many verdicts agree: megarl's pool, TRL and verl, on clean and on hostile answers.

    python -m megarl_lab.bench.verify --out DIR --peers .venv-conformance/bin/python

`--peers` is an interpreter with trl, verl and math-verify. Contenders get the same items, in slices and by turns, so
that what else the machine does meets all of them. Clean answers are the gold, or another answer of its form; a hostile
one takes algebra longer than the peers' time-outs. Prints a table and writes DIR/verify.json. Exits with 1 if the pool
is not as much faster than TRL as `LIMITS` say, calls a gold wrong, or judges anything a second after its deadline.
"""

import argparse
import importlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from megarl.types import Reward

OURS, TRL = "megarl", "TRL accuracy_reward"
NUM_ITEMS, NUM_SLICES = 600, 3
# Share of hostile answers → how often the pool must be as fast as TRL.
LIMITS = {0.0: 1.5, 0.01: 3.0}
SOFT_LIMIT_S, DEADLINE_S = 1.0, 2.0
_TEXT = "so we find that the number of ways is then by symmetry of both sides multiply and collect terms"
HOSTILE = (
    r"9^{9^{9^{9}}}",
    r"10^{10^{10}}",
    r"((((20!)!)!)!)",
    r"\sum_{n=1}^{10^{9}} \frac{1}{n^3+\sin n}",
    r"(\sqrt{2}+\sqrt{3}+\sqrt{5}+\sqrt{7}+\sqrt{11}+\sqrt{13})^{40}",
    "(" * 200 + "1" + ")" * 200,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A response and the gold, LaTeX without dollars. kind: "gold" if that is the answer, "other" or "hostile"."""

    response: str
    gold: str
    kind: str = "gold"


# items → verdicts, None where none is claimed, and the seconds of the slowest where that is known
Judge: TypeAlias = Callable[[Sequence[Item]], tuple[list[float | None], float]]


def make_items(count: int, rate: float, seed: int) -> list[Item]:
    """`count` items, of which the share `rate` is hostile, evenly spread."""
    rng, num_hard = random.Random(seed), round(count * rate)
    hard_at = {int((i + 0.5) * count / num_hard): HOSTILE[i % len(HOSTILE)] for i in range(num_hard)}
    items = []
    for i in range(count):
        text, gold = _problem(rng)
        other = rng.choice((f"{gold}+{rng.randint(1, 9)}", f"\\frac{{{gold}}}{{1}}", str(rng.randint(0, 999))))
        kind, answer, truth = rng.choice((("gold", gold, gold), ("other", other, gold)))
        if i in hard_at:
            kind, answer, truth = "hostile", hard_at[i], "x^2+1"
        items.append(Item(response=f"{text}\nThe answer is $\\boxed{{{answer}}}$.", gold=truth, kind=kind))
    return items


def _problem(rng: random.Random) -> tuple[str, str]:
    """A few hundred words around formulas, and an answer: half of them integers."""
    words = rng.choices(_TEXT.split(), k=rng.randint(60, 240))
    for i in range(0, len(words), 15):
        words[i] = f"${rng.randint(2, 99)}x + {rng.randint(2, 99)} = {rng.randint(100, 999)}$"
    a, b = (rng.randint(2, 99) for _ in range(2))
    forms = (
        f"\\frac{{{a}}}{{{b}}}",
        f"{a}\\sqrt{{{b}}}",
        f"x^2 + {a}x - {b}",
        f"({a}, {b})",
        f"{a}\\pi + {b}",
        f"{a}.{b}",
    )
    return " ".join(words), str(rng.randint(0, 9999)) if rng.random() < 0.5 else rng.choice(forms)


def score(response: str, ground_truth: str, extra_info: Mapping[str, object]) -> "Reward":
    """Judge as a run judges answers to the data sets of mathematics."""
    from megarl import rewards

    return rewards.score("math", response, ground_truth, extra_info)


def pool() -> Judge:
    from megarl.rewards.verifier import VerifierJob, VerifierOptions, VerifierPool

    verifier = VerifierPool(VerifierOptions(num_workers=2, soft_limit_s=SOFT_LIMIT_S, deadline_s=DEADLINE_S))
    job = VerifierJob(data_source="math", response="", ground_truth="", function="megarl_lab.bench.verify:score")

    def judge(items: Sequence[Item]) -> tuple[list[float | None], float]:
        jobs = [replace(job, response=item.response, ground_truth=item.gold) for item in items]
        results = verifier.score_all(jobs)
        verdicts = [each.reward.score if each.reward and each.outcome == "scored" else None for each in results]
        return verdicts, max(each.seconds for each in results)

    return judge


def trl() -> Judge:
    accuracy_reward = importlib.import_module("trl.rewards").accuracy_reward

    def judge(items: Sequence[Item]) -> tuple[list[float | None], float]:
        completions = [[{"role": "assistant", "content": item.response}] for item in items]
        return accuracy_reward(completions, [f"${item.gold}$" for item in items]), 0.0

    return judge


def verl() -> Judge:
    compute_score = importlib.import_module("verl.utils.reward_score.math_verify").compute_score
    return lambda items: ([compute_score(item.response, item.gold) for item in items], 0.0)


CONTENDERS: Mapping[str, Callable[[], Judge]] = {OURS: pool, TRL: trl, "verl math_verify": verl}


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierRate:
    """A contender on items of which the share `rate` is hostile. equal, both: verdicts as TRL's of those both claim."""

    contender: str
    rate: float
    per_second: float
    slowest_s: float
    wrong_golds: int
    equal: int
    both: int


class VerifierProcess:
    """A contender in a process of its own, ready to judge."""

    def __init__(self, name: str, interpreter: str, log: IO[str]) -> None:
        self._name = name
        self._process = subprocess.Popen(
            [interpreter, "-m", "megarl_lab.bench.verify", "--serve", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
            encoding="utf-8",
            errors="replace",
        )
        # The first call compiles and loads, which does not count.
        self.judge([Item(response="$\\boxed{1}$", gold="1")] * 2)

    def judge(self, items: Sequence[Item]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([asdict(item) for item in items]), file=self._process.stdin, flush=True)
        if not (line := self._process.stdout.readline()):
            raise SystemExit(f"{self._name} ended; see contenders.log")
        return json.loads(line)

    def close(self) -> None:
        self._process.communicate()


def serve(name: str) -> None:
    """Answer each line of items with a line of seconds, verdicts and the slowest one's seconds."""
    judge = CONTENDERS[name]()
    # Output of libraries must not come between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        items, began = [Item(**item) for item in json.loads(line)], time.monotonic()
        verdicts, slowest = judge(items)
        print(json.dumps([time.monotonic() - began, verdicts, slowest]), file=answers, flush=True)


def compare(processes: Mapping[str, VerifierProcess], rate: float) -> list[VerifierRate]:
    """All contenders, one slice each in turn; each round begins with another one."""
    items, size, names = make_items(NUM_ITEMS, rate, seed=0), NUM_ITEMS // NUM_SLICES, list(processes)
    replies: dict[str, list[Any]] = {name: [] for name in names}
    for i in range(NUM_SLICES):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            replies[name].append(processes[name].judge(items[i * size : (i + 1) * size]))
    verdicts = {name: [verdict for _, found, _ in replies[name] for verdict in found] for name in names}
    clean = [i for i, item in enumerate(items) if item.kind != "hostile"]
    results = []
    for name in names:
        pairs = [(verdicts[name][i], verdicts[TRL][i]) for i in clean]
        both = [(mine, theirs) for mine, theirs in pairs if mine is not None and theirs is not None]
        results.append(
            VerifierRate(
                contender=name,
                rate=rate,
                per_second=NUM_ITEMS / sum(seconds for seconds, *_ in replies[name]),
                slowest_s=max(slowest for *_, slowest in replies[name]),
                wrong_golds=sum(items[i].kind == "gold" and not verdicts[name][i] for i in clean),
                equal=sum(mine == theirs for mine, theirs in both),
                both=len(both),
            )
        )
    return results


def faults(results: Sequence[VerifierRate]) -> list[str]:
    """Say in words which limits the pool exceeds."""
    speed = {(each.contender, each.rate): each.per_second for each in results}
    ratios = {rate: speed[OURS, rate] / speed[TRL, rate] for rate in LIMITS}
    found = [
        f"{ratios[r]:.2f} × TRL, expected {least} × at {r:.0%}" for r, least in LIMITS.items() if ratios[r] < least
    ]
    ours = [each for each in results if each.contender == OURS]
    found += [f"{each.wrong_golds} golds called wrong at {each.rate:.0%}" for each in ours if each.wrong_golds]
    late = [each for each in ours if each.slowest_s > DEADLINE_S + 1]
    return found + [f"a verdict after {each.slowest_s:.1f} s at {each.rate:.0%}" for each in late]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(), help="directory to write")
    parser.add_argument("--peers", help="interpreter with trl, verl and math-verify")
    parser.add_argument("--serve", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.serve)
    from megarl.record.text_table import align

    options.out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        log = stack.enter_context((options.out / "contenders.log").open("w", encoding="utf-8"))
        processes = {}
        for name in CONTENDERS:
            processes[name] = VerifierProcess(name, sys.executable if name == OURS else options.peers, log)
            stack.callback(processes[name].close)
        results = [each for rate in LIMITS for each in compare(processes, rate)]
    rows = [[f"{v:.2f}" if isinstance(v, float) else str(v) for v in asdict(each).values()] for each in results]
    print("\n".join(align([list(asdict(results[0])), *rows])))
    (options.out / "verify.json").write_text(json.dumps([asdict(each) for each in results], indent=1), encoding="utf-8")
    if found := faults(results):
        raise SystemExit("; ".join(found))


if __name__ == "__main__":
    main()
