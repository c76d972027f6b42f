"""Parts that the pages add, word for word: an estimator of a plugin, and a method of CPO in a copy of the package."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
SEAMS_PAGE = ROOT / "docs" / "seams.md"

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


def test_the_estimator_of_the_page(tmp_path: Path) -> None:
    page = SEAMS_PAGE.read_text(encoding="utf-8")
    code = page.split('```python title="my_parts.py"\n')[1].split("```")[0]
    (tmp_path / "my_parts.py").write_text(code, encoding="utf-8")
    found = json.loads(run(tmp_path, "-c", CHECK, str(ROOT / "configs/run/gsm8k-qwen3-8b.yaml")))
    # The mean of 1, 1, 0, 1 is 0.75.
    assert found["advantages"] == [[0.25, 0, 0], [0.25, 0.25, 0], [-0.75, -0.75, -0.75], [0.25, 0.25, 0]]
    # −Σ A·lp = 0.25·1 + 2·0.25·5 − 3·0.75·2 + 2·0.25·5.
    assert found["loss_sum"] == 0.75


def run(directory: Path, *arguments: str) -> str:
    """What a Python that finds the package in `directory` prints."""
    environment = {**os.environ, "PYTHONPATH": str(directory), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=directory, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
