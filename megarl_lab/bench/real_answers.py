"""Scorers on real problems: worked solutions, boxed gold, and the gold of other problems.

python -m megarl_lab.bench.real_answers DIR [--shifts 20] [--out FILE.json]

Mutations of a gold are the gold with one digit, its sign, a factor or an element changed; see `mutations`.

DIR holds `gsm8k/{train,test}.jsonl` (`question`, `answer`) and `eval/{aime24,amc23,minerva_math,svamp}.jsonl`. Exit
code 1 if worked solutions of GSM8K or Minerva score below 99.5 %, if a boxed gold is wrong, or if the gold of another
problem or a mutation is accepted. Pairs that are truly equal do not count there: the same text, or the same value by
Python's fractions.
"""

import argparse
import json
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path

from latex2sympy2_extended.math_normalization import extract_boxed_content

from megarl.record.text_table import align
from megarl.rewards import score, source_spec
from megarl_answers.numbers import REL_TOLERANCE

WORKED_GATE = 0.995
LIMIT_S = 20.0
GATED = ("gsm8k/train", "gsm8k/test", "minerva_math")


@dataclass(frozen=True, slots=True, kw_only=True)
class MathProblem:
    """`solution` is "" where a set has none."""

    label: str
    gold: str
    solution: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Counts of one set under one scorer: answers judged, answers correct, and those that were not as wanted."""

    data: str
    check: str
    scorer: str
    judged: int
    correct: int
    unexpected: tuple[str, ...]


def read_sets(root: Path) -> dict[str, list[MathProblem]]:
    """Problems by the name of their set. Gold of GSM8K and Minerva stands in the solution."""
    sets = {}
    for name in ("train", "test"):
        rows = _rows(root / f"gsm8k/{name}.jsonl")
        sets[f"gsm8k/{name}"] = [
            MathProblem(label=str(i), gold=row["answer"].rpartition("#### ")[2], solution=row["answer"])
            for i, row in enumerate(rows)
        ]
    sets["minerva_math"] = [
        # The library's reading of the box, not ours.
        MathProblem(
            label=str(row["idx"]), gold=extract_boxed_content(row["solution"], "last"), solution=row["solution"]
        )
        for row in _rows(root / "eval/minerva_math.jsonl")
    ]
    sets["aime24"] = [
        MathProblem(label=str(row["id"]), gold=row["answer"], solution=row["solution"])
        for row in _rows(root / "eval/aime24.jsonl")
    ]
    for name, key, label in (("amc23", "answer", "id"), ("svamp", "Answer", "ID")):
        rows = _rows(root / f"eval/{name}.jsonl")
        sets[name] = [MathProblem(label=str(row[label]), gold=str(row[key]), solution="") for row in rows]
    return sets


def _rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def worked(data: str, scorer: str, problems: Sequence[MathProblem]) -> Counts:
    """Solutions against their own gold."""
    wrong = [f"{p.label} (gold {p.gold})" for p in problems if not is_correct(scorer, p.solution, p.gold)]
    return _counts(data, "worked", scorer, len(problems), len(problems) - len(wrong), wrong)


def boxed(data: str, scorer: str, problems: Sequence[MathProblem]) -> Counts:
    """Gold against itself, stated as the scorer wants it."""
    wrong = [f"{p.label} (gold {p.gold})" for p in problems if not is_correct(scorer, _stated(scorer, p.gold), p.gold)]
    return _counts(data, "boxed gold", scorer, len(problems), len(problems) - len(wrong), wrong)


def shuffled(data: str, scorer: str, problems: Sequence[MathProblem], num_shifts: int) -> Counts:
    """Gold against that of the problem `shift` places on, for spread shifts."""
    judged, accepted = 0, []
    for answer, gold in _pairs(problems, num_shifts):
        if are_truly_equal(answer.gold, gold.gold):
            continue
        judged += 1
        if is_correct(scorer, _stated(scorer, answer.gold), gold.gold):
            accepted.append(f"{answer.gold} for {gold.gold} ({answer.label}, {gold.label})")
    return _counts(data, "other gold", scorer, judged, len(accepted), accepted)


def _pairs(problems: Sequence[MathProblem], num_shifts: int) -> Iterator[tuple[MathProblem, MathProblem]]:
    size = len(problems)
    for shift in sorted({1 + index * (size - 1) // num_shifts for index in range(num_shifts)}):
        for index in range(size):
            yield problems[index], problems[(index + shift) % size]


def mutated(data: str, scorer: str, problems: Sequence[MathProblem]) -> Counts:
    """Mutations of each distinct gold against it, without those within the tolerance of rounded decimals."""
    judged, accepted = 0, []
    for gold in sorted({problem.gold for problem in problems}):
        value = _value(gold)
        for answer in mutations(gold):
            other = _value(answer)
            is_near = value is not None and other is not None and abs(value - other) <= REL_TOLERANCE * abs(value)
            # GSM8K's scorer reads the number alone, as its authors' does.
            if is_near or (scorer == "openai/gsm8k" and answer.endswith("pi")):
                continue
            judged += 1
            if is_correct(scorer, _stated(scorer, answer), gold):
                accepted.append(f"{answer} for {gold}")
    return _counts(data, "mutation", scorer, judged, len(accepted), accepted)


def mutations(gold: str) -> list[str]:
    """Each digit replaced by the next one, digits of subscripts that name a quantity aside; another sign, ten times a
    whole number, a factor π, and without the last element of several.
    """
    names = [match.span() for match in re.finditer(r"[A-Za-z]_(?:\{[^{}]*\}|\w)", gold)]
    found = [
        gold[: match.start()] + str(int(match[0]) % 9 + 1) + gold[match.end() :]
        for match in re.finditer(r"\d", gold)
        if not any(start <= match.start() < end for start, end in names)
    ]
    if re.fullmatch(r"-?[\d,.]*\d", gold) and _value(gold) != 0:
        found.append(gold[1:] if gold.startswith("-") else f"-{gold}")
        found += [f"{gold}0"] if "." not in gold else []
        found.append(rf"{gold}\pi")
    if ", " in gold:
        end = gold[-1] if gold[-1] in ")]}" else ""
        found.append(gold.rpartition(", ")[0] + end)
    return found


def are_truly_equal(a: str, b: str) -> bool:
    """The same text, or the same value."""
    if a == b:
        return True
    values = [_value(text) for text in (a, b)]
    return values[0] is not None and values[0] == values[1]


def _value(text: str) -> Fraction | None:
    try:
        return Fraction(text.replace(",", ""))
    except (ValueError, ZeroDivisionError):
        return None


class _TooLong(BaseException):
    """Not an Exception, which the scorers take for one of sympy's."""


