"""Runs from a directory whose files have the names of modules that megarl and its libraries import."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.cli_run import MEGARL
from tests.helpers.kill_resume import MEGARL as MODULE
from tests.helpers.kill_resume import SmallRun, make_inputs

LIBRARIES = {
    "datasets",
    "httpx",
    "numpy",
    "openai",
    "psutil",
    "pydantic",
    "ray",
    "torch",
    "transformers",
    "vllm",
    "yaml",
}
SHADOW = "raise ImportError('this file is the user\\'s own')\n"
ENVIRONMENT = """
from megarl.environments import Environment, Reply

class Mine(Environment):
    async def start(self, prompt):
        return ()

    async def reply(self, action):
        return Reply(done=True, reward=0.25)
"""
REWARD = """
import os, subprocess, sys

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tool", "program.py")
    ran = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True)
    return float(ran.stdout)
"""


@pytest.mark.timeout(600)
def test_files_in_the_current_directory_take_no_modules_place_but_users_modules_are_found(tmp_path: Path) -> None:
    """Ranks, an engine of two workers, verifier workers and an environment worker; a user's program finds its own."""
    inputs, here = make_inputs(tmp_path), tmp_path / "project"
    (here / "tool").mkdir(parents=True)
    for name in (*sys.stdlib_module_names, *LIBRARIES):
        if not name.startswith("_") and importlib.util.find_spec(name) is not None:
            (here / f"{name}.py").write_text(SHADOW)
    (here / "my_environment.py").write_text(ENVIRONMENT)
    (here / "my_reward.py").write_text(REWARD)
    (here / "tool" / "program.py").write_text("import helper\nprint(helper.REWARD)\n")
    (here / "tool" / "helper.py").write_text("REWARD = 0.5\n")
    run = SmallRun(
        inputs=inputs,
        name="shadowed",
        settings=(
            "trainer.total_steps=1",
            "actor.optimizer.warmup_steps=0",
            "data.val=[]",
            "actor.layout={tp: 1, dp: 2, sequence_parallel: false}",
            "rollout.engine={tp: 2, num_engines: 1}",
            "environment.default=my_environment:Mine",
            "rewards={manager: hybrid, custom: {path: my_reward.py, name: compute_score}}",
            "rewards.hybrid.parts={rule: {manager: rule}, environment: {manager: environment}}",
        ),
    )
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    command = [str(MEGARL), *run.arguments[len(MODULE) :]]
    ended = subprocess.run(command, cwd=here, env=clean, capture_output=True, encoding="utf-8")
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    (metrics,) = [record.metrics for record in run.records() if "actor/lr" in record.metrics]
    assert metrics["reward/rule/score"] == 0.5
    # Of those whose turn was not cut.
    assert metrics["reward/environment/score"] > 0.0
