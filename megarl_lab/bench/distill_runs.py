"""Whole runs of distillation on the built-in sums: megarl against TRL's GKDTrainer, from the same student and teacher.

    megarl quickstart --algo opd --seed 0
    python -m megarl_lab.bench.distill_runs --out DIR --peers .venv-conformance/bin/python --runs runs --seeds 0

`--peers` is an interpreter with trl 1.16 and datasets (`tools/install.py --kind peers`). `--runs` has the quick start's
directories `sums-seedN`: the model of its run `grpo` is the teacher, its supervised model the start of all. TRL trains
with the quick start's steps, prompts, samples of each, learning rate and warm-up, on its own samples alone (λ = 1) with
the reverse KL (β = 1), and, with `--defaults`, also as its defaults are: λ = 0.5, where half of the passes read the
data's targets, and β = 0.5. Transformers then measures every model alike: it answers the held-out prompts at
temperature 1, and the divergences are those of the whole vocabulary, on its own tokens. Prints a table and writes
DIR/distill_runs.json.
"""

import argparse
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from megarl.config import load_config
from megarl.config.load import PACKAGED
from megarl.host.streams import print_lines
from megarl.record.text_table import align
from megarl.rewards.scorers import SCORERS

PEER = Path(__file__).with_name("distill_runs_trl.py")
TEACHER, STUDENT = "teacher", "student"
# Answers to each held-out prompt, so that a share of 256 prompts is known to about 0.015.
NUM_ANSWERS = 4
# TRL's runs by name: the share of its own samples, and which divergence, from forward (0) to reverse (1).
RECIPES = {"TRL GKD, λ 1, β 1": (1.0, 1.0), "TRL GKD, λ 0.5, β 0.5": (0.5, 0.5)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """A model's share of right answers to held-out prompts, and its mean divergences from the teacher, in nats."""

    accuracy: float
    reverse_kl: float
    forward_kl: float


def ask_peer(interpreter: str, job: Mapping[str, Any], log: Path) -> None:
    """Run the peer's half with a job; SystemExit if it fails."""
    hidden = ("OMP_NUM_THREADS", "PYTHONPATH")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    with log.open("w", encoding="utf-8") as output:
        command = [interpreter, str(PEER), json.dumps(job)]
        code = subprocess.run(command, stdout=output, stderr=output, env=environment, check=False).returncode
    if code:
        raise SystemExit(f"{PEER.name} ended with {code}; see {log}")


def train_peer(interpreter: str, root: Path, out: Path, name: str, *, seed: int) -> Path:
    """Distil with TRL as the quick start's settings say, unless that is done, and return the model's directory."""
    model = out / f"seed{seed}-{'-'.join(map(str, RECIPES[name]))}"
    if (model / "config.json").is_file():
        return model
    config = load_config(PACKAGED / "run" / "sums-rl.yaml")
    optimizer, limit = config.actor.optimizer, config.rollout.max_response_tokens
    lmbda, beta = RECIPES[name]
    job = {
        "do": "train",
        "student": str(root / "sft" / "export"),
        "teacher": str(root / "grpo" / "export"),
        "data": str(root / "data" / "train.parquet"),
        "out": str(model),
        "num_steps": config.trainer.total_steps,
        "prompts_per_step": config.trainer.prompts_per_step,
        "num_samples": config.rollout.num_samples,
        "rows_per_pass": 64,
        "max_response_tokens": limit,
        "max_tokens": config.data.max_prompt_tokens + limit,
        "lr": optimizer.lr,
        "betas": list(optimizer.betas),
        "warmup_steps": optimizer.warmup_steps,
        "lmbda": lmbda,
        "beta": beta,
        "seed": seed,
    }
    ask_peer(interpreter, job, model.with_suffix(".log"))
    return model


def measured(interpreter: str, root: Path, models: Mapping[str, Path], out: Path, *, seed: int) -> dict[str, Learned]:
    """Measure models on the held-out prompts of a quick start, by name."""
    data, log = root / "data" / "val.parquet", out / f"seed{seed}-measured.json"
    job = {
        "do": "measure",
        "teacher": str(root / "grpo" / "export"),
        "models": {name: str(path) for name, path in models.items()},
        "data": str(data),
        "log": str(log),
        "rows_per_pass": 64,
        "num_answers": NUM_ANSWERS,
        "max_response_tokens": load_config(PACKAGED / "run" / "sums-rl.yaml").rollout.max_response_tokens,
        "seed": seed,
    }
    ask_peer(interpreter, job, log.with_suffix(".log"))
    rows = pq.read_table(data).to_pylist()
    truths = [row["reward_model"]["ground_truth"] for row in rows for _ in range(NUM_ANSWERS)]
    scorer, found = SCORERS.get("megarl/sums"), {}
    for name, values in json.loads(log.read_text(encoding="utf-8")).items():
        right = [scorer(answer, truth, {}).correct for answer, truth in zip(values.pop("answers"), truths, strict=True)]
        found[name] = Learned(accuracy=sum(right) / len(right), **values)
    return found


def table(found: Mapping[int, Mapping[str, Learned]]) -> list[str]:
    """Lay out a line per seed and model; the falls compare with the student at the start."""
    lines = [["model", "seed", "accuracy", "to teacher", "KL(p‖q)", "fall", "KL(q‖p)", "fall"]]
    for seed, models in found.items():
        start, teacher = models[STUDENT], models[TEACHER]
        for name, each in models.items():
            cells = [f"{each.accuracy:.3f}", f"{each.accuracy - teacher.accuracy:+.3f}"]
            for now, before in ((each.reverse_kl, start.reverse_kl), (each.forward_kl, start.forward_kl)):
                cells += [f"{now:.4f}", f"{1 - now / before:.1%}"]
            lines.append([name, str(seed), *cells])
    return align(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--peers", required=True, help="interpreter with trl and datasets")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="the quick start's directory")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--algos", nargs="+", default=["opd"], help="runs of megarl, by the quick start's --algo")
    parser.add_argument("--defaults", action="store_true", help="also train as TRL's defaults are")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    found = dict[int, dict[str, Learned]]()
    recipes: Sequence[str] = list(RECIPES) if options.defaults else list(RECIPES)[:1]
    for seed in options.seeds:
        root = options.runs / f"sums-seed{seed}"
        models = {TEACHER: root / "grpo" / "export", STUDENT: root / "sft" / "export"}
        models |= {f"megarl {algo}": root / algo / "export" for algo in options.algos}
        for name, path in models.items():
            if not path.is_dir():
                raise SystemExit(f"{path}: no model of {name}; run megarl quickstart --algo ALGO --seed {seed} first")
        models |= {name: train_peer(options.peers, root, options.out, name, seed=seed) for name in recipes}
        found[seed] = measured(options.peers, root, models, options.out, seed=seed)
        print_lines(*table({seed: found[seed]}))
    written = {seed: {name: asdict(each) for name, each in models.items()} for seed, models in found.items()}
    (options.out / "distill_runs.json").write_text(json.dumps(written, indent=1, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    main()
