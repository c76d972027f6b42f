"""Adapters by command: trained on demonstrations, pairs and rewards, continued, exported, merged, evaluated."""

import math
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from megarl.convert.models import open_model
from megarl.errors import ConfigError
from megarl.record.metrics import RunPaths, read_metrics
from megarl.rewards import score
from megarl.weights.dist_index import read_index
from megarl_lab.recipes.tasks import TASKS
from megarl_lab.recipes.tasks.generate import PreferenceConfig, TaskFiles, generate_preferences
from tests.e2e.cli_run import run_to_end
from tests.e2e.support import REPOSITORY, SMALL
from tests.helpers.checkpoints import load_hf, make_checkpoint
from tests.helpers.hf_models import read_tensors

LORA = ("actor.lora={rank: 4, alpha: 8}", "actor.optimizer.schedule=constant", "actor.optimizer.lr=1e-2")


def metrics_of(run: RunPaths, name: str) -> dict[int, float]:
    return {record.step: record.metrics[name] for record in read_metrics(run.metrics) if name in record.metrics}


def command(tmp_path: Path, name: str, file: str, base: Path, *settings: str) -> RunPaths:
    where = [f"run.dir={tmp_path}", f"run.name={file}-run", f"model.path={base}"]
    run_to_end(tmp_path / "cwd", name, str(REPOSITORY / f"configs/run/{file}.yaml"), *SMALL, *where, *LORA, *settings)
    return RunPaths(tmp_path / f"{file}-run")


def preference_settings(tmp_path: Path, section: str, *, steps: int) -> list[str]:
    pairs = generate_preferences(TASKS.get("sums"), tmp_path, PreferenceConfig(num_train=16, num_val=8), score)
    settings = {"train": f"[{pairs.train}]", "val": f"[{pairs.val}]", "batch_size": 8, "val_every_steps": 2}
    return [f"{section}.{key}={value}" for key, value in {**settings, "total_steps": steps}.items()]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_preferences(tmp_path: Path) -> None:
    """The reference is the policy without adapters. Its checkpoint has nothing of the base."""
    base = make_checkpoint(tmp_path / "base", tied=True)
    settings = preference_settings(tmp_path, "train_preference", steps=2)
    run = command(
        tmp_path, "train-preference", "sums-dpo", base, *settings, "checkpoint.every_steps=2", "actor.layout={dp: 1}"
    )
    held_out = metrics_of(run, "val/preference/loss")
    assert sorted(held_out) == [0, 2]
    # log 2: no reward differs.
    assert held_out[0] == pytest.approx(0.6931, abs=1e-4)
    assert metrics_of(run, "val/preference/margin")[2] != pytest.approx(0, abs=1e-3)
    assert (run.export_adapter.is_dir(), run.export.exists()) == (True, False)
    tensors, _ = read_index(run.checkpoints / "step_000002" / "actor")
    weights = [key for key in tensors if not key.startswith(("optimizer", "chained"))]
    assert weights
    assert all(".lora." in key for key in weights)
    with pytest.raises(ConfigError, match=r"holds adapters without their base; `--resume` the run"):
        open_model(run.checkpoints / "step_000002" / "actor")
    num_adapters, num_base = (
        sum(t.numel() for t in read_tensors(path).values()) for path in (run.export_adapter, base)
    )
    # Adapters, and their moments and main parameters, all of four bytes.
    num_elements = sum(math.prod(tensor.spec.shape) for tensor in tensors.values())
    assert 3 * num_adapters <= num_elements <= 5 * num_adapters < num_base
    peft = pytest.importorskip("peft", reason="peft, which reads the export, is not installed")
    peft.PeftModel.from_pretrained(load_hf(base), run.export_adapter)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_from_demonstrations_to_a_policy(tmp_path: Path, sums: TaskFiles) -> None:
    """Adapters of supervised training go on in reinforcement learning, and are evaluated and merged."""
    base = make_checkpoint(tmp_path / "base", tied=True)
    settings = [f"sft.train=[{sums.sft}]", "sft.batch_size=8", "sft.val_every_steps=2"]
    sft = command(tmp_path, "sft", "sums-sft", base, *settings, "sft.total_steps=2", "checkpoint.every_steps=2")
    two_steps = read_tensors(sft.export_adapter)
    # In another layout.
    more = ["sft.total_steps=3", "actor.layout={dp: 1}", "--resume", "actor.lora.export=both"]
    command(tmp_path, "sft", "sums-sft", base, *settings, "checkpoint.every_steps=2", *more)
    assert any(not torch.equal(tensor, two_steps[name]) for name, tensor in read_tensors(sft.export_adapter).items())
    check_export(base, sft)

    begun = [f"actor.lora.path={sft.export_adapter}", "actor.lora.export=both", "algo.kl.where=loss"]
    data = [f"data.train=[{sums.train}]", "data.val=[]", "trainer.total_steps=1", "trainer.prompts_per_step=4"]
    few = ["rollout.num_samples=4", "trainer.mini_batch_prompts=4"]
    rl = command(tmp_path, "train", "sums-rl", base, *begun, *data, *few)
    check_export(base, rl)
    assert metrics_of(rl, "actor/grad_norm")[1] > 0

    merged = greedy_answers(tmp_path / "merged", sums, str(rl.export))
    assert greedy_answers(tmp_path / "apart", sums, str(base), "--adapter", str(rl.export_adapter)) == merged


