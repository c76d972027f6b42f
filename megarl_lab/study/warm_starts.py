"""Warm starts of the tiny model: supervised runs of different lengths, on demonstrations with hints in known places."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from megarl.config import load_config
from megarl.data.hints import hinted_messages
from megarl.run.start import train_supervised
from megarl.types import Message
from megarl_lab.recipes.prompt_file import write_parquet
from megarl_lab.recipes.quickstart import CONFIGS, NUM_SFT, NUM_TRAIN, NUM_VAL
from megarl_lab.recipes.tasks import TASKS
from megarl_lab.recipes.tasks.generate import GenerateConfig, generate
from megarl_lab.recipes.tiny_model import TinyModelConfig, make_tiny_model
from megarl_lab.study.hinted import HINTS

_MARK = "Hint: "


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart:
    """This is a supervised model of a study, called `name` in its tables.

    everywhere: the demonstrations that have a hint have it in every place of `HINTS` equally often; else they have it
    before the question, as in the quickstart's data.
    """

    name: str
    steps: int
    everywhere: bool = False


def warm_model(root: Path, task: str, start: WarmStart, *, seed: int) -> Path:
    """Return the directory of the warm model under `root`; train it first if it is not there."""
    export = root / start.name / "export"
    if export.is_dir():
        return export
    data = root / "data"
    if not (root / "base").is_dir():
        sizes = GenerateConfig(seed=seed, num_sft=NUM_SFT, num_train=NUM_TRAIN, num_val=NUM_VAL)
        generate(TASKS.get(task), data, sizes)
        make_tiny_model(root / "base", TinyModelConfig(), seed=seed)
    source = data / "sft.parquet"
    if start.everywhere:
        source = data / "sft-everywhere.parquet"
        rows = pq.read_table(data / "sft.parquet").to_pylist()
        write_parquet(source, _with_hints_everywhere(rows, random.Random(f"{task}/{seed}")))
    own = [f"run.dir={root}", f"run.name={start.name}", f"run.seed={seed}", f"model.path={root}/base"]
    overrides = [*own, f"sft.train=[{source}]", f"sft.total_steps={start.steps}"]
    train_supervised("sft", load_config(CONFIGS / f"{task}-sft.yaml", overrides), overwrite=True)
    return export


def _with_hints_everywhere(rows: list[dict[str, Any]], rng: random.Random) -> Iterator[Mapping[str, Any]]:
    """Move the hints that stand before a question, each to a place drawn at random."""
    for row in rows:
        text = row["prompt"][0]["content"]
        if text.startswith(_MARK):
            hint, _, question = text.removeprefix(_MARK).rpartition("\n")
            chat = [Message(role="user", content=question)]
            moved = hinted_messages(chat, hint, HINTS[rng.choice(list(HINTS))])
            row["prompt"] = [message.as_dict() for message in moved]
        yield row
