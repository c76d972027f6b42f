"""GSM8K's JSON lines (question, answer ending in `#### value`) to the prompt schema."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megarl.data.files import RowFiles
from megarl.data.records import write_parquet
from megarl.errors import DataError

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
COLUMNS = ("question", "answer")


def convert_gsm8k(path: str | Path, out_dir: str | Path) -> Path:
    """Write OUT_DIR/<stem>.parquet with prompts, ground truths, gold solutions and demonstrations; its path.

    DataError names the row whose answer has no `#### value`.
    """
    out = Path(out_dir) / f"{Path(path).stem}.parquet"
    out.parent.mkdir(parents=True, exist_ok=True)
    write_parquet(out, _rows(RowFiles([path], columns=COLUMNS, required=COLUMNS), Path(path).stem))
    return out


def _rows(files: RowFiles, split: str) -> Iterator[Mapping[str, Any]]:
    for index, row in enumerate(files):
        for name in COLUMNS:
            if not isinstance(row.get(name), str):
                raise DataError(f"{files.where(index)}: {name} is {row.get(name)!r}, expected a string")
        solution, mark, value = row["answer"].rpartition("#### ")
        if not mark or not solution or not value.strip():
            raise DataError(f"{files.where(index)}: the answer ends in {row['answer'][-40:]!r}, expected '#### value'")
        yield {
            "prompt": [{"role": "user", "content": f"{row['question']} {INSTRUCTION}"}],
            "data_source": DATA_SOURCE,
            "ability": "math",
            "reward_model": {
                "style": "rule",
                "ground_truth": value.strip().replace(",", "").replace("$", ""),
            },
            "extra_info": {"index": index, "split": split, "gold_solution": row["answer"]},
            "target": [{"role": "assistant", "content": row["answer"]}],
        }
