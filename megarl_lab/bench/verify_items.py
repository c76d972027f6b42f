"""Responses to verify: worked solutions of data sets or generated ones, and a few that algebra does not get over."""

import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["clean", "pathological", "blocking"]

_TEXT = "so we find that the number of ways is then by symmetry of both sides multiply and collect terms"
# math-verify 0.9.0 takes longer for each than TRL's time-outs, and then some.
PATHOLOGICAL = (
    r"9^{9^{9^{9}}}",
    r"10^{10^{10}}",
    r"((((20!)!)!)!)",
    r"\left(x+1\right)^{2000}",
    r"\int_0^1 x^x e^{\sin(x^2)} dx",
    r"\sum_{n=1}^{10^{9}} \frac{1}{n^3+\sin n}",
    r"(\sqrt{2}+\sqrt{3}+\sqrt{5}+\sqrt{7}+\sqrt{11}+\sqrt{13})^{40}",
    "(" * 200 + "1" + ")" * 200,
    r"x^{100}+x^{99}\sin^{40}x\cos^{41}x\tan{x}",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """`gold` is LaTeX without dollars."""

    response: str
    gold: str
    kind: Kind = "clean"


def make_items(count: int, rate: float, *, data: Path | None, seed: int, blocking: int = 0) -> list[Item]:
    """`count` items, of which the fraction `rate` is pathological, evenly spread, and `blocking` block signals."""
    rng = random.Random(seed)
    problems = list(_from_data(data)) if data else []
    num_hard = round(count * rate)
    hard_at = {int((i + 0.5) * count / num_hard): i for i in range(num_hard)} if num_hard else {}
    items = []
    for i in range(count):
        text, gold = rng.choice(problems) if problems else _generated(rng)
        if i in hard_at:
            kind: Kind = "blocking" if hard_at[i] < blocking else "pathological"
            items.append(_item(text, PATHOLOGICAL[hard_at[i] % len(PATHOLOGICAL)], "x^2+1", kind))
        else:
            items.append(_item(text, gold if rng.random() < 0.5 else _other(gold, rng), gold, "clean"))
    return items


def _item(text: str, answer: str, gold: str, kind: Kind) -> Item:
    return Item(response=f"{text}\nThe answer is $\\boxed{{{answer}}}$.", gold=gold, kind=kind)


def _other(gold: str, rng: random.Random) -> str:
    """A different spelling of the answer, or another answer."""
    forms = (f"{gold}+{rng.randint(1, 9)}", f"\\frac{{{gold}}}{{1}}", f"2 \\cdot {gold}", str(rng.randint(0, 999)))
    return rng.choice(forms)


def _from_data(directory: Path) -> Iterator[tuple[str, str]]:
    """Worked solutions without their last line, and the answers."""
    for file in sorted(directory.glob("gsm8k/*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            text, _, gold = json.loads(line)["answer"].rpartition("#### ")
            yield text, gold.replace(",", "")
    for line in (directory / "eval/minerva_math.jsonl").read_text(encoding="utf-8").splitlines():
        text, _, rest = json.loads(line)["solution"].rpartition(r"\boxed{")
        gold = rest[: _closing(rest)]
        # A few; so are often answers that need algebra.
        yield from [(text.replace("boxed", "mbox"), gold)] * 4
    for line in (directory / "eval/aime24.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        yield row["solution"].replace("boxed", "mbox"), str(row["answer"])


def _closing(text: str) -> int:
    depth = 1
    for i, character in enumerate(text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return i
    return len(text)


def _generated(rng: random.Random) -> tuple[str, str]:
    """A few hundred words around formulas, and an answer: half of them integers."""
    words = rng.choices(_TEXT.split(), k=rng.randint(60, 240))
    for i in range(0, len(words), 15):
        words[i] = f"${rng.randint(2, 99)}x + {rng.randint(2, 99)} = {rng.randint(100, 999)}$"
    a, b, c = (rng.randint(2, 99) for _ in range(3))
    forms = (
        f"\\frac{{{a}}}{{{b}}}",
        f"{a}\\sqrt{{{b}}}",
        f"x^2 + {a}x - {b}",
        f"({a}, {b})",
        f"[{min(a, b)}, {a + b})",
        f"\\begin{{pmatrix}} {a} & {b} \\\\ {c} & 1 \\end{{pmatrix}}",
        f"{a}\\pi + {b}",
        f"{a}.{b}",
    )
    return " ".join(words), str(rng.randint(0, 9999)) if rng.random() < 0.5 else rng.choice(forms)


def save(items: list[Item], file: Path) -> None:
    file.write_text("\n".join(json.dumps(asdict(item)) for item in items) + "\n", encoding="utf-8")


def load(file: Path) -> list[Item]:
    return [Item(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]
