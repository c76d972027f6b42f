"""A real pretrained model, SmolLM2-135M: log-probs of transformers in every layout, and all commands that train it."""

import json
import math
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from megarl.config.schema import ActorConfig, LayoutConfig, ModelConfig
from megarl.record.metrics import MetricsRecord, RunPaths, read_metrics
from megarl.types import FloatArray, Row
from megarl_lab.recipes.gguf_model import SMOLLM2, make_gguf_model
from megarl_lab.recipes.tasks.arithmetic import generate_arithmetic
from megarl_lab.recipes.tasks.generate import GenerateConfig, SplitFiles
from tests.e2e.cli_run import MEGARL, run_to_end
from tests.e2e.support import REPOSITORY
from tests.helpers import ranks
from tests.helpers.checkpoints import load_hf
from tests.helpers.rank_pool import RankPool

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

RUN_FILE = REPOSITORY / "configs" / "run" / "arithmetic-rl.yaml"
# Nine query heads share three heads of keys and values, so tensor parallelism is 3 and not 2.
LAYOUTS = {"tp1": LayoutConfig(), "tp3": LayoutConfig(tp=3), "pp2": LayoutConfig(pp=2), "cp2": LayoutConfig(cp=2)}
# Roundings of two implementations in one precision are of one size; a wrong formula is off by far more.
TIMES_TRANSFORMERS = 2.0
# Mean |Δ log-prob| of engine and trainer, in nats; float32 rounding of two implementations.
MISMATCH = 3e-5
FEW = (
    "trainer.prompts_per_step=2",
    "rollout.num_samples=4",
    "validation.max_prompts=4",
    "logging.tensorboard=false",
    "actor.optimizer.schedule=constant",
    "actor.optimizer.warmup_steps=0",
)


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("smollm2") / "model"
    make_gguf_model(SMOLLM2, path)
    return path


@pytest.fixture(scope="session")
def arithmetic(tmp_path_factory: pytest.TempPathFactory) -> SplitFiles:
    return generate_arithmetic(tmp_path_factory.mktemp("arithmetic"), GenerateConfig(num_train=64, num_val=16))


@pytest.fixture(scope="session")
def rows(smollm2: Path, arithmetic: SplitFiles) -> list[Row]:
    """Questions and their solutions as this model reads chats."""
    tokenizer, made = AutoTokenizer.from_pretrained(smollm2), []
    for i, row in enumerate(pq.read_table(arithmetic.val).to_pylist()[:8]):
        prompt = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
        prompt_ids, response_ids = (tokenizer(text)["input_ids"] for text in (prompt, row["target"][0]["content"]))
        made.append(
            Row(
                uid=f"q{i}",
                sample_index=0,
                token_ids=np.asarray(prompt_ids + response_ids, dtype=np.int64),
                num_prompt_tokens=len(prompt_ids),
                loss_mask=np.ones(len(response_ids), dtype=np.bool_),
            )
        )
    return made


def transformers_logprobs(path: Path, rows: Sequence[Row], dtype: torch.dtype) -> list[FloatArray]:
    """Log-probs of responses, row by row, without packing or padding."""
    hf, found = load_hf(path, dtype), []
    for row in rows:
        tokens = torch.from_numpy(row.token_ids)
        with torch.no_grad():
            log_p = hf(tokens[None]).logits[0].double().log_softmax(-1)[row.num_prompt_tokens - 1 : -1]
        found.append(log_p.gather(1, tokens[row.num_prompt_tokens :, None])[:, 0].numpy())
    return found