def _stop(*_: object) -> None:
    raise _TooLong


def is_correct(scorer: str, response: str, gold: str) -> bool:
    """The scorer's verdict; wrong after `LIMIT_S` seconds, as a verifier's worker would say."""
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        return score(scorer, response, gold, {}, source=source_spec(scorer)).correct
    except _TooLong:
        print(f"over {LIMIT_S:.0f} s: {scorer}, {response[-200:]!r} for {gold!r}", flush=True)
        return False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _stated(scorer: str, gold: str) -> str:
    return f"#### {gold}" if scorer == "openai/gsm8k" else rf"So it is $\boxed{{{gold}}}$."


def _counts(data: str, check: str, scorer: str, judged: int, correct: int, unexpected: Sequence[str]) -> Counts:
    return Counts(data=data, check=check, scorer=scorer, judged=judged, correct=correct, unexpected=tuple(unexpected))


def measure(root: Path, num_shifts: int) -> list[Counts]:
    """All checks of all sets."""
    results = []
    for data, problems in read_sets(root).items():
        own = ["openai/gsm8k"] if data.startswith("gsm8k") else []
        if data.startswith("gsm8k"):
            results.append(worked(data, "openai/gsm8k", problems))
        elif problems[0].solution:
            results.append(worked(data, "math", problems))
        if data == "aime24":
            results.append(worked(data, "strict", problems))
        for scorer in [*own, "math", "strict"]:
            results.append(boxed(data, scorer, problems))
            results.append(shuffled(data, scorer, problems, num_shifts))
            results.append(mutated(data, scorer, problems))
    return results


def failures(results: Sequence[Counts]) -> list[str]:
    """List what does not hold."""
    found = []
    for result in results:
        name = f"{result.data}, {result.check}, {result.scorer}"
        if result.check == "worked" and result.data in GATED and result.correct < WORKED_GATE * result.judged:
            found.append(f"{name}: {result.correct}/{result.judged} correct, at least {WORKED_GATE:.1%} expected")
        elif result.check == "boxed gold" and result.unexpected:
            found.append(f"{name}: {len(result.unexpected)} wrong, 0 expected")
        elif result.check in ("other gold", "mutation") and result.correct:
            found.append(f"{name}: {result.correct} accepted, 0 expected")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir", type=Path)
    parser.add_argument("--shifts", type=int, default=20)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGALRM, _stop)
    results = measure(args.dir, args.shifts)
    rows = [[r.data, r.check, r.scorer, f"{r.judged:,}", f"{r.correct:,}"] for r in results]
    print("\n".join(align([["data", "check", "scorer", "judged", "correct"], *rows])))
    for result in results:
        for line in result.unexpected:
            print(f"{result.data}, {result.check}, {result.scorer}: {line}")
    if args.out:
        args.out.write_text(json.dumps([asdict(result) for result in results], indent=1), encoding="utf-8")
    failed = failures(results)
    for line in failed:
        print(f"FAILED {line}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
