"""From demonstrations to the prefixes of samples, and back to the quantities of their rows."""

from typing import Any

import numpy as np
import pytest

from megarl.algos.prefixes import prefix_ratios
from megarl.config.algo import DemonstrationConfig
from megarl.config.generation import Sampling
from megarl.errors import ConfigError
from megarl.rollout.source import Prefix, SamplingPlan
from megarl.train.prefixes import demonstration_quantities, plan_prefixes
from megarl.types import FinishReason, Prompt, Sample, Segment, SegmentSource, prompt_segment, version_spans

EOS = 2
WHOLE = Prompt(
    uid="a",
    token_ids=(9,),
    data_source="d",
    ground_truth="1",
    demonstration_ids=(5, 6, 7, EOS),
    demonstration_probs=(0.5, 0.25, -1.0, -1.0),
)
CUT = Prompt(uid="b", token_ids=(9,), data_source="d", ground_truth="1", demonstration_ids=(5, 6, 7, 8))
WITHOUT = Prompt(uid="c", token_ids=(9,), data_source="d", ground_truth="1")


def plan(*prompts: Prompt, num_samples: int = 3, run_seed: int = 0, **cfg: Any) -> dict[tuple[str, int], Prefix]:
    return plan_prefixes(
        prompts,
        DemonstrationConfig(**cfg),
        step=1,
        num_samples=num_samples,
        run_seed=run_seed,
        end_token_ids=(EOS,),
    )


def test_the_first_samples_get_their_share() -> None:
    # Ratios 0.5 and 1, then none.
    got = plan(WHOLE, CUT, WITHOUT, strategy="fixed", num_prefixed=2, min_ratio=0.5, max_ratio=1.0)
    assert got == {
        ("a", 0): Prefix(token_ids=(5, 6)),
        ("a", 1): Prefix(token_ids=(5, 6, 7, EOS), is_complete=True),
        ("b", 0): Prefix(token_ids=(5, 6)),
        ("b", 1): Prefix(token_ids=(5, 6, 7, 8)),
    }


def test_drawn_ratios_are_those_of_the_sample() -> None:
    cfg = DemonstrationConfig(strategy="random", max_ratio=1.0)
    long = Prompt(uid="q", token_ids=(9,), data_source="d", ground_truth="1", demonstration_ids=tuple(range(100, 200)))
    got = plan_prefixes([long], cfg, step=7, num_samples=4, run_seed=3, end_token_ids=(EOS,))
    ratios = prefix_ratios(cfg, uid="q", step=7, num_samples=4, run_seed=3)
    assert [len(got["q", i].token_ids) for i in range(4)] == [int(100 * ratio) for ratio in ratios]
    other_order = plan_prefixes([WHOLE, long], cfg, step=7, num_samples=4, run_seed=3, end_token_ids=(EOS,))
    assert all(other_order["q", i] == got["q", i] for i in range(4))


def test_a_prefix_is_cut_to_the_response_limit() -> None:
    prefix = Prefix(token_ids=(1, 2, EOS), is_complete=True)
    whole, cut = (
        SamplingPlan(
            step=1,
            num_samples=1,
            sampling=Sampling(temperature=1.0),
            max_response_tokens=limit,
            run_seed=0,
            prefixes={("a", 0): prefix},
        )
        for limit in (3, 2)
    )
    assert whole.prefix("a", 0) == prefix
    assert cut.prefix("a", 0) == Prefix(token_ids=(1, 2))


def segment(source: SegmentSource, token_ids: list[int]) -> Segment:
    n = len(token_ids)
    return Segment(
        source=source,
        token_ids=np.asarray(token_ids, dtype=np.int32),
        loss_mask=np.ones(n, dtype=np.bool_),
        versions=version_spans(np.zeros(n, dtype=np.int64)),
    )


@pytest.mark.parametrize(
    ("segments", "marks", "probs"),
    [
        ([], [], []),
        ([(SegmentSource.POLICY, [4, 4])], [0, 0], [-1, -1]),
        ([(SegmentSource.DEMONSTRATION, [5]), (SegmentSource.POLICY, [4])], [1, 0], [0.5, -1]),
        ([(SegmentSource.DEMONSTRATION, [5, 6, 7, EOS])], [1] * 4, [0.5, 0.25, -1, -1]),
    ],
)
def test_quantities(segments: list[tuple[SegmentSource, list[int]]], marks: list[float], probs: list[float]) -> None:
    sample = Sample(
        uid="a",
        sample_index=0,
        seed=0,
        segments=(prompt_segment(WHOLE.token_ids), *(segment(*s) for s in segments)),
        finish_reason=FinishReason.STOP,
    )
    quantities = demonstration_quantities(sample, WHOLE)
    assert quantities["demonstration"].tolist() == marks
    assert quantities["target_probs"].tolist() == probs
    assert all(value.dtype == np.float32 for value in quantities.values())
    # A demonstrator that did not give probabilities.
    assert demonstration_quantities(sample, CUT)["target_probs"].tolist() == [-1] * len(marks)


def test_no_prefixes() -> None:
    assert plan(WHOLE, strategy="none") == {}
    assert plan(WHOLE, strategy="random", num_prefixed=0) == {}
    assert plan(WHOLE, strategy="random", min_ratio=0.8, keep_frac=0.0) == {}
    assert plan(strategy="random") == {}


def test_more_prefixes_than_samples_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"num_prefixed: got 4, expected <= rollout\.num_samples=3"):
        plan(WHOLE, strategy="random", num_prefixed=4)
