"""Go from nothing to a report: make a tiny model and data, warm it up on demonstrations, then train it by RL."""

from pathlib import Path

from megarl.algos.build import algorithm_of
from megarl.config import load_config
from megarl.config.check import check_train
from megarl.config.load import PACKAGED
from megarl.data.tasks import TASKS
from megarl.data.tasks.conversations import CONVERSATIONS, generate_conversations
from megarl.data.tasks.generate import GenerateConfig, generate
from megarl.data.tiny_model import TinyModelConfig, make_tiny_model
from megarl.run.start import train, train_supervised

CONFIGS = PACKAGED / "run"
RUNS = Path("runs")
NUM_SFT, NUM_TRAIN, NUM_VAL = 32768, 2000, 256


def quickstart(*, algo: str, task: str, seed: int) -> None:
    """Make data and a model, and train it; everything is left under runs/TASK-seedN.

    The directory holds the data, the base model, the supervised run `sft` and the run `algo`. A finished supervised run
    is used again, so that algorithms are compared from the same start.
    """
    root = RUNS / f"{task}-seed{seed}"
    warm = root / "sft" / "export"
    common = [f"run.dir={root}", f"run.seed={seed}"]
    data = [f"data.train=[{root}/data/train.parquet]", f"data.val=[{root}/data/val.parquet]"]
    overrides = [*common, *data, f"use.algo={algo}", f"run.name={algo}", f"model.path={warm}"]
    rl = load_config(CONFIGS / f"{task}-rl.yaml", overrides)
    # A mistake in the algorithm must not surface after minutes of supervised training.
    check_train(rl)
    algorithm_of(rl)
    if warm.is_dir():
        print(f"using the supervised model in {warm}")
    else:
        print(f"making data and a tiny model in {root}")
        sizes = GenerateConfig(seed=seed, num_sft=NUM_SFT, num_train=NUM_TRAIN, num_val=NUM_VAL)
        if task in CONVERSATIONS:
            generate_conversations(task, root / "data", sizes)
        else:
            generate(TASKS.get(task), root / "data", sizes)
        make_tiny_model(root / "base", TinyModelConfig(), seed=seed)
        sources = [f"sft.train=[{root}/data/sft.parquet]", f"model.path={root}/base", "run.name=sft"]
        train_supervised("sft", load_config(CONFIGS / f"{task}-sft.yaml", [*common, *sources]), overwrite=True)
    if (root / algo).is_dir():
        print(f"replacing the run in {root / algo}")
    recorder = train(rl, overwrite=True)
    print(f"report: {recorder.paths.report_html}\nmodel:  {recorder.paths.export}")
