"""Print what checks say of many configurations, for the machine that is named or else for this one, as JSON.

`python -m tests.helpers.target_answers`: a process of its own, which imports no library that computes.
"""

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from megarl.config.check import check_train
from megarl.config.check_model import check_model
from megarl.config.load import from_dict, load_config, with_overrides
from megarl.config.schema import Config
from megarl.config.support import features
from megarl.config.target import checked_for, named_target
from megarl.errors import ConfigError
from megarl.weights.families import read_model_spec

CONFIGS = Path(__file__).parents[2] / "configs"
BASE = {"model": {"path": "model"}, "data": {"train": ["train.parquet"]}, "rollout": {"engine": {"num_engines": 1}}}
# Features on top of a run file whose layout and experts they meet.
RUN_FILE = CONFIGS / "run/gsm8k-qwen3-30b-a3b.yaml"


def questions() -> Iterator[tuple[str, Callable[[], None]]]:
    """Each with a name: run files, families under two layouts, and features on two configurations."""
    for file in sorted((CONFIGS / "run").glob("*-rl.yaml")) + sorted((CONFIGS / "run").glob("gsm8k-*.yaml")):
        yield file.name, partial(check_run, file)
    for path in sorted((CONFIGS / "model/hf").iterdir()):
        for layout in ("{tp: 2, sequence_parallel: true}", "{dp: 2, ep: 2}"):
            config = with_overrides(from_dict(Config, BASE), [f"actor.layout={layout}", "rollout.engine.tp=2"])
            yield f"{path.name} {layout}", partial(check_model, config, read_model_spec(path).hf_config)
    for each in features():
        settings = (*each.beside, *each.settings)
        yield f"{each.name} alone", partial(check_run, None, *settings)
        yield f"{each.name} in a run", partial(check_run, RUN_FILE, *settings)


def check_run(file: Path | None, *settings: str) -> None:
    check_train(with_overrides(from_dict(Config, BASE), settings) if file is None else load_config(file, settings))


def answers() -> dict[str, str]:
    """What is wrong with each, or nothing."""
    found = {}
    with checked_for(named_target(None)):
        for name, ask in questions():
            try:
                ask()
            except ConfigError as error:
                found[name] = str(error)
            else:
                found[name] = ""
    return found


if __name__ == "__main__":
    said = answers()
    assert not {"torch", "ray", "vllm"} & sys.modules.keys()
    print(json.dumps(said))
