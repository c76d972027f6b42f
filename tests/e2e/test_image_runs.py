"""Runs whose prompts show images: killed and resumed, and sampled again, they are equal to the bit."""

import base64
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from megarl.record.metrics import RunPaths, read_metrics
from megarl.rollout.replay import read_record, record_path
from megarl.types import SegmentSource
from tests.e2e.cli_run import run_to_end
from tests.e2e.support import REPOSITORY, SMALL
from tests.helpers.kill_resume import SmallRun, assert_survives, differences
from tests.helpers.rank_pool import RankPool
from tests.helpers.vision import PICTURES, make_rows

REWARD = """
def score(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(set(solution_str)) % 5)
"""


# Shows two images of one size in turn, after prompts with images and without.
BOARD = """
from pathlib import Path
from megarl.environments import Environment, Reply
from megarl.types import Message

class Board(Environment):
    async def start(self, prompt):
        self.shown = [*("BA" if any(each.images for each in prompt.messages) else "AB")]
        return ()

    async def resume(self, prompt, actions):
        await self.start(prompt)
        del self.shown[: len(actions)]
        return True

    async def reply(self, action):
        if not self.shown:
            return Reply(done=True, reward=float(len(set(action.text)) % 3))
        image = (Path(__file__).parent / f"{self.shown.pop(0)}.png").read_bytes()
        return Reply(messages=(Message(role="user", content="now <image>.", images=(image,)),))
"""


def rows() -> list[dict[str, Any]]:
    """Images by path, by bytes and as a data URL, one or two in a prompt, and texts alone; half are conversations."""
    found = []
    for i in range(16):
        one, other = "ABC"[i % 3], "ABC"[(i + 1) % 3]
        coded = base64.b64encode(PICTURES[one]).decode()
        url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{coded}"}}
        prompt, images = (
            ("look <image> what?", [f"{one}.png"]),
            ("plain words", None),
            ([{"role": "user", "content": "<image> or <image>"}], [{"bytes": coded, "path": None}, f"{other}.png"]),
            ([{"role": "user", "content": [url, {"type": "text", "text": " and?"}]}], None),
        )[i % 4]
        row = {"prompt": prompt, "data_source": "megarl/sums", "target": f"it is {one}"}
        row |= {"environment": "board"} if i % 3 else {}
        found.append(row | {"reward_model": {"ground_truth": "0"}} | ({} if images is None else {"images": images}))
    return found


def write_inputs(directory: Path) -> str:
    """Write a model, images and rows; return the file of the rows."""
    with RankPool(1, timeout_s=280.0, preloaded=False) as pool:
        pool.run(make_rows, "qwen3_vl", directory)
    for name, content in PICTURES.items():
        (directory / f"{name}.png").write_bytes(content)
    file = directory / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    return str(file)


def settings_of(tmp_path: Path, part: str) -> tuple[str, ...]:
    file = write_inputs(tmp_path)
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "board.py").write_text(BOARD)
    return (
        f"data.train=[{file}]",
        "data.val=[]",
        "data.image_key=images",
        "data.max_prompt_tokens=256",
        f"actor.vision.train={part}",
        f"rewards.custom={{path: {tmp_path / 'reward.py'}, name: score}}",
        "rollout.max_response_tokens=96",
        f"environment.entries={{board: {{type: '{tmp_path}/board.py:Board'}}}}",
        "environment.max_turn_tokens=12",
        "trainer.total_steps=3",
        "algo.filter.names=[]",
        "rollout.record=true",
        "validation={every_steps: 1000, max_prompts: null}",
    )


