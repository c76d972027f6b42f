"""Convert rows of the MATH data set (problem, level, type, solution with a boxed answer) to the prompt schema."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.data.files import RowFiles
from megarl.errors import DataError
from megarl.host.reading import read_object
from megarl_lab.recipes.public_files import write_parquet

# How the verifier knows the two splits, see docs/rewards/scorers.md.
TRAIN_SOURCE, TEST_SOURCE = "hendrycks_math", "math500"
INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."
COLUMNS = ("problem", "solution", "answer", "level", "type", "subject")
_LEVEL = re.compile(r"(?:Level )?([1-5])")


def convert_math(
    paths: Sequence[Path],
    out: Path,
    *,
    data_source: str,
    read_answer: Callable[[str], str | None],
    left_out: Collection[str] = (),
) -> list[str]:
    """Write one file with the prompts, ground truths and solutions of MATH files, and return the problems' texts.

    Args:
        paths: Parquet or JSON lines in the form of hendrycks MATH or of MATH-500 (`subject` for `type`, and `answer`),
            and directories of MATH's original form, one .json file per problem.
        read_answer: returns the answer that a solution states, which is the ground truth where `answer` is missing.
        left_out: problems that must not be written, such as those of the test split.

    Raises:
        DataError: a problem or solution is not text, a level is unknown, or a solution states no answer. The message
            names the row.
    """
    rows: list[dict[str, Any]] = []
    for row, where in _read(paths):
        for name in ("problem", "solution"):
            if not isinstance(row.get(name), str):
                raise DataError(f"{where}: {name} is {row.get(name)!r}, expected a string")
        answer = row.get("answer") or read_answer(row["solution"])
        if not answer:
            raise DataError(f"{where}: the solution ends in {row['solution'][-40:]!r}, expected a \\boxed{{}} answer")
        # Two problems of MATH have the level "Level ?".
        level, given = None, row.get("level")
        if given not in (None, "Level ?"):
            if (match := _LEVEL.fullmatch(str(given))) is None:
                raise DataError(f"{where}: level is {given!r}, expected 1 to 5, as in 'Level 5'")
            level = int(match[1])
        if row["problem"] in left_out:
            continue
        rows.append(
            {
                "prompt": [{"role": "user", "content": f"{row['problem']} {INSTRUCTION}"}],
                "data_source": data_source,
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": answer},
                "extra_info": {
                    "index": len(rows),
                    "split": out.stem,
                    "gold_solution": row["solution"],
                    "difficulty_score": level,
                    "subject": row.get("type") or row.get("subject"),
                },
                "target": [{"role": "assistant", "content": row["solution"]}],
            }
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    write_parquet(out, rows)
    return [row["prompt"][0]["content"].removesuffix(f" {INSTRUCTION}") for row in rows]


def _read(paths: Sequence[Path]) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield the rows of files and directories in order, each with its file and position for messages."""
    for path in paths:
        if not path.is_dir():
            files = RowFiles([path], columns=COLUMNS, required=("problem", "solution"))
            yield from ((row, files.where(index)) for index, row in enumerate(files))
            continue
        # The names are numbers.
        problems = sorted(path.rglob("*.json"), key=lambda file: (file.parent, len(file.name), file.name))
        if not problems:
            raise DataError(f"{path}: has no .json file; expected a directory of MATH, with a file per problem")
        for file in problems:
            yield read_object(file), str(file)
