"""`--dry-run` of supervised commands: the numbers of a small data set by hand, and that nothing starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.cli import main
from tests.helpers.checkpoints import make_checkpoint

ROOT = Path(__file__).parents[3]


def chat(*texts: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), tied=False)


def plan(command: str, *settings: str, capsys: pytest.CaptureFixture[str]) -> str:
    file = {"sft": "sums-sft", "train-reward": "sums-reward", "train-preference": "sums-dpo"}[command]
    main([command, str(ROOT / f"configs/run/{file}.yaml"), *settings, "--dry-run"])
    return capsys.readouterr().out


def test_numbers_of_chats(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # With 8 tokens of the template per pair of turns but for the last end token, which is one of the answer's, and one
    # more between pairs.
    rows = [chat("a", "bb"), chat("aaa", "b", "a", "bb"), chat("a", "b" * 40), chat("a" * 60, "b")]
    path, val = tmp_path / "a.jsonl", tmp_path / "val.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    val.write_text(json.dumps(rows[0]) + "\n")
    settings = (
        f"model.path={model}",
        f"run.dir={tmp_path}",
        f"sft.train=[{path}]",
        f"sft.val=[{val}]",
        "sft.max_tokens=30",
        "sft.on_long=cut",
        "sft.total_epochs=5",
        "sft.batch_size=2",
        "actor.optimizer.warmup_steps=0",
        "actor.micro_batch_tokens=32",
        "actor.layout={dp: 1}",
    )
    found = json.loads(plan("sft", *settings, "--json", capsys=capsys))
    # 8 + 1 + 2 + 1 tokens; 8 + 3 + 1 + 1 + (1 + 8) + 1 + 2 + 1; cut to 30, of which 30 − 9 are trained; dropped.
    assert found["data"]["train"] == {
        "examples": 3,
        "tokens": 12 + 26 + 30,
        "trained_tokens": 3 + (2 + 3) + 21,
        "longest": 30,
        "dropped": 1,
        "cut": 1,
    }
    assert found["data"]["val"]["examples"] == 1
    # 15 rows are 7 batches of two. The longest two rows have 56 tokens.
    assert (found["total_steps"], found["epochs"], found["micro_batches"]) == (7, pytest.approx(14 / 3), 2)
    text = plan("sft", *settings, capsys=capsys)
    for line in (
        "train      3 examples, 68 tokens, 29 of them trained; the longest row has 30; dropped 1, cut 1",
        "steps      7 of 2 examples, which are 4.67 epochs",
        "5 epochs of 3 examples are 7 steps of 2; the last 1 of the last epoch are left out",
        "warning    sft.train: dropped 1 and cut 1 of 4 rows over sft.max_tokens=30",
    ):
        assert line in text
    assert not (tmp_path / "sft").exists()


def test_numbers_of_pairs(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.jsonl"
    pairs = [{"prompt": "a", "chosen": "bb", "rejected": rejected} for rejected in ("c", "c" * 300)]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    for command, section in (("train-reward", "train_reward"), ("train-preference", "train_preference")):
        settings = [
            f"{section}.{key}" for key in (f"train=[{path}]", "val=[]", "batch_size=1", "total_steps=2", "on_long=drop")
        ]
        where = (f"model.path={model}", "actor.layout={}", "actor.optimizer.warmup_steps=0")
        text = plan(command, *where, *settings, capsys=capsys)
        assert "train      1 examples" in text
        assert "dropped 1, cut 0" in text
        assert "steps      2 of 1 examples, which are 2.00 epochs" in text


def test_json_needs_the_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["sft", str(ROOT / "configs/run/sums-sft.yaml"), "--json"])
    assert "--json: goes with --dry-run" in capsys.readouterr().err
