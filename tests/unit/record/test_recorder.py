"""The run directory: what is refused, what is kept."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from megarl.config import load_config
from megarl.config.algo import AlgoConfig, DistillConfig
from megarl.config.schema import Config, CriticConfig, DataConfig, ModelConfig, RunConfig, WeightedFile
from megarl.errors import ConfigError
from megarl.record.metrics import MARKER
from megarl.record.recorder import RunRecorder, batch_metrics
from megarl.record.rollouts import read_rollouts
from megarl.types import FinishReason, Prompt, Reward, RolloutBatch, Sample, prompt_segment, row_from_sample
from megarl_lab.recipes.tiny_model import make_byte_tokenizer
from tests.helpers.rollouts import random_rollout
from tests.helpers.segments import demonstration_segment, policy_segment

STOP = FinishReason.STOP


def config(
    tmp_path: Path, *, name: str = "a", model: str = "elsewhere", train: tuple[str | WeightedFile, ...] = ()
) -> Config:
    return Config(
        run=RunConfig(name=name, dir=str(tmp_path)), model=ModelConfig(path=model), data=DataConfig(train=train)
    )


def finished_run(tmp_path: Path) -> Path:
    root = RunRecorder(config(tmp_path)).paths.root
    (root / "metrics.jsonl").write_text("")
    return root


def test_the_resolved_configuration_and_versions_are_kept(tmp_path: Path) -> None:
    paths = RunRecorder(config(tmp_path)).paths
    assert load_config(paths.config) == config(tmp_path)
    assert json.loads(paths.versions.read_text())["ray"].startswith("2.")


def test_what_is_known_of_each_token_is_kept_with_the_text(tmp_path: Path) -> None:
    """Scores only of rows that were trained on. The gain is against another prompt's hint where there is one."""
    tokenizer = make_byte_tokenizer()
    ids = tokenizer("ab", add_special_tokens=False)["input_ids"]
    written = (prompt_segment((65,)), demonstration_segment(ids[:1]), policy_segment(ids[1:], logprob=-1.5))
    samples = [Sample(uid="q", sample_index=i, seed=0, segments=written, finish_reason=STOP) for i in range(3)]
    quantities = {"old_logprobs": [-3.0, -2.0], "hint_logprobs": [-1.0, -2.5], "advantages": [1.25, 0.75]}
    rows = [
        row_from_sample(s).with_quantities(**{n: np.array(v, np.float32) for n, v in quantities.items()})
        for s in samples
    ]
    # A correction may replace `old_logprobs`; what the trainer computed is of the second row only.
    rows[1] = rows[1].with_quantities(trainer_logprobs=np.array([-3.0, -1.0], np.float32))
    other = np.array([-2.0, -2.0], np.float32)
    rows[1] = rows[1].with_quantities(shuffled_hint_logprobs=other, cpo_base_advantages=np.ones(2, np.float32))
    prompts = {"q": Prompt(uid="q", token_ids=(65,), data_source="s", ground_truth="b")}
    recorder = RunRecorder(config(tmp_path))
    rewards = [Reward(score=1.0, correct=True)] * 3
    rollout = RolloutBatch(prompts=prompts, samples=tuple(samples))
    recorder.sample_rollouts(1, rollout, rewards, rows[:2], tokenizer)
    plain, shuffled, dropped = read_rollouts(recorder.paths.rollouts(1))
    assert plain.tokens == shuffled.tokens == dropped.tokens == ("a", "b")
    assert plain.rollout_logprobs == dropped.rollout_logprobs == (None, -1.5)
    assert (plain.old_logprobs, shuffled.old_logprobs) == ((), (-3.0, -1.0))
    assert (plain.hint_gain, shuffled.hint_gain) == ((2.0, -0.5), (1.0, -0.5))
    assert (plain.base_advantage, shuffled.base_advantage) == ((1.25, 0.75), (1.0, 1.0))
    assert plain.advantage == shuffled.advantage == (1.25, 0.75)
    assert (dropped.advantage, dropped.hint_gain) == ((), ())


@pytest.mark.parametrize(("mode", "divergence"), [("sampled", (-1.0, 0.5)), ("exact", (0.25, 0.125))])
def test_how_far_each_token_is_from_the_teacher_is_kept(
    tmp_path: Path, mode: Literal["sampled", "exact"], divergence: tuple[float, ...]
) -> None:
    """The log-ratio where samples estimate it, and otherwise what the loss had."""
    sample = Sample(
        uid="q", sample_index=0, seed=0, segments=(prompt_segment((65,)), policy_segment([66, 67])), finish_reason=STOP
    )
    found = {"teacher_logprobs": [-2.0, -1.5], "trainer_logprobs": [-3.0, -1.0], "advantages": [0.0, 0.0]}
    found |= {"divergence": [0.25, 0.125]} if mode == "exact" else {}
    row = row_from_sample(sample).with_quantities(**{n: np.array(v, np.float32) for n, v in found.items()})
    prompts = {"q": Prompt(uid="q", token_ids=(65,), data_source="s", ground_truth="b")}
    distills = replace(config(tmp_path), algo=AlgoConfig(distill=DistillConfig(teacher="model", mode=mode)))
    recorder = RunRecorder(distills)
    rollout, rewards = RolloutBatch(prompts=prompts, samples=(sample,)), [Reward(score=1.0, correct=True)]
    recorder.sample_rollouts(1, rollout, rewards, [row], make_byte_tokenizer())
    (record,) = read_rollouts(recorder.paths.rollouts(1))
    assert record.divergence == divergence


