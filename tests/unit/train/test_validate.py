"""What a validation reports: accuracy, whatever the rewards are, with numbers by hand."""

import asyncio
import signal
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from megarl.config.generation import RolloutConfig, Sampling, ValidationConfig
from megarl.config.schema import CheckpointConfig
from megarl.errors import RunError
from megarl.host import loop
from megarl.record.json_lines import append_lines, open_lines
from megarl.record.metrics import MetricsRecord
from megarl.record.rollouts import read_answers
from megarl.rewards.judge import Judged
from megarl.rollout.source import Doing, Group, RolloutSource, SamplingPlan, SamplingStopped, generating
from megarl.train.validate import Validator, has_collapsed
from megarl.types import DROPPED, FinishReason, Prompt, Reward, Sample, prompt_segment
from megarl_lab.recipes.tiny_model import make_byte_tokenizer
from tests.helpers.segments import policy_segment


class World(RolloutSource):
    """Prompts whose sampled answers are right as SAMPLED says, and whose greedy ones are all right."""

    def __init__(self) -> None:
        self.plans: list[SamplingPlan] = []
        self.prompts = [
            Prompt(uid=f"q:{i}", token_ids=(65,), data_source="dapo", ground_truth="7") for i in range(len(SAMPLED))
        ]

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self.prompts[index]

    async def sample(self, group: Group) -> None:
        if not self.plans or self.plans[-1] is not group.plan:
            self.plans.append(group.plan)
        for i in range(group.plan.num_samples):
            text = "#### 7" if self.is_right(group.prompt.uid, i, group.plan) else "#### 88"
            sample = Sample(
                uid=group.prompt.uid,
                sample_index=i,
                seed=0,
                segments=(prompt_segment([65]), policy_segment(TOKENIZER.encode(text))),
                finish_reason=FinishReason.STOP,
            )
            await group.finish(sample)

    def wait(self, work: "asyncio.Future[None]", *, timeout_s: float, doing: Doing = generating) -> None:
        loop.wait(work)

    def parts(self, groups: Iterable[Group]) -> list[Sample]:
        raise NotImplementedError

    def is_right(self, uid: str, sample_index: int, plan: SamplingPlan) -> bool | None:
        return True if plan.sampling.temperature == 0 else SAMPLED[int(uid[2:])][sample_index]

    def begin(self) -> "World":
        return self

    def add(self, prompt: Prompt, sample: Sample) -> None:
        """Nothing: `finish` judges."""

    def finish(self, judgings: Sequence["World"], samples: Sequence[Sample]) -> Judged:
        verdicts = [self.is_right(sample.uid, sample.sample_index, self.plans[-1]) for sample in samples]
        return Judged(
            rewards=[DROPPED if right is None else Reward(score=2.0 * right - 1, correct=right) for right in verdicts],
            tallies={},
        )


class Silent(World):
    """Nobody can judge any answer."""

    def is_right(self, uid: str, sample_index: int, plan: SamplingPlan) -> bool | None:
        return None


TOKENIZER = make_byte_tokenizer()
# Per prompt, whether its sampled answers are right. Rewards are 1 and −1; None: nobody could judge it.
SAMPLED: tuple[tuple[bool | None, ...], ...] = ((True, False, False, False), (True, True, True, None), (False,) * 4)


class World(RolloutSource):
    """Prompts whose sampled answers are right as SAMPLED says, and whose greedy ones are all right."""

    def __init__(self) -> None:
        self.plans: list[SamplingPlan] = []
        self.prompts = [
            Prompt(uid=f"q:{i}", token_ids=(65,), data_source="dapo", ground_truth="7") for i in range(len(SAMPLED))
        ]

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self.prompts[index]

    async def sample(self, group: Group) -> None:
        if not self.plans or self.plans[-1] is not group.plan:
            self.plans.append(group.plan)
        for i in range(group.plan.num_samples):
            text = "#### 7" if self.is_right(group.prompt.uid, i, group.plan) else "#### 88"
            sample = Sample(
                uid=group.prompt.uid,
                sample_index=i,
                seed=0,
                segments=(prompt_segment([65]), policy_segment(TOKENIZER.encode(text))),
                finish_reason=FinishReason.STOP,
            )
            await group.finish(sample)

    def wait(self, work: "asyncio.Future[None]", *, timeout_s: float, doing: Doing = generating) -> None:
        loop.wait(work)

    def parts(self, groups: Iterable[Group]) -> list[Sample]:
        raise NotImplementedError

    def is_right(self, uid: str, sample_index: int, plan: SamplingPlan) -> bool | None:
        return True if plan.sampling.temperature == 0 else SAMPLED[int(uid[2:])][sample_index]

    def begin(self) -> "World":
        return self

    def add(self, prompt: Prompt, sample: Sample) -> None:
        """Nothing: `finish` judges."""

    def finish(self, judgings: Sequence["World"], samples: Sequence[Sample]) -> Judged:
        verdicts = [self.is_right(sample.uid, sample.sample_index, self.plans[-1]) for sample in samples]
        return Judged(
            rewards=[DROPPED if right is None else Reward(score=2.0 * right - 1, correct=right) for right in verdicts],
            tallies={},
        )


