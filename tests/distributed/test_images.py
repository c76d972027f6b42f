"""Rows with images, through the vision tower, in every layout, against transformers, the tower's gradients too."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megarl.config.lora import LoraConfig
from megarl.config.schema import ActorConfig, LayoutConfig, ModelConfig, MoeConfig, OptimizerConfig
from megarl.config.vision import TowerPart, VisionConfig
from megarl.convert.commands import mcore_to_hf
from megarl.convert.engine import ConvertSettings
from megarl.convert.verify import verify
from megarl.types import Row
from megarl.types.messages import Vision
from megarl.weights.adapters import adapter_spec
from megarl.weights.families import read_model_spec
from megarl.weights.safetensors_map import create_model_files, weight_specs
from megarl.weights.shards import num_stage_parameters
from tests.distributed.test_adapters import assembled
from tests.helpers.adapter_ranks import AdapterCase, run_adapters
from tests.helpers.family_parity import assert_rows, run_ranks, split_rows
from tests.helpers.hf_models import assert_same_tensors, read_tensors
from tests.helpers.rank_pool import RankPool
from tests.helpers.requests import update_request, with_advantages
from tests.helpers.tower_training import TowerCase, train_or_read
from tests.helpers.vision import VISION, Answers, ask_transformers, ask_with_stray_placeholders

GetPool = Callable[[int], RankPool]
GetAnswers = Callable[[str], Answers]
Recompute = Literal["none", "selective", "full"]

LAYOUTS = {
    "tp1": LayoutConfig(),
    "tp2-sp": LayoutConfig(tp=2, sequence_parallel=True),
    "pp2": LayoutConfig(pp=2, first_stage_layers=2),
    "cp2": LayoutConfig(cp=2),
    "dp2": LayoutConfig(dp=2),
    "tp2-pp2": LayoutConfig(tp=2, sequence_parallel=True, pp=2, first_stage_layers=2),
}
# Each family, layout and way to recompute once.
PAIRS = [
    ("qwen3_vl", "tp2-sp", "full"),
    ("qwen3_vl", "pp2", "none"),
    ("qwen2_5_vl", "tp1", "selective"),
    ("qwen2_5_vl", "pp2", "full"),
]
WIDE = [
    ("mistral3", "tp2-sp", "none"),
    ("qwen3_5", "tp2-sp", "none"),
    ("qwen3_vl", "cp2", "none"),
    ("qwen2_5_vl", "dp2", "none"),
    ("qwen3_vl_moe", "tp2-sp", "selective"),
    ("mistral3", "pp2", "selective"),
    ("qwen3_5", "tp1", "full"),
    ("qwen2_5_vl", "tp2-pp2", "none"),
]
GRID = [
    case
    for case in itertools.product(VISION, LAYOUTS, ("none", "selective", "full"))
    # Delta nets are computed over whole rows.
    if case not in PAIRS + WIDE and not (case[0].startswith("qwen3_5") and case[1] == "cp2")
]
# Of the largest element of all gradients of a tensor.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def pool() -> Iterator[GetPool]:
    """World size → ranks that have not imported transformers, as those of runs; they end with the module."""
    pools: dict[int, RankPool] = {}
    with contextlib.ExitStack() as stack:

        def get(world_size: int) -> RankPool:
            if world_size not in pools:
                pools[world_size] = stack.enter_context(RankPool(world_size, timeout_s=120.0, preloaded=False))
            return pools[world_size]

        yield get


@pytest.fixture(scope="module")
def answers(pool: GetPool, tmp_path_factory: pytest.TempPathFactory) -> GetAnswers:
    """family → its rows and what transformers makes of them, made once."""
    made: dict[str, Answers] = {}

    def get(family: str) -> Answers:
        if family not in made:
            made[family] = pool(1).run(ask_transformers, family, tmp_path_factory.mktemp(family))[0]
        return made[family]

    return get


@pytest.mark.parametrize(
    ("family", "layout", "recompute"),
    [
        *PAIRS,
        *(pytest.param(*each, id="wide-" + "-".join(each)) for each in WIDE),
        *(pytest.param(*each, marks=pytest.mark.long) for each in GRID),
    ],
)
def test_rows_with_images_equal_transformers(
    pool: GetPool, answers: GetAnswers, tmp_path: Path, family: str, layout: str, recompute: Recompute
) -> None:
    expected, chosen = answers(family), LAYOUTS[layout]
    vision = Vision(store=expected.store, train="all")
    measured = run_ranks(
        pool(chosen.world_size), expected.path, chosen, tmp_path, expected.rows, MoeConfig(), recompute, vision=vision
    )
    # Far from uniform, so that equality means something.
    assert np.concatenate(expected.logprobs).std() > 0.5
    assert_rows("log-probs", [m.logprobs for m in measured], expected.logprobs)
    assert_same_tensors(tmp_path / "weights", expected.path)
    _assert_gradients(load_file(tmp_path / "gradients/model.safetensors"), expected)
    assert [m.grad_norm for m in measured if m.grad_norm] == pytest.approx([expected.norm] * chosen.dp, rel=1e-6)


def _assert_gradients(got: dict[str, torch.Tensor], expected: Answers) -> None:
    assert got.keys() == expected.gradients.keys()
    assert len([name for name in got if "vis" in name or "projector" in name]) > 20
    for name, gradient in expected.gradients.items():
        error, largest = float((got[name] - gradient).abs().max()), float(gradient.abs().max())
        # Biases of keys change nothing: their gradients are rounding alone.
        assert error <= max(TOLERANCE * largest, 1e-8), f"{name}: max |Δ| is {error:.2e} of {largest:.2e}"


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=pytest.mark.long) for each in VISION if "qwen3_5" not in each]
)
def test_images_of_branches_are_read_on_these_alone(pool: GetPool, tmp_path: Path, family: str) -> None:
    """A prompt's image is read once for all branches, and that of a reply in its own."""
    expected = pool(1).run(ask_transformers, family, tmp_path, forks=True)[0]
    vision, layout = Vision(store=expected.store, train="all"), LAYOUTS["tp2-sp"]
    measured = run_ranks(pool(2), expected.path, layout, tmp_path, expected.rows, MoeConfig(), "none", vision=vision)
    assert_rows("log-probs", [m.logprobs for m in measured], expected.logprobs)
    _assert_gradients(load_file(tmp_path / "gradients/model.safetensors"), expected)
    assert [m.grad_norm for m in measured if m.grad_norm] == pytest.approx([expected.norm], rel=1e-6)