def greedy_answers(out: Path, sums: TaskFiles, *model: str) -> list[str]:
    options = ["--data", str(sums.val), "--num-samples", "1", "--max-response-tokens", "24"]
    settings = ["data.max_prompt_tokens=128", "rollout.engine.max_num_seqs=16"]
    run_to_end(out, "eval", *model, *settings, *options, "--out", str(out))
    assert not (out / "merged").exists()
    return [row["response"] for row in pq.read_table(out / "samples.parquet").to_pylist() if row["greedy"]]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_run_and_its_checkpoint_are_evaluated_alike(tmp_path: Path, sums: TaskFiles) -> None:
    """The run has only adapters, which are merged into files; those of the checkpoint go to the engines from ranks."""
    base = make_checkpoint(tmp_path / "base", tied=True)
    settings = [f"sft.train=[{sums.sft}]", "sft.batch_size=8", "sft.total_steps=2", "checkpoint.every_steps=2"]
    run = command(tmp_path, "sft", "sums-sft", base, *settings, "actor.layout={dp: 1}")
    of_run = greedy_answers(tmp_path / "run", sums, str(run.root))
    assert greedy_answers(tmp_path / "checkpoint", sums, str(run.checkpoints / "step_000002")) == of_run
    assert greedy_answers(tmp_path / "untrained", sums, str(base)) != of_run


def check_export(base: Path, run: RunPaths) -> None:
    """PEFT computes with the adapters as transformers does with the merged model."""
    peft = pytest.importorskip("peft", reason="peft, which reads the export, is not installed")
    tokens = torch.randint(3, 200, (4, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = [
            model(tokens).logits.log_softmax(-1)
            for model in (peft.PeftModel.from_pretrained(load_hf(base), run.export_adapter), load_hf(run.export))
        ]
        assert float((found[0] - found[1]).abs().max()) <= 1e-5
        assert float((load_hf(base)(tokens).logits.log_softmax(-1) - found[0]).abs().max()) > 1e-3


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_reward_model(tmp_path: Path) -> None:
    """Its head is trained and exported with its adapters; training goes on from there."""
    base = make_checkpoint(tmp_path / "base", tied=True)
    settings = preference_settings(tmp_path, "train_reward", steps=2)
    run = command(tmp_path, "train-reward", "sums-reward", base, *settings, "actor.lora.export=both")
    head = "base_model.model.score.weight"
    tensors = read_tensors(run.export_adapter)
    assert float(tensors[head].abs().max()) > 0
    peft = pytest.importorskip("peft", reason="peft, which reads the export, is not installed")
    tokens = torch.randint(3, 200, (4, 40), generator=torch.Generator().manual_seed(0))
    judges = [AutoModelForSequenceClassification.from_pretrained(path, num_labels=1) for path in (base, run.export)]
    judges[0] = peft.PeftModel.from_pretrained(judges[0], run.export_adapter).eval()
    scores = []
    for judge in judges:
        judge.config.pad_token_id = None
        with torch.no_grad():
            scores += [judge(row[None]).logits[0, 0] for row in tokens]
    torch.testing.assert_close(torch.stack(scores[:4]), torch.stack(scores[4:]), atol=1e-5, rtol=0)

    begun = [f"actor.lora.path={run.export_adapter}", "train_reward.total_steps=1", "run.name=again"]
    command(tmp_path, "train-reward", "sums-reward", base, *settings, *begun)
    again = RunPaths(tmp_path / "again")
    ended, started = (metrics_of(each, "val/reward_model/loss") for each in (run, again))
    assert started[0] == pytest.approx(ended[2], abs=1e-5)
    assert read_tensors(again.export_adapter).keys() == tensors.keys()
