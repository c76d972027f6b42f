"""Stale tokens are compared with the weights that sampled them: in float64 from the weights of each version."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megarl.algos.build import build_algorithm
from megarl.config.algo import AlgoConfig, PolicyLossConfig
from megarl.config.lora import LoraConfig
from megarl.convert.models import open_model
from megarl.train.served_teacher import comparison_of
from megarl.types import Row
from megarl.types.messages import RoleSpec, UpdateRequest
from megarl.weights.families import read_model_spec
from megarl.weights.safetensors_map import create_model_files, weight_specs
from tests.distributed.test_adapters import LORA, write_adapters
from tests.helpers.checkpoints import load_hf
from tests.helpers.family_parity import split_rows
from tests.helpers.layout_training import LAYOUTS, Pools, trained_role
from tests.helpers.rows import random_rows
from tests.helpers.version_ranks import Seen, VersionCase, VersionStep, compare_versions

TEMPERATURE, KEPT = 0.8, 2
LOSS = PolicyLossConfig(name="dppo_top_tv", clip_low=0.5, clip_high=0.5, compared_with="trainer", kept_versions=KEPT)
# By step, counted from 1: the lags that its tokens have. The third updates nothing, so that versions 2 and 3 are equal.
LAGS = ((0,), (0, 1), None, (0, 1, 2), (0, 1, 2))
LAYOUTS_TESTED = [
    "tp2-sp",
    pytest.param("tp1", marks=pytest.mark.long),
    pytest.param("pp2", marks=pytest.mark.long),
    pytest.param("cp2", marks=pytest.mark.long),
    pytest.param("dp2", marks=pytest.mark.long),
]


def steps_of(model: Path, directory: Path | None) -> list[VersionStep]:
    cfg, rng, steps = AlgoConfig(policy_loss=LOSS), np.random.default_rng(3), []
    algorithm, specs = build_algorithm(cfg, max_response_tokens=64), weight_specs(read_model_spec(model), "float32")
    for step, lags in enumerate(LAGS, start=1):
        rows, request = random_rows([(3, 9), (5, 14), (2, 6), (8, 20)], seed=4), None
        if lags is not None:
            rows = [with_lags(row, lags, rng) for row in rows]
            request = UpdateRequest(
                step=step,
                objective=algorithm,
                state=algorithm.initial_state(),
                denominators=algorithm.denominators(rows),
                temperature=TEMPERATURE,
                lr=3e-3,
                teaching=replace(comparison_of(cfg, (), None), kept=0),  # type: ignore[type-var]
            )
        files = () if directory is None else [str(f) for f in create_model_files(directory / str(step), specs)]
        steps.append(VersionStep(rows=rows, request=request, files=files))
    return steps


def with_lags(row: Row, lags: Sequence[int], rng: np.random.Generator) -> Row:
    """Within a row, versions grow; outside the loss mask, tokens have no version."""
    n = row.num_response_tokens
    drawn = np.sort(rng.choice(lags, n))[::-1].astype(np.float32)
    signs = rng.choice([-1.0, 1.0], n).astype(np.float32)
    return row.with_quantities(lag=np.where(row.loss_mask, drawn, np.float32(0)), advantages=signs * row.loss_mask)


def log_p(model: Path, weights: Sequence[dict[str, torch.Tensor]], rows: Sequence[Row]) -> list[list[torch.Tensor]]:
    """[R, V] by version, that of the model itself and then those of weights, and by row, in float64."""
    policy, found = load_hf(model, torch.float64), []
    for each in ({}, *weights):
        missing, unknown = policy.load_state_dict(each, strict=False)
        assert not each or set(missing) <= {"lm_head.weight"}
        assert not unknown
        policy.tie_weights()
        with torch.no_grad():
            logits = [policy(torch.from_numpy(row.token_ids)[None]).logits[0] for row in rows]
        pairs = zip(logits, rows, strict=True)
        found.append([(z[row.num_prompt_tokens - 1 : -1] / TEMPERATURE).log_softmax(-1) for z, row in pairs])
    return found


def merged(by_rank: Sequence[Sequence[Seen]]) -> list[Seen]:
    """By step, what all ranks saw; those that have the same rows saw the same."""
    return [{label: pair for seen in ranks for label, pair in seen.items()} for ranks in zip(*by_rank, strict=True)]


def case_of(role: RoleSpec, steps: Sequence[VersionStep]) -> VersionCase:
    role = replace(role, kept_versions=KEPT)
    return VersionCase(role=role, micro_batches=split_rows(4, role.layout.dp), steps=steps)


def assert_same(got: Seen, expected: Seen) -> None:
    assert got.keys() == expected.keys()
    assert all(np.array_equal(a, b) for label in got for a, b in zip(got[label], expected[label], strict=True))


@pytest.mark.parametrize("name", LAYOUTS_TESTED)
def test_stale_tokens_have_the_distribution_of_their_version(
    rank_pool: Pools, checkpoint: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    """Also after a resume, in the same layout to the bit; a step without an update makes no version."""
    layout = LAYOUTS[name]
    model = checkpoint(tied=layout.pp == 1)
    steps, pool = steps_of(model, tmp_path / "weights"), rank_pool(layout.world_size)
    case = case_of(trained_role(model, layout, 60), steps)
    # The copies of versions 1 and 3 are those that the last step reads.
    seen = merged(pool.run(compare_versions, replace(case, saves=str(tmp_path / "saved"), save_at=3)))
    by_version = log_p(model, [load_file(step.files[0]) for step in steps], steps[0].rows)
    apart, updating = 0.0, [number for number, lags in enumerate(LAGS, start=1) if lags is not None]
    for number, found in zip(updating, seen, strict=True):
        for i, row in enumerate(steps[number - 1].rows):
            logprobs, divergence = found[row.label]
            now = by_version[number - 1][i].exp()
            for place in np.flatnonzero(row.loss_mask):
                then = by_version[number - 1 - int(row.quantities["lag"][place])][i][place]
                token = int(row.token_ids[row.num_prompt_tokens + place])
                assert logprobs[place] == pytest.approx(float(then[token]), abs=2e-5)
                assert divergence[place] == pytest.approx(float((now[place] - then.exp()).abs().sum() / 2), abs=1e-5)
                apart = max(apart, float(divergence[place]))
    assert apart > 0.01
    resumed = replace(case, steps=steps[4:], loads=str(tmp_path / "saved"))
    assert_same(merged(pool.run(compare_versions, resumed))[0], seen[-1])


@pytest.mark.long
def test_copies_of_another_layout_and_fewer_of_them(
    rank_pool: Pools, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model = checkpoint(tied=True)
    steps, pool, saved = steps_of(model, None), rank_pool(2), str(tmp_path / "saved")
    case = case_of(trained_role(model, LAYOUTS["tp2-sp"], 60), steps)
    expected = merged(pool.run(compare_versions, replace(case, saves=saved, save_at=3)))[-1]
    elsewhere = replace(case_of(trained_role(model, LAYOUTS["pp2"], 60), steps[4:]), loads=saved)
    (got,) = merged(pool.run(compare_versions, elsewhere))
    for label, pair in got.items():
        for a, b in zip(pair, expected[label], strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5)
    # Of the versions 1 and 3 that were kept, it forgets the first, whose token is in the fourth step.
    fewer = replace(elsewhere, role=replace(elsewhere.role, kept_versions=1), steps=steps[3:4])
    with pytest.raises(Exception, match=r"sampled by version 1 .* keep versions from 2 on"):
        pool.run(compare_versions, fewer)
    # Converters see the weights alone.
    assert (
        open_model(Path(saved) / "actor", model).reader.specs.keys() == read_model_spec(model).expected_tensors().keys()
    )
    without = replace(elsewhere, role=replace(elsewhere.role, kept_versions=0), steps=())
    assert merged(pool.run(compare_versions, without)) == []


@pytest.mark.long
def test_with_adapters_these_alone_are_copied(
    rank_pool: Pools, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """What a step sees after a resume is what it saw before."""
    model, saved = checkpoint(tied=False), str(tmp_path / "saved")
    write_adapters(tmp_path / "adapters", model)
    lora = LoraConfig(**LORA, path=str(tmp_path / "adapters"))  # type: ignore[arg-type]
    role = trained_role(model, LAYOUTS["tp2-sp"], 60)
    case = case_of(replace(role, settings=replace(role.settings, lora=lora)), steps_of(model, None))
    seen = merged(rank_pool(2).run(compare_versions, replace(case, saves=saved, save_at=3)))
    resumed = replace(case, steps=case.steps[4:], loads=saved)
    assert_same(merged(rank_pool(2).run(compare_versions, resumed))[0], seen[-1])
    assert max(float(divergence.max()) for _, divergence in seen[-1].values()) > 1e-4
