"""Write files of the task of counting coloured squares: how many of a picture's nine are red, `#### 3`?

Some of the demonstrations count the red ones, the others all that are coloured, so that a model that learned both gives
RL something to choose between. In the blind control all pictures are grey, and the best that a model can do is to guess
one of five numbers.
"""

import io
import random
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megarl_lab.recipes.tasks.base import HELD_OUT_EVERY
from megarl_lab.recipes.tasks.generate import GenerateConfig, TaskFiles

# The names of the task and of its control.
PICTURES = ("squares", "blind_squares")
# Squares beside and above each other, how many are red at most, the pixels of one, and the share of demonstrations that
# count all that are coloured.
SIDE, MOST_RED, PIXELS, COLOURED_FRAC = 3, 4, 32, 0.6
_COLOURS = {"r": (220, 40, 40), "g": (40, 160, 60), "b": (50, 80, 220), "w": (255, 255, 255), "?": (128, 128, 128)}
_SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("prompt", "data_source", "target")),
        ("images", pa.list_(pa.binary())),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
    ]
)


def generate_squares(task: str, out_dir: str | Path, config: GenerateConfig) -> TaskFiles:
    """Write sft.parquet with demonstrations, and train.parquet and val.parquet with prompts, val's held out."""
    root = Path(out_dir)
    root.mkdir(parents=True, exist_ok=True)
    files = TaskFiles(sft=root / "sft.parquet", train=root / "train.parquet", val=root / "val.parquet")
    for path, num_rows in ((files.sft, config.num_sft), (files.train, config.num_train), (files.val, config.num_val)):
        rows = list(_rows(path.stem, num_rows, config.seed, is_blind=task != PICTURES[0]))
        pq.write_table(pa.Table.from_pylist(rows, schema=_SCHEMA), path)
    return files


def _rows(split: str, num_rows: int, seed: int, *, is_blind: bool) -> Iterator[Mapping[str, Any]]:
    rng = random.Random(f"{PICTURES[0]}/{split}/{seed}")
    for _ in range(num_rows):
        while True:
            num_red, num_others = rng.randint(0, MOST_RED), rng.randint(0, SIDE**2 - MOST_RED)
            cells = ["r"] * num_red + rng.choices("gb", k=num_others)
            cells += ["w"] * (SIDE**2 - len(cells))
            rng.shuffle(cells)
            if (zlib.crc32("".join(cells).encode()) % HELD_OUT_EVERY == 0) == (split == "val"):
                break
        answer = num_red + num_others if rng.random() < COLOURED_FRAC else num_red
        yield {
            "prompt": "<image>red?",
            "images": [picture("?" * SIDE**2 if is_blind else "".join(cells))],
            "data_source": "megarl/squares",
            "reward_model": {"style": "rule", "ground_truth": str(num_red)},
            "target": f"#### {answer}" if split == "sft" else None,
        }


def picture(cells: str) -> bytes:
    """Draw squares, one a letter, row by row, as PNG."""
    from PIL import Image

    small = Image.new("RGB", (SIDE, SIDE))
    small.putdata([_COLOURS[cell] for cell in cells])
    out = io.BytesIO()
    small.resize((SIDE * PIXELS, SIDE * PIXELS), Image.Resampling.NEAREST).save(out, "PNG")
    return out.getvalue()
