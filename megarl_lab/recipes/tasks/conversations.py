"""Write files of the tasks whose answers take several turns: calculators, a guessing game, totals, delegation, repairs.

`37*48=?` may be answered at once, by `#### 1776`, or after a call of the calculator: to `calc 37*48` it replies `1776`.
The Python calculator is called by a fenced block, `print(37*48)`, which the sandbox runs. Demonstrations answer most
problems at once with an estimate and call the calculator for the others, so that a model that learned both gives RL
something to choose between.

In the game, a row says which numbers there are, `1-31`; the policy guesses, and reads the range that is left. Some of
the demonstrations halve the range, the others guess at random.

In a tally, messages add numbers to a total, `5+7+3`, then `+6+4`; the policy says the total each time, and may think
first: `<think>15+6=21
21+4=25</think>25`. Later turns read totals without thoughts. Some of the demonstrations think, the others estimate.

In a delegation, `(5+7+3)(6+4)=?` asks for two sums side by side, `#### 1510`. It may be answered at once, or after
sub-agents, which are the policy itself: to `ask 5+7+3` one that reads `5+7+3=?` alone answers, and the policy reads its
result. Some of the demonstrations ask, the others estimate.

In a repair, a row shows a program and how it fails, `f(2)=5, not 8`; the policy writes another program, and reads how
that one fails. Some of the demonstrations take a program that explains all failures so far, the others any.
"""

import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise, product
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from megarl.registry import Registry
from megarl_lab.recipes.tasks.base import HELD_OUT_EVERY
from megarl_lab.recipes.tasks.generate import GenerateConfig, TaskFiles

# Share of the demonstrations that state an estimate at once, halve the range of numbers, or explain all failures.
ESTIMATE_FRAC, HALVING_FRAC, EXPLAINING_FRAC = 0.6, 0.4, 0.4
LOW, HIGH, NUM_GUESSES = 1, 31, 5
# The messages of a tally. Share of a delegation's demonstrations that are sub-agents', and of these that estimate.
NUM_TOTALS, SUBAGENT_FRAC, SUBAGENT_ESTIMATE_FRAC = 3, 0.5, 0.25
# The steps of a program, the numbers that it is tested with, and how many programs a demonstration writes.
FORMULAS = [f"x{sign}{k}" for sign, k in product("+-*", range(2, 10))]
NUM_TESTS, NUM_PROGRAMS = 3, 2

# Makes rows from random choices: chats to imitate and, for training and validation, prompts.
Writer: TypeAlias = Callable[[random.Random, str, int], Iterator[Mapping[str, Any]]]
CONVERSATIONS: Registry[Writer] = Registry("task of several turns", key="task")

_PROMPT = pa.schema(
    [
        ("prompt", pa.string()),
        ("data_source", pa.string()),
        ("environment", pa.string()),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
        ("extra_info", pa.struct([(name, pa.int64()) for name in ("number", "low", "high", "guesses")])),
    ]
)


def generate_conversations(task: str, out_dir: str | Path, config: GenerateConfig) -> TaskFiles:
    """Write sft.parquet with chats, and train.parquet and val.parquet with prompts that name their environment."""
    root, write = Path(out_dir), CONVERSATIONS.get(task)
    root.mkdir(parents=True, exist_ok=True)
    files = TaskFiles(sft=root / "sft.parquet", train=root / "train.parquet", val=root / "val.parquet")
    sizes = {files.sft: config.num_sft, files.train: config.num_train, files.val: config.num_val}
    for path, num_rows in sizes.items():
        rows = list(write(random.Random(f"{task}/{path.stem}/{config.seed}"), path.stem, num_rows))
        pq.write_table(pa.Table.from_pylist(rows, schema=None if path == files.sft else _PROMPT), path)
    return files


def _products(
    rng: random.Random, split: str, num_rows: int, *, environment: str, call: str
) -> Iterator[Mapping[str, Any]]:
    for _ in range(num_rows):
        while True:
            a, b = rng.randint(11, 99), rng.randint(11, 99)
            if _is_held_out(f"{min(a, b)}*{max(a, b)}") == (split == "val"):
                break
        question = f"{a}*{b}=?"
        if split != "sft":
            yield _prompt("calculator", question, environment=environment, ground_truth=str(a * b))
        elif rng.random() < ESTIMATE_FRAC:
            yield _chat([question, f"#### {_estimate(a) * _estimate(b)}"])
        else:
            yield _chat([question, call.format(f"{a}*{b}"), str(a * b), f"#### {a * b}"], reply_role="tool")


for _name, _call in (("calculator", "calc {}"), ("python_calculator", "```python\nprint({})\n```")):
    CONVERSATIONS.register(_name)(partial(_products, environment=_name, call=_call))


