"""Write questions of arithmetic in words, for a model that already reads: `Tom has 7 apples and gets 5 more. ...`

A question adds, subtracts or multiplies two numbers, in one of several wordings. The numbers and the operation decide
whether it is held out, so that no wording of a held-out calculation is trained on.
"""

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megarl_lab.recipes.public_files import write_parquet
from megarl_lab.recipes.tasks.base import HELD_OUT_EVERY
from megarl_lab.recipes.tasks.generate import GenerateConfig, SplitFiles

NAMES = ("Tom", "Anna", "Ben", "Mia", "Sam", "Lily", "Max", "Eva", "Jack", "Rosa", "Leo", "Nina")
# Each question follows this turn, which shows in few tokens what an answer is; its numbers are in no other question.
EXAMPLE = (("system", "Calculate."), ("user", "What is 1 plus 3?"), ("assistant", "1 + 3 = 4"))
THINGS = ("apples", "books", "coins", "marbles", "stickers", "pens", "cards", "shells", "cookies", "balls")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One of the calculations: how its two numbers are drawn, its result, and wordings of the question."""

    draw: Callable[[random.Random], tuple[int, int]]
    result: Callable[[int, int], int]
    wordings: tuple[str, ...]


OPERATIONS = {
    "+": Operation(
        draw=lambda rng: (rng.randint(2, 20), rng.randint(2, 20)),
        result=lambda a, b: a + b,
        wordings=(
            "{name} has {a} {things} and gets {b} more. How many {things} does {name} have?",
            "{name} has {a} {things} and {other} has {b}. How many {things} do they have together?",
            "There are {a} {things} in a box. {name} puts {b} more in. How many {things} are in the box?",
            "{name} buys {a} {things} today and {b} tomorrow. How many {things} does {name} buy?",
            "What is {a} plus {b}?",
        ),
    ),
    "-": Operation(
        draw=lambda rng: (lambda b, rest: (b + rest, b))(rng.randint(2, 15), rng.randint(2, 15)),
        result=lambda a, b: a - b,
        wordings=(
            "{name} has {a} {things} and loses {b}. How many {things} are left?",
            "{name} had {a} {things} and gave {b} to {other}. How many {things} does {name} have now?",
            "There are {a} {things} on a table. {name} takes {b} away. How many {things} are still there?",
            "{name} has {a} {things}, {other} has {b}. How many more {things} does {name} have?",
            "What is {a} minus {b}?",
        ),
    ),
    "*": Operation(
        draw=lambda rng: (rng.randint(2, 9), rng.randint(2, 9)),
        result=lambda a, b: a * b,
        wordings=(
            "{name} has {a} bags with {b} {things} each. How many {things} does {name} have?",
            "There are {a} rows of {b} {things}. How many {things} are there?",
            "{a} children get {b} {things} each. How many {things} is that?",
            "{name} buys {b} {things} on each of {a} days. How many {things} does {name} buy?",
            "What is {a} times {b}?",
        ),
    ),
}


def generate_arithmetic(out_dir: str | Path, config: GenerateConfig) -> SplitFiles:
    """Write train.parquet and val.parquet; all questions of the second are distinct and held out."""
    root = Path(out_dir)
    root.mkdir(parents=True, exist_ok=True)
    files = SplitFiles(train=root / "train.parquet", val=root / "val.parquet")
    for path, num_rows in ((files.train, config.num_train), (files.val, config.num_val)):
        rng = random.Random(f"arithmetic/{path.stem}/{config.seed}")
        questions: dict[str, tuple[str, int]] = {}
        while len(questions) < num_rows:
            symbol = rng.choice(list(OPERATIONS))
            operation = OPERATIONS[symbol]
            a, b = operation.draw(rng)
            # The order of the numbers makes no difference to sums and products.
            key = f"{a}-{b}" if symbol == "-" else f"{min(a, b)}{symbol}{max(a, b)}"
            if (zlib.crc32(key.encode()) % HELD_OUT_EVERY == 0) == (path == files.val):
                name, other = rng.sample(NAMES, 2)
                words = {"name": name, "other": other, "things": rng.choice(THINGS)}
                result = operation.result(a, b)
                question = rng.choice(operation.wordings).format(a=a, b=b, **words)
                questions[question] = (f"{a} {symbol} {b} = {result}", result)
        rows = [
            {
                "prompt": [{"role": role, "content": text} for role, text in (*EXAMPLE, ("user", question))],
                "data_source": "megarl/arithmetic",
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(result)},
                "extra_info": {"index": index, "split": path.stem, "gold_solution": solution},
                "target": [{"role": "assistant", "content": solution}],
            }
            for index, (question, (solution, result)) in enumerate(questions.items())
        ]
        write_parquet(path, rows)
    return files
