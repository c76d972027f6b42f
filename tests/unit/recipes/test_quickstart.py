"""The quickstart refuses what it cannot start, before it makes anything."""

from pathlib import Path

import pytest

from megarl.errors import ConfigError
from megarl.recipes.quickstart import quickstart


@pytest.mark.parametrize(
    ("model", "task", "expected"),
    [("smollm2", "sums", "with --model smollm2 one of arithmetic"), ("tiny", "arithmetic", "one of sums, calculator")],
)
def test_each_model_has_tasks_of_its_own(
    model: str, task: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"--task: got '{task}', expected .*{expected}"):
        quickstart(algo="grpo", task=task, seed=0, model=model)
    assert not list(tmp_path.iterdir())