def validator_of(world: World, tmp_path: Path) -> Validator:
    settings = ValidationConfig(
        num_samples=4, pass_at=(1, 2), temperature=0.6, top_p=0.95, top_k=20, max_response_tokens=99
    )
    return Validator(
        settings=settings,
        rollout=RolloutConfig(),
        best_metric=CheckpointConfig().best_metric,
        run_seed=0,
        total_steps=100,
        data=world,  # type: ignore[arg-type]
        tokenizer=TOKENIZER,
        stop_token_ids=(2, 0),
        source=world,
        wait=world.wait,
        rewards=world,  # type: ignore[arg-type]
        answers=lambda step: tmp_path / f"{step}.parquet",
        enter=lambda phase: None,
    )


def test_the_score_is_accuracy_and_not_the_mean_reward(tmp_path: Path) -> None:
    world = World()
    result = validator_of(world, tmp_path).validate(3)
    assert result.summary.endswith("(greedy 1.000), but 1 of 15 answers could not be judged")
    # Shares of 1/4, 3/3 and 0 are right. pass@2 of one right in four: 1 − C(3,2)/C(4,2) = 1/2.
    assert result.metrics == pytest.approx(
        {
            "val/test_score/dapo": 1.25 / 3,
            # Deviations −1/6, 7/12 and −5/12 of 5/12: variance (4 + 49 + 25)/144/2, over 3 prompts.
            "val/test_score_std_error/dapo": (78 / 144 / 2 / 3) ** 0.5,
            "val/test_score_greedy/dapo": 1.0,
            "val/pass@1/dapo": 1.25 / 3,
            "val/pass@2/dapo": 1.5 / 3,
            "val/maj@4/dapo": 1 / 3,
            # Four right and seven wrong ones.
            "val/reward/dapo": (4 - 7) / 11,
            "val/response_length/dapo": (4 * 6 + 7 * 7) / 11,
            "val/truncated_frac/dapo": 0.0,
            "val/num_prompts/dapo": 3.0,
        }
    )
    assert result.score == pytest.approx(1.25 / 3)
    sampled, greedy = world.plans
    sampling = Sampling(temperature=0.6, top_p=0.95, top_k=20, stop_token_ids=(2, 0))
    assert (sampled.sampling, sampled.max_response_tokens) == (sampling, 99)
    assert (greedy.sampling, greedy.num_samples) == (Sampling(temperature=0.0, stop_token_ids=(2, 0)), 1)
    written = read_answers(tmp_path / "3.parquet")
    assert len(written) == 11 + 3
    assert sum(answer.correct for answer in written if answer.greedy) == 3


def test_a_validation_of_which_nothing_is_heard(tmp_path: Path) -> None:
    validator = validator_of(Silent(), tmp_path)
    with pytest.raises(
        RunError, match=r"^validation at step 0: all 15 samples failed, the first of them: nobody judged"
    ):
        validator.validate(0)
    # Later, there is work to lose.
    result = validator.validate(3)
    assert (result.score, dict(result.metrics)) == (None, {})
    assert "15 of 15 answers could not be judged" in result.summary


class Slow(World):
    """A signal comes while the second prompt is answered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.monkeypatch, self.is_given_up = monkeypatch, False

    async def sample(self, group: Group) -> None:
        if group.prompt.uid == "q:1":
            self.monkeypatch.setattr("megarl.rollout.source.last_stop_signal", lambda: signal.SIGUSR1)
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                self.is_given_up = True
                raise
        await super().sample(group)


def test_a_signal_ends_a_validation_for_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may take longer than what is left before a time limit."""
    monkeypatch.setattr("megarl.rollout.source.LOOK_S", 0.01)
    world = Slow(monkeypatch)
    with pytest.raises(SamplingStopped):
        validator_of(world, tmp_path).validate(3)
    loop.wait(loop.spawn(asyncio.sleep(0)))
    assert world.is_given_up
    assert not (tmp_path / "3.parquet").exists()


@pytest.mark.parametrize(
    ("scores", "count", "expected"),
    [
        ([0.4, 0.0, 0.0], 2, True),
        ([0.4, 0.0, None, None, 0.0], 2, True),
        ([0.4, 0.0, 0.0], 3, False),
        ([0.4, 0.0, 0.1, 0.0], 2, False),
        ([0.0, 0.0, 0.0], 2, False),
        ([0.4, 0.0, 0.0], None, False),
        ([], 1, False),
    ],
)
def test_a_policy_has_collapsed_that_was_better(
    scores: Sequence[float | None], count: int | None, expected: bool, tmp_path: Path
) -> None:
    """The score of a validation is the mean over data sources; training steps have none."""
    records = [
        MetricsRecord(
            step=step,
            time_s=float(step),
            metrics={"actor/lr": 1.0} if score is None else {"val/test_score/a": 2 * score, "val/test_score/b": 0.0},
        )
        for step, score in enumerate(scores)
    ]
    with open_lines(tmp_path / "metrics.jsonl") as file:
        append_lines(file, map(asdict, records))
    assert has_collapsed(tmp_path / "metrics.jsonl", "val/test_score", count) is expected