@pytest.fixture(scope="session")
def exact(smollm2: Path, rows: list[Row]) -> list[FloatArray]:
    return transformers_logprobs(smollm2, rows, torch.float64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_logprobs_are_as_exact_as_those_of_transformers(
    rank_pool: Callable[[int], RankPool],
    smollm2: Path,
    rows: list[Row],
    exact: list[FloatArray],
    layout: LayoutConfig,
    dtype: str,
) -> None:
    def error(logprobs: Sequence[FloatArray]) -> float:
        return float(np.abs(np.concatenate(logprobs) - np.concatenate(exact)).mean())

    theirs = error(transformers_logprobs(smollm2, rows, getattr(torch, dtype)))
    actor, model = ActorConfig(layout=layout), ModelConfig(path=str(smollm2), dtype=dtype)
    micro_batches = [[0, 3, 1], [6, 7], [5, 2, 4]]
    results = rank_pool(layout.world_size).run(ranks.forward_actor, actor, model, rows, micro_batches, temperature=1.0)
    (got,) = [result for result in results if result is not None]
    ours = error([got.quantities["logprobs"][i] for i in range(len(rows))])
    assert 0 < ours <= TIMES_TRANSFORMERS * theirs, (ours, theirs)


def command(directory: Path, name: str, model: Path, *settings: str) -> list[MetricsRecord]:
    """A run of a few steps, in `directory`/NAME; its metrics."""
    where = [f"run.dir={directory}", f"run.name={name}", f"model.path={model}"]
    run_to_end(directory / "cwd", name, str(RUN_FILE), *FEW, *where, *settings)
    return read_metrics(RunPaths(directory / name).metrics)


def test_rl_is_resumed_exported_evaluated_and_converted(smollm2: Path, arithmetic: SplitFiles, tmp_path: Path) -> None:
    data = [f"data.train=[{arithmetic.train}]", f"data.val=[{arithmetic.val}]", "sync.verify=true"]
    command(tmp_path, "train", smollm2, *data, "trainer.total_steps=1")
    tensor_parallel = ["actor.layout={tp: 3, dp: 1}", "trainer.total_steps=2", "--resume"]
    records = command(tmp_path, "train", smollm2, *data, *tensor_parallel)
    steps = {record.step: record.metrics for record in records if "mismatch/abs_mean" in record.metrics}
    assert sorted(steps) == [1, 2]
    # Of the second step too, which sampled with weights that were updated and sent.
    assert max(metrics["mismatch/abs_mean"] for metrics in steps.values()) <= MISMATCH

    export = RunPaths(tmp_path / "train").export
    before, after = (load_file(path / "model.safetensors") for path in (smollm2, export))
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    load_hf(export)
    mcore, back = tmp_path / "mcore", tmp_path / "back"
    for direction, source, target in (("hf-to-mcore", export, mcore), ("mcore-to-hf", mcore, back)):
        subprocess.run([MEGARL, "convert", direction, source, "--out", target], check=True, capture_output=True)
    again = load_file(back / "model.safetensors")
    assert again.keys() == after.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in after.items())

    options = ["--data", str(arithmetic.val), "--num-samples", "2", "--max-response-tokens", "16"]
    out = tmp_path / "evaluation"
    printed = run_to_end(out, "eval", str(export), "data.max_prompt_tokens=96", *options, "--out", str(out))
    assert "megarl/arithmetic" in printed
    # A greedy answer and two sampled ones of each question.
    assert pq.read_metadata(out / "samples.parquet").num_rows == 16 * 3


def test_cpo_reads_rows_with_their_hints(smollm2: Path, arithmetic: SplitFiles, tmp_path: Path) -> None:
    settings = ["use.algo=cpo", f"data.train=[{arithmetic.train}]", "data.val=[]", "trainer.total_steps=2"]
    records = command(tmp_path, "train", smollm2, *settings)
    metrics = next(record.metrics for record in records if record.step == 2)
    # A solution in the prompt changes what the model expects to be written.
    assert metrics["cpo/delta_std"] > 0.01
    assert np.isfinite(metrics["actor/loss"])


def test_supervised_training_lowers_the_loss(smollm2: Path, arithmetic: SplitFiles, tmp_path: Path) -> None:
    settings = [f"sft.train=[{arithmetic.train}]", "sft.batch_size=8", "sft.total_steps=4"]
    losses = [r.metrics["sft/nll"] for r in command(tmp_path, "sft", smollm2, *settings)]
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.2


def test_a_reward_model_learns_what_is_right(smollm2: Path, arithmetic: SplitFiles, tmp_path: Path) -> None:
    pairs = [
        {
            "prompt": row["prompt"],
            "chosen": row["target"][0]["content"],
            "rejected": "I do not know.",
            "data_source": row["data_source"],
        }
        for row in pq.read_table(arithmetic.train).to_pylist()
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    section = {"train": f"[{tmp_path}/pairs.jsonl]", "batch_size": 8, "total_steps": 6}
    # The head starts at zero, and Adam moves each of its weights by about `lr` a step.
    settings = ["actor.optimizer.lr=2.0e-4", *(f"train_reward.{k}={v}" for k, v in section.items())]
    records = command(tmp_path, "train-reward", smollm2, *settings)
    losses = [r.metrics["reward_model/loss"] for r in records if "reward_model/loss" in r.metrics]
    assert len(losses) == 6
    # At first no answer is preferred.
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert losses[-1] < 0.5