@pytest.mark.long
def test_a_replica_of_texts_alone_adds_nothing_to_the_gradients_of_a_tower(pool: GetPool, tmp_path: Path) -> None:
    """Gradients are reduced while backward goes on, for which each parameter of each replica must have one."""
    expected = pool(1).run(ask_transformers, "qwen3_vl", tmp_path, chosen=(1, 2, 0, 7, 3, 4))[0]
    assert [[bool(expected.rows[i].images) for i in each] for each in ([0, 4, 1, 5], [2, 3])] == [
        [True] * 4,
        [False] * 2,
    ]
    assert split_rows(6, 2) == [[[0, 4], [1, 5]], [[2], [3]]]
    vision, layout = Vision(store=expected.store, train="all"), LAYOUTS["dp2"]
    measured = run_ranks(
        pool(2), expected.path, layout, tmp_path, expected.rows, MoeConfig(), "none", vision=vision, overlaps=True
    )
    assert_rows("log-probs", [m.logprobs for m in measured], expected.logprobs)
    _assert_gradients(load_file(tmp_path / "gradients/model.safetensors"), expected)


def test_a_frozen_tower_reads_images_and_is_not_among_the_weights(
    pool: GetPool, answers: GetAnswers, tmp_path: Path
) -> None:
    expected = answers("qwen3_vl")
    vision = Vision(store=expected.store)
    (found,) = run_ranks(
        pool(1), expected.path, LAYOUTS["tp1"], tmp_path, expected.rows, MoeConfig(), "none", vision=vision
    )
    assert_rows("log-probs", [found.logprobs], expected.logprobs)
    got = load_file(tmp_path / "gradients/model.safetensors")
    assert got.keys() == {name for name in read_tensors(expected.path) if not name.startswith("model.visual.")}
    squares = sum(float(expected.gradients[name].double().square().sum()) for name in got)
    assert found.grad_norm == pytest.approx(squares**0.5, rel=1e-6)


