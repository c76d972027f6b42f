"""Parts that the pages add, word for word: an estimator of a plugin, and a method of CPO in a copy of the package."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
SEAMS_PAGE = ROOT / "docs" / "seams.md"
CPO_PAGE = ROOT / "docs" / "algorithms" / "cpo.md"
MAX_LINES = 30

# Two prompts: rewards 1 and 0 after one and three tokens, and twice 1 after two tokens.
CHECK = """
import json
import sys
from pathlib import Path

import torch

from megarl.algos import build_algorithm
from megarl.config import load_config
from megarl.config.part_settings import use_plugins_of
from megarl.types import PolicyOutputs, RowBatch, ScoredBatch

settings = ["algo.plugins=[my_parts.py]", "algo.advantage.estimator=step_mean", "algo.policy_loss.name=reinforce"]
config = load_config(Path(sys.argv[1]), ["use.algo=grpo", *settings])
use_plugins_of(config)
cfg = config.algo
algorithm = build_algorithm(cfg, max_response_tokens=3)
lengths = torch.tensor([1, 2, 3, 2])
mask = torch.arange(3) < lengths[:, None]
batch = ScoredBatch(
    uids=("a", "b", "a", "b"),
    rewards=torch.tensor([1.0, 1.0, 0.0, 1.0]),
    correct=torch.tensor([True, True, False, True]),
    loss_mask=mask,
    quantities={},
)
state = algorithm.initial_state()
advantages = algorithm.advantages(batch, state).values
rows = RowBatch(labels=("a/0", "b/0", "a/1", "b/1"), loss_mask=mask, quantities={"advantages": advantages})
logprobs = torch.tensor([-1.0, -5.0, -2.0, -5.0])[:, None].expand(4, 3)
sums = algorithm.loss(rows, PolicyOutputs(logprobs=logprobs, entropy=None), state)
loss_sum = sums.objective["loss"].item()
print(json.dumps({"advantages": advantages.tolist(), "loss_sum": loss_sum}))
"""

# A correct row and a wrong one, of the same signals.
CHECK_METHOD = """
import json
import sys

import torch

from megarl.algos.cpo import CpoInputs, required_quantities, shape_advantages
from megarl.cli import main
from megarl.config.algo import CpoConfig

cfg = CpoConfig(method="surprise", coefficients={"beta": 0.2})
rows = torch.ones(2, 3, dtype=torch.float64)
x = CpoInputs(
    advantages=rows * torch.tensor([[1.0], [-1.0]]),
    loss_mask=rows.bool(),
    correct=torch.tensor([True, False]),
    difficulty=torch.tensor([0, 0]),
    vocab_size=10,
    old_logprobs=-4 * rows,
    hint_logprobs=-4 * rows + torch.tensor([2.0, -1.0, 3.0]),
    entropy=rows * torch.tensor([0.5, 0.5, 1.0]),
)
print(json.dumps({"quantities": sorted(required_quantities(cfg)), "shaped": shape_advantages(x, cfg).tolist()}))
main(sys.argv[1:])
"""


def blocks(page: Path, title: str) -> list[tuple[str, str]]:
    """The code blocks of a section: the path in their first line, and what follows it."""
    section = page.read_text(encoding="utf-8").split(f"## {title}\n")[1].split("\n## ")[0]
    found = re.findall(r"^```(?:python|yaml)\n# (\S+)\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL)
    assert len(found) == section.count("```") // 2
    return found


def test_it_takes_few_lines() -> None:
    assert sum(1 + text.count("\n") for _, text in blocks(CPO_PAGE, "Adding a method")) < MAX_LINES


def add_and_run(directory: Path, page: Path, title: str, check: str) -> tuple[dict[str, Any], str]:
    """Add a section's blocks to a copy of the package, and run a check and the section's command there.

    Returns what the check and the command printed.
    """
    for name in ("megarl", "configs"):
        shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in blocks(page, title):
        with (directory / name).open("a", encoding="utf-8") as file:
            file.write(text)
    section = page.read_text(encoding="utf-8").split(f"## {title}\n")[1]
    command = re.search(r"^`megarl (train [^`]*--dry-run)`", section, flags=re.MULTILINE)
    assert command
    first, _, plan = run(directory, "-c", check, *command[1].split()).partition("\n")
    return json.loads(first), plan


def test_the_estimator_of_the_page(tmp_path: Path) -> None:
    page = SEAMS_PAGE.read_text(encoding="utf-8")
    code = page.split('```python title="my_parts.py"\n')[1].split("```")[0]
    (tmp_path / "my_parts.py").write_text(code, encoding="utf-8")
    found = json.loads(run(tmp_path, "-c", CHECK, str(ROOT / "configs/run/gsm8k-qwen3-8b.yaml")))
    # The mean of 1, 1, 0, 1 is 0.75.
    assert found["advantages"] == [[0.25, 0, 0], [0.25, 0.25, 0], [-0.75, -0.75, -0.75], [0.25, 0.25, 0]]
    # −Σ A·lp = 0.25·1 + 2·0.25·5 − 3·0.75·2 + 2·0.25·5.
    assert found["loss_sum"] == 0.75


@pytest.mark.long
def test_the_block_of_the_page_adds_a_method_of_cpo(tmp_path: Path) -> None:
    """Correct row: 1 + 0.2·2·0.5, then 1 as d < 0, then 1 + 0.5 as 0.2·3·1 is above half of the advantage."""
    found, plan = add_and_run(tmp_path, CPO_PAGE, "Adding a method", CHECK_METHOD)
    assert found["quantities"] == ["hint_logprobs", "old_entropy", "old_logprobs"]
    assert [[round(value, 12) for value in row] for row in found["shaped"]] == [[1.2, 1.0, 1.5], [-1.0, -1.0, -1.0]]
    assert plan.startswith("plan of runs/gsm8k-qwen3-8b; nothing was started\n")


def run(directory: Path, *arguments: str) -> str:
    """What a Python that finds the package in `directory` prints."""
    environment = {**os.environ, "PYTHONPATH": str(directory), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=directory, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
