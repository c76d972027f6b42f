"""Files of the built-in tasks, and the command that writes them."""

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from megarl.config.schema import DataConfig, SftConfig
from megarl.data.demonstrations import SftDataset
from megarl.data.files import RowFiles
from megarl.data.prompts import PromptDataset
from megarl.data.records import demonstration_columns, parse_demonstration
from megarl.errors import ConfigError
from megarl.rewards import score
from megarl_lab.recipes.tasks import TASKS
from megarl_lab.recipes.tasks.generate import GenerateConfig, TaskFiles, generate, held_out_problems

TOOL = Path(__file__).parents[3] / "tools" / "prepare_data.py"
SMALL = GenerateConfig(num_sft=2000, num_train=300, num_val=200)


@pytest.fixture(scope="module", params=tuple(TASKS))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, TaskFiles]:
    return request.param, generate(TASKS.get(request.param), tmp_path_factory.mktemp(request.param), SMALL)


def test_prompts_carry_what_training_needs(made: tuple[str, TaskFiles], tokenizer: PreTrainedTokenizerBase) -> None:
    name, files = made
    train, val = (
        PromptDataset([path], tokenizer, DataConfig(max_prompt_tokens=64)) for path in (files.train, files.val)
    )
    assert (len(train), len(val)) == (300, 200)
    for data, split in ((train, "train"), (val, "val")):
        assert data.data_sources == {f"megarl/{name}"}
        for i in range(len(data)):
            info = data[i].extra_info
            assert (info["index"], info["split"]) == (i, split)
            assert info["difficulty_score"] in TASKS.get(name).rl_mix
            assert score(data[i].data_source, info["gold_solution"], data[i].ground_truth, info).correct
    val_prompts = {val[i].token_ids for i in range(200)}
    assert len(val_prompts) == 200
    assert val_prompts.isdisjoint(train[i].token_ids for i in range(300))


def test_demonstrations_mix_styles(made: tuple[str, TaskFiles], tokenizer: PreTrainedTokenizerBase) -> None:
    name, files = made
    rows = RowFiles([files.sft], columns=demonstration_columns(DataConfig(), SftConfig()))
    records = [parse_demonstration(row, "here") for row in rows]
    hinted = [r for r in records if r.messages[0].content.startswith("Hint: ")]
    plain = [r for r in records if not r.messages[0].content.startswith("Hint: ")]
    # Binomial(2000, 1/4): mean 500, standard deviation 19; five of them.
    assert 403 < len(hinted) < 597
    # Short answers have one line: 30 % of the hinted (σ of the share 0.021), 60 % of the others (0.013).
    assert 0.2 < sum("\n" not in r.messages[-1].content for r in hinted) / len(hinted) < 0.4
    assert 0.53 < sum("\n" not in r.messages[-1].content for r in plain) / len(plain) < 0.67
    if name == "sums":
        hint, _, question = hinted[0].messages[0].content.removeprefix("Hint: ").rpartition("\n")
        assert hint.endswith(f"#### {sum(map(int, question.removesuffix('=?').split('+')))}")
    assert len(SftDataset([files.sft], tokenizer, max_prompt_tokens=128, max_response_tokens=64)) == 2000


def test_same_seed_same_files(tmp_path: Path) -> None:
    task = TASKS.get("sums")
    config = GenerateConfig(num_sft=50, num_train=50, num_val=50)
    first, again = (generate(task, tmp_path / name, config) for name in ("a", "b"))
    other = generate(task, tmp_path / "c", GenerateConfig(num_sft=50, num_train=50, num_val=50, seed=1))
    for name in ("sft", "train", "val"):
        a, b, c = (list(RowFiles([getattr(f, name)], columns=("prompt", "target"))) for f in (first, again, other))
        assert a == b
        assert a != c


def test_levels_can_be_chosen(tmp_path: Path) -> None:
    config = GenerateConfig(num_sft=20, num_train=20, num_val=20, sft_mix={1: 1.0}, rl_mix={5: 1.0})
    files = generate(TASKS.get("sums"), tmp_path, config)
    assert {row["extra_info"]["difficulty_score"] for row in RowFiles([files.sft], columns=("extra_info",))} == {1}
    assert {row["extra_info"]["difficulty_score"] for row in RowFiles([files.val], columns=("extra_info",))} == {5}


def test_too_few_held_out_problems() -> None:
    # Sums of two numbers have 81 questions in all.
    with pytest.raises(ConfigError, match=r"megarl/sums: got 82 held-out prompts to make, found \d\d distinct"):
        held_out_problems(TASKS.get("sums"), random.Random(0), {1: 1.0}, 82)


def test_bad_config() -> None:
    with pytest.raises(ConfigError, match="num_val: got 0, expected >= 1"):
        GenerateConfig(num_val=0)
    with pytest.raises(ConfigError, match=r"hint_frac: got 1\.5, expected 0 to 1"):
        GenerateConfig(hint_frac=1.5)


def run_tool(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(TOOL), *args], capture_output=True, text=True, check=False)


def test_command(tmp_path: Path) -> None:
    sizes = ("--num-sft", "8", "--num-train", "6", "--num-val", "4")
    done = run_tool("--task", "countdown", "--out", str(tmp_path), *sizes, "--levels", "1:0.5,2:0.5")
    assert done.returncode == 0, done.stderr
    assert re.findall(r"(\w+)\.parquet: (\d+) rows", done.stdout) == [("sft", "8"), ("train", "6"), ("val", "4")]
    assert len(RowFiles([tmp_path / "val.parquet"], columns=("prompt",))) == 4
    failed = run_tool("--task", "countdown", "--out", str(tmp_path), "--levels", "9")
    assert failed.returncode == 2
    assert "of levels 1 to 4" in failed.stderr
