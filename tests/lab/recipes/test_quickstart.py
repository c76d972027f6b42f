"""The quickstart refuses what it cannot start, before it makes anything."""

from pathlib import Path

import pytest

from megarl.config.lora import LoraConfig
from megarl.config.schema import Config
from megarl.errors import ConfigError
from megarl_lab.recipes import quickstart as quickstarts
from megarl_lab.recipes.quickstart import quickstart


@pytest.mark.parametrize(
    ("model", "task", "expected"),
    [
        ("smollm2", "sums", "with --model smollm2 one of arithmetic"),
        ("tiny", "arithmetic", "one of sums, blind_squares, calculator"),
    ],
)
def test_each_model_has_tasks_of_its_own(
    model: str, task: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"--task: got '{task}', expected .*{expected}"):
        quickstart(algo="grpo", task=task, seed=0, model=model)
    assert not list(tmp_path.iterdir())


def test_adapters_are_trained_at_ten_times_the_rate_in_a_run_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = list[Config]()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(quickstarts, "train", lambda config, **_: started.append(config))
    Path("runs/sums-seed1/sft/export").mkdir(parents=True)
    for rank in (None, 8):
        quickstart(algo="grpo", task="sums", seed=1, lora=rank)
    weights, adapters = started
    assert (weights.run.name, weights.actor.lora) == ("grpo", None)
    assert (adapters.run.name, adapters.actor.lora) == ("grpo-lora8", LoraConfig(rank=8))
    assert adapters.actor.optimizer.lr == pytest.approx(10 * weights.actor.optimizer.lr)
