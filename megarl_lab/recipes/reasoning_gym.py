"""Write prompts from reasoning-gym, a package of a hundred generators of problems; `megarl.rewards` scores them."""

import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megarl.environments.reasoning_gym import INSTRUCTION, make_dataset
from megarl.errors import ConfigError
from megarl_lab.recipes.public_files import write_parquet

DATA_SOURCE = "reasoning_gym"


def write_reasoning_gym(
    datasets: Mapping[str, Mapping[str, Any]], out_dir: str | Path, *, num_train: int, num_val: int, seed: int
) -> list[Path]:
    """Write train.parquet and val.parquet with rows of all datasets in turn; no question of val is in train.

    datasets: by name in reasoning-gym the settings of each. Raises ConfigError without the package, for an unknown
    name and for settings that the dataset does not take.
    """
    root, seen = Path(out_dir), set[str]()
    root.mkdir(parents=True, exist_ok=True)
    files = [(root / "val.parquet", num_val), (root / "train.parquet", num_train)]
    for path, num_rows in files:
        made = {name: _entries(name, settings, f"{path.stem}/{seed}") for name, settings in datasets.items()}
        rows: list[Mapping[str, Any]] = []
        while len(rows) < num_rows:
            name = list(made)[len(rows) % len(made)]
            for _ in range(1000):
                entry = next(made[name])
                if path.stem == "val" or entry["question"] not in seen:
                    break
            else:
                raise ConfigError(f"reasoning-gym: {name} makes no more questions than {num_val} of val.parquet hold")
            if path.stem == "val":
                seen.add(entry["question"])
            rows.append(_row(name, entry, {"index": len(rows), "split": path.stem}))
        write_parquet(path, rows)
    return [path for path, _ in reversed(files)]


def _row(name: str, entry: Mapping[str, Any], extra_info: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "prompt": [{"role": "user", "content": f"{entry['question']}\n{INSTRUCTION}"}],
        "data_source": DATA_SOURCE,
        "ability": name,
        # As Python, since some of its scorers tell tuples from lists.
        "reward_model": {"style": "rule", "ground_truth": repr(_plain(entry))},
        "extra_info": extra_info,
    }


def _entries(name: str, settings: Mapping[str, Any], seed: str) -> Iterator[Mapping[str, Any]]:
    """Yield a dataset's entries without end."""
    made = make_dataset(name, {"seed": zlib.crc32(seed.encode()), **settings})
    index = 0
    while True:
        yield made[index]
        index += 1


def _plain(value: Any) -> Any:
    """Turn subclasses, such as NumPy's texts, into what Python writes as literals."""
    if isinstance(value, dict):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return (list if isinstance(value, list) else tuple)(map(_plain, value))
    return str(value) if isinstance(value, str) else value
