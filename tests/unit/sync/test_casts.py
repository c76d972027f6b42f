"""What casts keep of weights, and which tensors they are for."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.errors import NonFiniteError
from megarl.sync.transport.casts import from_transport, largest_magnitude, scale_of, sent_specs, to_transport
from megarl.weights.families import read_model_spec
from megarl.weights.safetensors_map import TensorSpec
from tests.unit.weights.test_families import DEEPSEEK_V3
from tests.unit.weights.test_slices import make_spec

FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("largest", "scale"),
    [(0.0, 1.0), (448.0, 1.0), (449.0, 2.0), (896.0, 2.0), (1.75, 2.0**-8), (1.0, 2.0**-8), (1e-40, 2.0**-126)],
)
def test_scales(largest: float, scale: float) -> None:
    """448 is the largest number of e4m3, 1.75 = 448 / 2⁸; no scale is below float32's normal numbers."""
    assert scale_of(largest) == scale


@given(st.floats(1e-30, 1e30))
def test_the_scale_is_the_smallest_power_of_two_that_covers(largest: float) -> None:
    scale = scale_of(largest)
    assert math.frexp(scale)[0] == 0.5
    assert largest / scale <= 448 < 2 * largest / scale


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=50))
def test_the_error_is_half_a_unit_of_the_last_of_four_bits(values: list[float]) -> None:
    tensor = torch.tensor(values)
    scale = scale_of(largest_magnitude("w", tensor))
    restored = from_transport(to_transport(tensor, FP8, scale), scale)
    exact, found = np.asarray(values), restored.double().numpy()
    # Below 2⁻⁶ e4m3 has steps of 2⁻⁹.
    bound = np.maximum(np.abs(exact) * 2.0**-4, scale * 2.0**-10)
    assert (np.abs(found - exact) <= bound).all()


def test_bfloat16_rounds_to_nearest() -> None:
    """1 + 2⁻⁸ lies between 1 and 1 + 2⁻⁷, and goes to the even one."""
    values = torch.tensor([1 + 2**-8, 1 + 3 * 2**-9, -0.0])
    cast = to_transport(values, torch.bfloat16, None)
    assert cast.tolist() == [1.0, 1 + 2**-7, 0.0]
    assert cast[2].signbit()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_scale_covers_what_is_not_finite(value: float) -> None:
    with pytest.raises(NonFiniteError, match="w has weights that are not finite"):
        largest_magnitude("w", torch.tensor([[1.0, value]]))


def test_which_tensors_are_cast() -> None:
    spec = make_spec(tied=False)
    specs = {n: TensorSpec(shape=s, dtype=torch.float32) for n, s in spec.expected_tensors().items()}
    assert sent_specs(spec, specs, None) == specs
    assert {each.dtype for each in sent_specs(spec, specs, "bfloat16").values()} == {torch.bfloat16}
    scaled = {name for name, each in sent_specs(spec, specs, "float8_e4m3").items() if each.dtype == FP8}
    assert scaled == {name for name in specs if name.endswith("_proj.weight")}


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3"])
def test_what_is_float32_in_every_model_stays(dtype: str, tmp_path: Path) -> None:
    small = {"num_hidden_layers": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3 | small))
    spec = read_model_spec(str(tmp_path))
    specs = {n: TensorSpec(shape=s, dtype=torch.float32) for n, s in spec.expected_tensors().items()}
    cast = sent_specs(spec, specs, dtype)
    assert spec.float32_tensors()
    assert {cast[name].dtype for name in spec.float32_tensors()} == {torch.float32}
    expert = cast["model.layers.3.mlp.experts.1.down_proj.weight"]
    assert expert.dtype == {"bfloat16": torch.bfloat16, "float8_e4m3": FP8}[dtype]