@pytest.mark.timeout(1200)
def test_a_run_of_prompts_and_replies_with_images(tmp_path: Path) -> None:
    run = SmallRun(inputs=tmp_path, name="run", settings=settings_of(tmp_path, "none"))
    assert run.start().wait() == 0, run.paths.root.with_suffix(".log").read_text()
    steps = [record.metrics for record in run.records() if "mismatch/abs_max" in record.metrics]
    assert len(steps) == 3
    assert max(metrics["mismatch/abs_max"] for metrics in steps) <= 1e-4
    # Each image is kept once.
    assert len([*(run.paths.root / "images").iterdir()]) == 3
    samples = [sample for step in (1, 2, 3) for sample in read_record(record_path(run.paths.records, step)).samples]
    shown = [
        len(segment.images)
        for sample in samples
        for segment in sample.segments
        if segment.source is SegmentSource.ENVIRONMENT
    ]
    assert len(shown) >= 24
    assert set(shown) == {1}


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_killed_run_with_a_whole_tower_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = SmallRun(inputs=tmp_path, name="whole", settings=settings_of(tmp_path, "all"))
    assert whole.start().wait() == 0, whole.paths.root.with_suffix(".log").read_text()
    assert_survives(whole)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_supervised_training_with_images_goes_on_where_it_stopped(tmp_path: Path) -> None:
    file = write_inputs(tmp_path)
    settings = (
        f"sft.train=[{file}]",
        "sft.batch_size=4",
        "data.image_key=images",
        "data.max_prompt_tokens=256",
        "actor.optimizer={lr: 0.01, schedule: constant, warmup_steps: 0}",
    )
    whole, parts = (
        SmallRun(inputs=tmp_path, name=name, command="sft", settings=settings) for name in ("whole", "parts")
    )
    for run, num_steps in ((whole, 3), (parts, 2), (parts, 3)):
        process = SmallRun(
            inputs=tmp_path, name=run.name, command="sft", settings=(*settings, f"sft.total_steps={num_steps}")
        ).start()
        assert process.wait() == 0, run.paths.root.with_suffix(".log").read_text()
    losses = [record.metrics["sft/loss"] for record in whole.records() if "sft/loss" in record.metrics]
    assert losses == sorted(losses, reverse=True)
    assert differences(parts, whole) == []


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_preferences_may_depend_on_images_alone(tmp_path: Path) -> None:
    """Of two pairs with the same texts, each prefers the answer that the other rejects."""
    write_inputs(tmp_path)
    pairs = [
        {"prompt": "<image> what?", "images": [f"{name}.png"], "chosen": chosen, "rejected": rejected}
        for name, chosen, rejected in (("A", "yes", "no!"), ("B", "no!", "yes")) * 4
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    run_to_end(
        tmp_path / "cwd",
        "train-preference",
        str(REPOSITORY / "configs/run/sums-dpo.yaml"),
        *SMALL,
        f"run.dir={tmp_path}",
        f"model.path={tmp_path / 'model'}",
        "data.image_key=images",
        "actor.vision.train=all",
        "actor.optimizer={lr: 0.003, schedule: constant, warmup_steps: 0}",
        f"train_preference={{train: ['{tmp_path}/pairs.jsonl'], val: [], batch_size: 8, total_steps: 12}}",
    )
    found = [record.metrics for record in read_metrics(RunPaths(tmp_path / "dpo").metrics)]
    accuracy = [metrics["preference/accuracy"] for metrics in found if "preference/accuracy" in metrics]
    assert len(accuracy) == 12
    assert accuracy[-1] == 1.0
    assert len([*(tmp_path / "dpo/images").iterdir()]) == 2


@pytest.mark.timeout(1200)
def test_an_evaluation_shows_images_to_the_model(tmp_path: Path) -> None:
    """Prompts with equal tokens get other answers for other images, and the same ones for the same."""
    write_inputs(tmp_path)
    rows = [
        {"prompt": "<image> what?", "images": [f"{name}.png"], "data_source": "megarl/sums"}
        | {"reward_model": {"ground_truth": "0"}}
        for name in "ABA"
    ]
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out, settings = (
        tmp_path / "out",
        ("data.image_key=images", "data.max_prompt_tokens=256", "rollout.engine.max_num_seqs=16"),
    )
    options = ("--num-samples", "1", "--max-response-tokens", "16", "--out", str(out))
    run_to_end(out, "eval", str(tmp_path / "model"), *settings, "--data", str(tmp_path / "eval.jsonl"), *options)
    answers = [each for each in pq.read_table(out / "samples.parquet").to_pylist() if each["greedy"]]
    one, other, again = (each["response"] for each in sorted(answers, key=lambda each: each["uid"]))
    assert one == again != other
    # Each image is kept once.
    assert len([*(out / "run" / "images").iterdir()]) == 2