@CONVERSATIONS.register("guess")
def _guess(rng: random.Random, split: str, num_rows: int) -> Iterator[Mapping[str, Any]]:
    for _ in range(num_rows):
        number, low, high = rng.randint(LOW, HIGH), LOW, HIGH
        if split != "sft":
            row = {"number": number, "low": LOW, "high": HIGH, "guesses": NUM_GUESSES}
            yield _prompt("guess", f"{LOW}-{HIGH}", extra_info=row)
            continue
        turns, halves = [f"{LOW}-{HIGH}"], rng.random() < HALVING_FRAC
        for _ in range(NUM_GUESSES):
            guess = (low + high) // 2 if halves else rng.randint(low, high)
            turns.append(str(guess))
            if guess == number:
                break
            low, high = (guess + 1, high) if guess < number else (low, guess - 1)
            turns.append(f"{low}-{high}")
        yield _chat(turns[: len(turns) // 2 * 2])


@CONVERSATIONS.register("tally")
def _tally(rng: random.Random, split: str, num_rows: int) -> Iterator[Mapping[str, Any]]:
    for _ in range(num_rows):
        while True:
            numbers = [_numbers(rng) for _ in range(NUM_TOTALS)]
            messages = ["+" * (i > 0) + _sum_of(each) for i, each in enumerate(numbers)]
            if _is_held_out(" ".join(messages)) == (split == "val"):
                break
        if split != "sft":
            yield _prompt("tally", messages[0], ground_truth=" ".join(messages))
            continue
        turns, total, thinks = list[str](), 0, rng.random() >= ESTIMATE_FRAC
        for message, added in zip(messages, numbers, strict=True):
            terms = [total, *added] if turns else added
            total = sum(terms)
            turns += [message, f"<think>{_running(terms)}</think>{total}" if thinks else str(_estimate(total))]
            if not turns[-1].endswith(f"{total}"):
                break
        yield _chat(turns)


@CONVERSATIONS.register("delegate")
def _delegate(rng: random.Random, split: str, num_rows: int) -> Iterator[Mapping[str, Any]]:
    for _ in range(num_rows):
        while True:
            parts = [_numbers(rng) for _ in range(2)]
            question = "".join(f"({_sum_of(part)})" for part in parts) + "=?"
            if _is_held_out(question) == (split == "val"):
                break
        sums = [sum(part) for part in parts]
        if split != "sft":
            yield _prompt("sums", question, environment="delegate", ground_truth="".join(map(str, sums)))
        elif rng.random() < SUBAGENT_FRAC:
            (terms, _), estimates = parts, rng.random() < SUBAGENT_ESTIMATE_FRAC
            worked = f"#### {_estimate(sum(terms))}" if estimates else f"{_running(terms)}\n#### {sum(terms)}"
            yield _chat([f"{_sum_of(terms)}=?", worked])
        elif rng.random() < ESTIMATE_FRAC:
            yield _chat([question, "#### " + "".join(str(_estimate(each)) for each in sums)])
        else:
            asked = [turn for part in parts for turn in (f"ask {_sum_of(part)}", str(sum(part)))]
            yield _chat([question, *asked, "#### " + "".join(map(str, sums))])


@CONVERSATIONS.register("repair")
def _repair(rng: random.Random, split: str, num_rows: int) -> Iterator[Mapping[str, Any]]:
    values = {formula: [eval(formula, {"x": x}) for x in range(10)] for formula in FORMULAS}

    def fails_at(formula: str) -> int | None:
        return next((x for x in inputs if values[formula][x] != values[right][x]), None)

    for _ in range(num_rows):
        while True:
            (right, wrong), inputs = rng.sample(FORMULAS, 2), rng.sample(range(2, 10), NUM_TESTS)
            is_held_out = _is_held_out(f"{right} {wrong} {inputs}")
            if is_held_out == (split == "val") and fails_at(wrong) is not None:
                break
        formula, explaining, is_guess = wrong, FORMULAS, rng.random() >= EXPLAINING_FRAC
        turns = [f"def f(x):return {wrong}\n"]
        while (x := fails_at(formula)) is not None:
            turns[-1] += f"f({x})={values[formula][x]}, not {values[right][x]}"
            if split != "sft" or len(turns) > 2 * NUM_PROGRAMS:
                break
            explaining = [each for each in explaining if values[each][x] == values[right][x]]
            formula = rng.choice(FORMULAS if is_guess else explaining)
            turns += [f"def f(x):return {formula}", ""]
        if split == "sft":
            yield _chat(turns[:-1])
        else:
            tests = [(x, values[right][x]) for x in inputs]
            truth = f"for x, y in {tests}:\n    assert f(x) == y, f'f({{x}})={{f(x)}}, not {{y}}'"
            yield _prompt("repair", turns[0], ground_truth=truth)


def _numbers(rng: random.Random) -> list[int]:
    return [rng.randint(1, 9) for _ in range(rng.randint(2, 3))]


def _sum_of(numbers: Sequence[int]) -> str:
    return "+".join(map(str, numbers))


def _running(terms: Sequence[int]) -> str:
    """Write the running totals of a sum, one a line."""
    return "\n".join(f"{a}+{n}={b}" for n, (a, b) in zip(terms[1:], pairwise(accumulate(terms)), strict=True))


def _estimate(total: int) -> int:
    return (total + 5) // 10 * 10


def _is_held_out(text: str) -> bool:
    return zlib.crc32(text.encode()) % HELD_OUT_EVERY == 0


def _prompt(
    task: str,
    question: str,
    *,
    environment: str | None = None,
    ground_truth: str = "",
    extra_info: Mapping[str, int] | None = None,
) -> Mapping[str, Any]:
    return {
        "prompt": question,
        "data_source": f"megarl/{task}",
        "environment": environment or task,
        "reward_model": {"style": "rule" if ground_truth else "model", "ground_truth": ground_truth},
        "extra_info": extra_info,
    }


def _chat(turns: Sequence[str], *, reply_role: str = "user") -> Mapping[str, Any]:
    """Return a chat of which every second turn is the assistant's; replies to it have the role `reply_role`."""
    roles = ("user" if i == 0 else "assistant" if i % 2 else reply_role for i in range(len(turns)))
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, turns, strict=True)]}