def _matrix(tensors: dict[str, torch.Tensor], module: str) -> torch.Tensor:
    """Return a module's part [out, in] of tensors, of which Qwen3-VL's have inputs first and all experts of a layer."""
    if ".experts." not in module:
        return tensors[f"{module}.weight"]
    block, number, kind = module.rsplit(".", 2)
    if kind == "down_proj":
        return tensors[f"{block}.down_proj"][int(number)].T
    return tensors[f"{block}.gate_up_proj"][int(number)].T.chunk(2)[kind == "up_proj"]


@pytest.mark.parametrize(
    ("family", "modules"), [("qwen3_vl", 7), pytest.param("qwen3_vl_moe", 4 + 4 * 3, marks=pytest.mark.long)]
)
def test_adapters_of_the_language_model_learn_beside_a_frozen_tower(
    pool: GetPool, answers: GetAnswers, tmp_path: Path, family: str, modules: int
) -> None:
    """With B = 0 the model is transformers', and where a weight's gradient is dW, that of B is s·dW·Aᵀ."""
    expected, layout = answers(family), LAYOUTS["tp2-sp"]
    lora, rows = LoraConfig(rank=4, alpha=8.0), with_advantages(expected.rows)
    # Of the experts' gradients, each rank of a distributed optimizer would have the sum of a part alone.
    distributed = family != "qwen3_vl_moe"
    optimizer = OptimizerConfig(lr=1e-3, weight_decay=0.0, clip_grad_norm=1e9, distributed=distributed)
    case = AdapterCase(
        model=ModelConfig(path=str(expected.path), dtype="float32", vocab_multiple=4),
        actor=ActorConfig(layout=layout, lora=lora, optimizer=optimizer),
        rows=rows,
        micro_batches=split_rows(len(rows), 1),
        request=update_request(rows, lr=1e-3),
        vision=Vision(store=expected.store),
        save=str(tmp_path / "saved"),
    )
    outcomes = pool(2).run(run_adapters, case)
    assert_rows("log-probs", [each.logprobs for each in outcomes], expected.logprobs)
    spec = read_model_spec(expected.path, tower="none")
    shapes = adapter_spec(spec, lora).expected_tensors()
    after, gradients = (assembled(outcomes, shapes, what) for what in ("after", "gradients"))
    names = [name.removesuffix(".lora_B.weight") for name in shapes if name.endswith(".lora_B.weight")]
    assert len(names) == 4 * modules
    for name in names:
        # A has no gradient, and stays what it was.
        wanted = 2.0 * _matrix(expected.gradients, name) @ after[f"{name}.lora_A.weight"].T
        error, largest = float((gradients[f"{name}.lora_B.weight"] - wanted).abs().max()), float(wanted.abs().max())
        assert error <= TOLERANCE * largest, f"{name}: max |Δ| is {error:.2e} of {largest:.2e}"
    assert [name for each in outcomes for name in each.changed] == []
    files = [str(file) for file in create_model_files(tmp_path / "merged", weight_specs(spec, "float32"))]
    pool(2).run(run_adapters, replace(case, save="", load=case.save, weight_files=files))
    merged, base = read_tensors(tmp_path / "merged"), read_tensors(expected.path)
    for name in names:
        update = 2.0 * after[f"{name}.lora_B.weight"] @ after[f"{name}.lora_A.weight"]
        torch.testing.assert_close(_matrix(merged, name), _matrix(base, name) + update, atol=1e-6, rtol=1e-6)


