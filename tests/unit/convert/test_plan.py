"""Pieces of a plan tile the files, and none is larger than planned."""

import functools
import io
import itertools
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from megarl.convert import plan as plan_module
from megarl.convert.mapping import model_parameters
from megarl.convert.plan import ConversionPlan, plan_dist, plan_hf, row_ranges
from megarl.convert.readers import saved_size
from megarl.errors import DataError
from megarl.weights.families import ModelSpec, read_model_spec
from megarl.weights.safetensors_map import TensorSpec, plan_files
from tests.helpers.small_model import write_config


def specs_of(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> dict[str, TensorSpec]:
    return {name: TensorSpec(shape=shape, dtype=dtype) for name, shape in spec.expected_tensors().items()}


def assert_tiled(plan: ConversionPlan) -> None:
    """Fixed content and pieces fill every file without gaps or overlaps."""
    ranges: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for file in plan.files:
        ranges[file.name] += [(offset, offset + len(data)) for offset, data in file.fixed]
    for piece in plan.pieces:
        ranges[piece.file].append((piece.offset, piece.offset + piece.length))
    for file in plan.files:
        found = sorted(ranges[file.name])
        assert found[0][0] == 0
        assert all(end == start for (_, end), (start, _) in itertools.pairwise(found))
        assert found[-1][1] == file.num_bytes


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    return read_model_spec(write_config(tmp_path))


@pytest.mark.parametrize(
    ("piece_bytes", "max_file_bytes", "dtype"),
    [
        (64, 3000, torch.float64),
        (100, 3000, torch.bfloat16),
        (100, 1 << 30, torch.float32),
        (1 << 20, 1 << 30, torch.bfloat16),
    ],
)
def test_both_plans_tile_their_files(
    spec: ModelSpec,
    monkeypatch: pytest.MonkeyPatch,
    piece_bytes: int,
    max_file_bytes: int,
    dtype: torch.dtype,
) -> None:
    monkeypatch.setattr(plan_module, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(plan_module, "MAX_FILE_BYTES", max_file_bytes)
    monkeypatch.setattr(plan_module, "plan_files", functools.partial(plan_files, max_bytes=max_file_bytes))
    parameters = model_parameters(spec, scalar_head=False, vocab_multiple=8, stacked=True)
    for plan in (
        plan_dist(parameters, specs_of(spec), specs_of(spec, dtype)),
        plan_hf(specs_of(spec), specs_of(spec, dtype), weight_map=None),
    ):
        assert_tiled(plan)
        assert len(plan.files) > 1 or max_file_bytes == 1 << 30
        # A row of the widest tensor has 12 elements: a piece of one row may be larger.
        assert all(p.num_bytes <= max(piece_bytes, 12 * p.dtype.itemsize) for p in plan.pieces)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 70_000), (1, 1, 5, 257)])
def test_saved_size_is_what_torch_writes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    stream = io.BytesIO()
    torch.save(torch.ones(shape, dtype=dtype), stream)
    assert saved_size(shape, dtype) == len(stream.getvalue())


def test_rows_of_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "PIECE_BYTES", 96)
    # A row has 4 × 8 bytes, so three fit.
    assert list(row_ranges((7, 4), 8)) == [(0, 3), (3, 3), (6, 1)]
    assert list(row_ranges((2, 100), 8)) == [(0, 1), (1, 1)]


def test_parts_of_one_parameter_have_one_type(spec: ModelSpec) -> None:
    specs = specs_of(spec)
    name = "model.layers.2.self_attn.k_proj.weight"
    specs[name] = TensorSpec(shape=specs[name].shape, dtype=torch.bfloat16)
    parameters = model_parameters(spec, scalar_head=False, vocab_multiple=8, stacked=True)
    with pytest.raises(
        DataError, match=r"k_proj.weight: expected torch.float32, .*.*q_proj.*got torch.bfloat16; .*--dtype"
    ):
        plan_dist(parameters, specs, specs)
    norm = "model.layers.1.input_layernorm.weight"
    specs = specs_of(spec) | {norm: TensorSpec(shape=(8,), dtype=torch.bfloat16)}
    with pytest.raises(DataError, match=r"layer_norm_weight: expected torch.float32, .* got torch.bfloat16 at \(1,\)"):
        plan_dist(parameters, specs, specs)


def test_a_weight_map_of_other_tensors_is_not_followed(spec: ModelSpec) -> None:
    specs = specs_of(spec)
    weight_map = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(specs)}
    followed = plan_hf(specs, specs, weight_map=weight_map).hf_files
    assert {name: file for file, group in followed.items() for name in group} == weight_map
    del weight_map["lm_head.weight"]
    assert list(plan_hf(specs, specs, weight_map=weight_map).hf_files) == ["model.safetensors"]