def test_a_run_is_not_overwritten_by_accident(tmp_path: Path) -> None:
    root = finished_run(tmp_path)
    with pytest.raises(
        ConfigError, match=r"already holds a run; choose another run\.name, or pass --resume or --overwrite"
    ):
        RunRecorder(config(tmp_path))
    (root / "old").write_text("x")
    RunRecorder(config(tmp_path), overwrite=True)
    assert not (root / "old").exists()


def test_what_ended_before_its_first_checkpoint_is_kept_when_the_run_begins_anew(tmp_path: Path) -> None:
    """An attempt without steps takes nothing away of the one before; one with steps takes its place."""
    root = finished_run(tmp_path)
    for step, note in ((1, "first"), (2, "second")):
        (root / "metrics.jsonl").write_text(f'{{"step": {step}}}\n')
        (root / "checkpoints" / "step_000001").mkdir(parents=True)
        (root / "note").write_text(note)
        for _ in range(2):
            RunRecorder(config(tmp_path), resumes=True)
            assert (root / "earlier" / "metrics.jsonl").read_text() == f'{{"step": {step}}}\n'
            assert (root / "earlier" / "note").read_text() == note
            assert not (root / "metrics.jsonl").exists()
            assert not any((root / "checkpoints").glob("*"))
            (root / "checkpoints" / "step_000001").mkdir(parents=True)
        (root / "checkpoints" / "step_000001").rmdir()
    (root / "metrics.jsonl").touch()
    RunRecorder(config(tmp_path), overwrite=True)
    assert not (root / "earlier").exists()


@pytest.mark.parametrize("name", ["", "..", "a/b", "a/../.."])
def test_a_run_name_is_one_directory(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.name: got .* expected a single directory name"):
        RunRecorder(config(tmp_path, name=name))


def test_overwriting_never_removes_the_inputs(tmp_path: Path) -> None:
    root = finished_run(tmp_path)
    (root / "export").mkdir()
    data = str(root / "data.parquet")
    for changed in ({"model": str(root / "export")}, {"train": (data,)}, {"train": (WeightedFile(path=data),)}):
        with pytest.raises(ConfigError, match="which --overwrite removes"):
            RunRecorder(config(tmp_path, **changed), overwrite=True)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^critic\.model_path: .*/export lies in "):
        RunRecorder(replace(config(tmp_path), critic=CriticConfig(model_path=str(root / "export"))), overwrite=True)
    assert (root / "export").is_dir()


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run\.dir: cannot make .*file/a"):
        RunRecorder(Config(run=RunConfig(name="a", dir=str(tmp_path / "file")), model=ModelConfig(path="m")))


def test_responses_that_ended_at_the_limit_or_repeated_themselves_are_counted() -> None:
    """Half of twelve are cut; three of the others repeat themselves."""
    rollout = random_rollout()
    repeated = [
        replace(s, finish_reason=FinishReason.REPETITION) if s.sample_index == 0 else s for s in rollout.samples
    ]
    metrics = batch_metrics(replace(rollout, samples=tuple(repeated)))
    assert (metrics["response_length/clip_ratio"], metrics["response_length/repetition_ratio"]) == (0.5, 0.25)


def test_overwriting_removes_nothing_that_lies_elsewhere_and_looks_before_it_removes(tmp_path: Path) -> None:
    root, scratch = finished_run(tmp_path), tmp_path / "scratch"
    (scratch / "step_000001").mkdir(parents=True)
    (scratch / "step_000001" / MARKER).touch()
    (root / "checkpoints").symlink_to(scratch)
    (root / "export").mkdir()
    before = sorted(root.iterdir())
    with pytest.raises(ConfigError, match=r"checkpoints is a link to .*scratch, and --overwrite removes nothing else"):
        RunRecorder(config(tmp_path), overwrite=True)
    assert sorted(root.iterdir()) == before
    (root / "checkpoints").unlink()
    (root / "notes").symlink_to(tmp_path / "scratch" / "nowhere")
    RunRecorder(config(tmp_path), overwrite=True)
    assert not (root / "export").exists()
    assert (scratch / "step_000001").is_dir()


@pytest.mark.parametrize("left", ["", "step_000001/state.json"], ids=["empty", "a checkpoint that a kill left begun"])
@pytest.mark.parametrize("has_metrics", [False, True])
def test_a_linked_directory_with_nothing_to_lose_is_no_hindrance(tmp_path: Path, left: str, has_metrics: bool) -> None:
    """A user links RUN/checkpoints to a larger disk before the run starts, or a kill ends it before its first one."""
    root, scratch = tmp_path / "a", tmp_path / "scratch"
    scratch.mkdir()
    if left:
        (scratch / left).parent.mkdir()
        (scratch / left).touch()
    root.mkdir()
    (root / "checkpoints").symlink_to(scratch)
    if has_metrics:
        (root / "metrics.jsonl").touch()
    RunRecorder(config(tmp_path, name="a"), overwrite=bool(left) or has_metrics)
    assert (root / "checkpoints").resolve() == scratch
    assert not (root / "metrics.jsonl").exists()