def test_a_placeholder_that_the_policy_samples_is_a_token_like_any_other(
    pool: GetPool, answers: GetAnswers, tmp_path: Path
) -> None:
    given = answers("qwen3_vl")
    ((rows, expected),) = pool(1).run(ask_with_stray_placeholders, "qwen3_vl", given.path.parent)
    vision, layout = Vision(store=given.store), LAYOUTS["tp2-sp"]
    measured = run_ranks(pool(2), given.path, layout, tmp_path, rows, MoeConfig(), "none", vision=vision)
    assert_rows("log-probs", [m.logprobs for m in measured], expected)


def test_features_are_not_added_on_a_second_stage(pool: GetPool, answers: GetAnswers, tmp_path: Path) -> None:
    given, layout = answers("qwen3_vl"), LayoutConfig(pp=2, first_stage_layers=1)
    vision = Vision(store=given.store)
    with pytest.raises(Exception, match=r"first pipeline stage has 1 layers, but .* each of its first 2"):
        run_ranks(pool(2), given.path, layout, tmp_path, given.rows, MoeConfig(), "none", vision=vision)


@pytest.mark.parametrize(
    ("family", "part"),
    [
        ("qwen3_vl", "projector"),
        pytest.param("qwen3_vl", "all", marks=pytest.mark.long),
        pytest.param("qwen3_vl_moe", "projector", marks=pytest.mark.long),
    ],
)
def test_what_is_trained_of_a_tower_travels_through_checkpoints(
    pool: GetPool, answers: GetAnswers, tmp_path: Path, family: str, part: TowerPart
) -> None:
    """It has a learning rate of its own, by which Adam's first step moves weights; what is frozen stays bit for bit."""
    given, vision = answers(family), VisionConfig(train=part, lr=3e-3)
    optimizer = OptimizerConfig(lr=1e-3, weight_decay=0.0)
    spec, checkpoint = read_model_spec(given.path, tower=part), tmp_path / "checkpoint"
    checkpoint.mkdir()

    def run(name: str, layout: str, rows: Sequence[Row] | None) -> dict[str, torch.Tensor]:
        files = create_model_files(tmp_path / name, weight_specs(spec, "float32"))
        case = TowerCase(
            model=ModelConfig(path=str(given.path), dtype="float32", vocab_multiple=4),
            actor=ActorConfig(layout=LAYOUTS[layout], optimizer=optimizer, vision=vision),
            vision=Vision(store=given.store, train=part),
            rows=rows,
            checkpoint=checkpoint,
            files=[str(file) for file in files],
        )
        sizes = pool(2).run(train_or_read, case)
        counted = [
            num_stage_parameters(spec, LAYOUTS[layout], stage, vocab_multiple=4).total
            for stage in range(LAYOUTS[layout].pp)
        ]
        assert {*sizes} == {*counted}
        return load_file(tmp_path / name / "model.safetensors")

    before, after = load_file(given.path / "model.safetensors"), run("trained", "tp2-sp", given.rows)
    of_tower = {name for name in after if name.startswith("model.visual.")}
    assert {"merger" in name for name in of_tower} == ({True} if part == "projector" else {True, False})
    moved = {name: float((after[name] - before[name]).abs().max()) for name in after}
    assert max(moved[name] for name in of_tower) == pytest.approx(3e-3, rel=1e-2)
    assert max(moved[name] for name in after.keys() - of_tower) == pytest.approx(1e-3, rel=1e-2)
    read = run("read", "pp2", None)
    assert all(torch.equal(read[name], after[name]) for name in after)
    settings = ConvertSettings(out=tmp_path / "converted", num_workers=1)
    mcore_to_hf(checkpoint / "actor", settings, model=given.path)
    assert verify(checkpoint / "actor", settings.out, model=given.path, num_workers=1).problems == ()
    assert verify(given.path, checkpoint / "actor", model=given.path, num_workers=1).problems
    converted = read_tensors(tmp_path / "converted")
    assert converted.keys() == before.keys()
    assert all(torch.equal(each, after.get(name, before[name])) for name, each in converted.items())
