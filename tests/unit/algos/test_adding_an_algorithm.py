"""What docs/algorithms.md says of adding an algorithm, done word for word in a copy of the package."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "algorithms.md"
MAX_LINES = 30

# Two prompts: rewards 1 and 0 after one and three tokens, and twice 1 after two tokens.
CHECK = """
import json
import sys
from pathlib import Path

import torch

import megarl
from megarl.algos import build_algorithm
from megarl.cli import main
from megarl.config import load_config
from megarl.types import PolicyOutputs, RowBatch, ScoredBatch

cfg = load_config(Path("configs/run/gsm8k-qwen3-8b.yaml"), ["use.algo=opo"]).algo
algorithm = build_algorithm(cfg, max_response_tokens=3)
lengths = torch.tensor([1, 2, 3, 2])
mask = torch.arange(3) < lengths[:, None]
batch = ScoredBatch(
    uids=("a", "b", "a", "b"),
    rewards=torch.tensor([1.0, 1.0, 0.0, 1.0]),
    correct=torch.tensor([True, True, False, True]),
    loss_mask=mask,
    scores={},
)
state = algorithm.initial_state()
advantages = algorithm.advantages(batch, state).values
rows = RowBatch(labels=("a/0", "b/0", "a/1", "b/1"), loss_mask=mask, scores={"advantages": advantages})
logprobs = torch.tensor([-1.0, -5.0, -2.0, -5.0])[:, None].expand(4, 3)
sums = algorithm.loss(rows, PolicyOutputs(logprobs=logprobs, entropy=None), state)
loss_sum = sums.objective["loss"].item()
found = {"package": megarl.__file__, "name": cfg.name, "advantages": advantages.tolist(), "loss_sum": loss_sum}
print(json.dumps(found))
main(sys.argv[1:])
"""


def blocks() -> list[tuple[str, str]]:
    """The code blocks of the section: the path in their first line, and what follows it."""
    section = PAGE.read_text(encoding="utf-8").split("## Adding an algorithm\n")[1].split("\n## ")[0]
    found = re.findall(r"^```(?:python|yaml)\n# (\S+)\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL)
    assert len(found) == section.count("```") // 2
    return found


def test_it_takes_few_lines() -> None:
    assert sum(1 + text.count("\n") for _, text in blocks()) < MAX_LINES


def test_the_blocks_of_the_page_add_an_algorithm(tmp_path: Path) -> None:
    for name in ("megarl", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in blocks():
        with (tmp_path / name).open("a", encoding="utf-8") as file:
            file.write(text)
    command = re.search(r"^`megarl (train [^`]*--dry-run)`", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert command
    printed = run(tmp_path, "-c", CHECK, *command[1].split())
    first, _, plan = printed.partition("\n")
    found = json.loads(first)
    assert Path(found["package"]).is_relative_to(tmp_path)
    assert found["name"] == "opo"
    # Baselines (1·1 + 3·0) / 4 and (2·1 + 2·1) / 4.
    assert found["advantages"] == [[0.75, 0, 0], [0, 0, 0], [-0.25, -0.25, -0.25], [0, 0, 0]]
    # −Σ A·lp = 0.75·1 − 3·0.25·2.
    assert found["loss_sum"] == -0.75
    assert plan.startswith("plan of runs/gsm8k-qwen3-8b; nothing was started\n")


def run(directory: Path, *arguments: str) -> str:
    """What a Python that finds the package in `directory` prints."""
    environment = {**os.environ, "PYTHONPATH": str(directory), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=directory, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
