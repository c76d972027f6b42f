"""Gradients are compared by groups in the order of backward, and the words name what differs."""

import pytest
import torch

from megarl.bisect.gradients import GradientComparison, compare_gradients
from megarl.errors import ConfigError

NAMES = (
    *("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"),
    *(
        f"model.layers.{i}.{part}"
        for i in range(3)
        for part in ("self_attn.q_proj.weight", "self_attn.k_proj.bias", "mlp.up_proj.weight", "input_layernorm.weight")
    ),
)


def gradient() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(8, 8, generator=generator) for name in NAMES}


def compared(changed: dict[str, torch.Tensor], dtype: str = "float32") -> GradientComparison:
    return compare_gradients(gradient(), gradient() | changed, dtype=dtype)


def test_groups_in_the_order_of_backward() -> None:
    found = compared({})
    parts = [f"layer {i}, {part}" for i in (2, 1, 0) for part in ("mlp", "self_attn", "input_layernorm")]
    assert [each.name for each in found.groups] == ["lm_head", "norm", *parts, "embed_tokens"]
    assert found.words() == "the gradients are equal to the bit"
    expected = gradient()["lm_head.weight"].norm().item()
    assert found.groups[0].norms == pytest.approx((expected, expected))
    assert [each.cosine for each in found.groups] == pytest.approx([1.0] * len(found.groups))


def test_rounding_is_told_from_a_fault() -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    other = {name: gradient()[name] * (1 + 1e-3)}
    assert (
        compared({name: gradient()[name] * (1 + 1e-5)})
        .words()
        .startswith("rounding: the largest difference is 1.0e-05")
    )
    assert compared(other).verdict == "fault"
    assert compared(other, "bfloat16").verdict == "rounding"


def test_what_is_only_rounding_may_differ_wholly() -> None:
    name = "model.layers.1.self_attn.k_proj.bias"
    ours = gradient() | {name: torch.full((8, 8), 1e-9)}
    assert compare_gradients(ours, ours | {name: -ours[name]}, dtype="float32").verdict == "rounding"


def test_one_group_with_another_scale_is_named() -> None:
    names = [name for name in NAMES if name.startswith("model.layers.1.mlp")]
    found = compared({name: 2 * gradient()[name] for name in names})
    assert found.first is not None
    assert found.first.name == "layer 1, mlp"
    assert found.words().startswith("fault: layer 1, mlp is 2 times as large, and nothing else")


def test_what_follows_in_backward_is_told_from_what_does_not() -> None:
    after = [name for name in NAMES if name.startswith(("model.layers.0", "model.layers.1", "model.embed"))]
    found = compared({name: gradient()[name].flip(0) for name in after})
    assert "fault: layer 1, mlp differs by" in found.words()
    assert found.words().endswith("it begins there")
    some = compared({name: gradient()[name].flip(0) for name in after if "self_attn" in name})
    assert some.words().endswith("and groups after it agree: their own gradients")


def test_all_of_it_at_another_scale_is_the_loss() -> None:
    found = compared({name: each / 2 for name, each in gradient().items()})
    assert (
        found.words()
        == "fault: all of it is 0.5 times as large: the loss or the forward pass; its scale or denominators"
    )


def test_what_is_not_finite_is_a_fault() -> None:
    found = compared({"model.norm.weight": torch.full((8, 8), float("nan"))})
    assert found.first is not None
    assert found.first.name == "norm"


def test_other_models_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"gradients are of other models: lm_head\.weight differs in shape"):
        compare_gradients(gradient(), gradient() | {"lm_head.weight": torch.zeros(2)}, dtype="float32")
