"""Convert GSM8K's JSON lines (a question, and an answer that ends in `#### value`) to the prompt schema."""

from pathlib import Path

from megarl.data.files import RowFiles
from megarl.data.messages import text_of
from megarl.errors import DataError
from megarl_lab.recipes.public_files import write_parquet

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
COLUMNS = ("question", "answer")


def convert_gsm8k(path: str | Path, out_dir: str | Path) -> Path:
    """Write OUT_DIR/<stem>.parquet with prompts, ground truths, gold solutions and demonstrations; return its path.

    Raises:
        DataError: an answer has no `#### value`; the message names its row.
    """
    out = Path(out_dir) / f"{Path(path).stem}.parquet"
    out.parent.mkdir(parents=True, exist_ok=True)
    files, rows = RowFiles([path], columns=COLUMNS, required=COLUMNS), []
    for index, row in enumerate(files):
        question, answer = (text_of(row, name, files.where(index)) for name in COLUMNS)
        solution, mark, value = answer.rpartition("#### ")
        if not mark or not solution or not value.strip():
            raise DataError(f"{files.where(index)}: the answer ends in {answer[-40:]!r}, expected '#### value'")
        truth = value.strip().replace(",", "").replace("$", "")
        rows.append(
            {
                "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
                "data_source": DATA_SOURCE,
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": truth},
                "extra_info": {"index": index, "split": Path(path).stem, "gold_solution": answer},
                "target": [{"role": "assistant", "content": answer}],
            }
        )
    write_parquet(out, rows)
    return out
