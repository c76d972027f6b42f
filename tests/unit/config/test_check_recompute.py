"""Rules of recompute, by their messages, and what it comes to in a model."""

import re
from dataclasses import replace
from typing import Any

import pytest

from megarl.config.check_model import check_recompute
from megarl.config.document import entries
from megarl.config.parse import from_dict
from megarl.config.recompute import RecomputeConfig
from megarl.config.schema import ActorConfig, Config, LayoutConfig, MoeConfig
from megarl.errors import ConfigError

DENSE = {"num_hidden_layers": 6}
SPARSE = {**DENSE, "num_experts": 8}
SHARED = {**DENSE, "n_routed_experts": 8, "n_shared_experts": 1, "kv_lora_rank": 32}


def actor(kind: str, *modules: str, **more: Any) -> ActorConfig:
    return ActorConfig(recompute=kind, recompute_modules=modules or None, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            actor("full", "mlp"),
            "x.recompute_modules: got ('mlp',) with x.recompute=full, which does not use it; set "
            "x.recompute=selective, or remove it",
        ),
        (
            actor("selective", recompute_layers=2),
            "x.recompute_layers: got 2 with x.recompute=selective, which does not use it; set x.recompute=full, or "
            "remove it",
        ),
        (
            actor("full", recompute_layers=2, recompute_unit=3),
            "x.recompute_unit: got 3 with x.recompute_layers=2, whose layers are recomputed one by one; remove one of "
            "them",
        ),
        (
            actor("selective", "moe", "moe_act"),
            "x.recompute_modules: got moe and moe_act, which moe includes; remove one of them",
        ),
        (
            actor("selective", "moe_act", moe=MoeConfig(grouped_gemm=False)),
            "x.recompute_modules: got moe_act with x.moe.grouped_gemm=false, but Megatron recomputes it only within "
            "grouped GEMMs; remove one of them",
        ),
    ],
)
def test_what_does_not_combine(settings: ActorConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        settings.check("x")


def test_a_critic_may_use_what_the_actor_does_not() -> None:
    actor("none", "mlp").check("x")


@pytest.mark.parametrize(
    ("settings", "model", "message"),
    [
        (actor("selective", "moe"), DENSE, "got moe, but the model of the critic has no experts; remove moe"),
        (
            actor("selective", "shared_experts"),
            SPARSE,
            "got shared_experts, but the model of the critic has no shared experts; remove shared_experts",
        ),
        (
            actor("selective", "mla_up_proj"),
            SPARSE,
            "got mla_up_proj, but the model of the critic has no latent attention; remove mla_up_proj",
        ),
        (
            actor("full", recompute_unit=2, layout=LayoutConfig(pp=2)),
            DENSE,
            "got 2, which does not divide the 3 layers of a model chunk of the critic; set another, or "
            "actor.recompute_layers instead",
        ),
    ],
)
def test_what_a_model_has_not(settings: ActorConfig, model: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^actor.recompute_(modules|unit): {re.escape(message)}$"):
        check_recompute(settings, model, "critic")
    check_recompute(replace(settings, recompute="none"), model, "critic")
    check_recompute(actor("selective", "shared_experts", "mla_up_proj"), SHARED, "critic")
    check_recompute(actor("full", recompute_unit=3, layout=LayoutConfig(pp=2)), DENSE, "critic")


def test_parts_are_named_in_messages_and_in_the_reference() -> None:
    names = "'core_attn', 'layernorm', 'mla_up_proj', 'mlp', 'moe', 'moe_act', 'shared_experts'"
    with pytest.raises(
        ConfigError,
        match=f"^actor.recompute_modules\\[0\\]: got 'norm' .str., expected one of {names}; did you mean",
    ):
        from_dict(Config, {"actor": {"recompute_modules": ["norm"]}})
    (entry,) = (each for each in entries() if each.key == "actor.recompute_modules")
    assert entry.expects == f"a list of any of {names} or null"


@pytest.mark.parametrize(
    ("has_dense", "has_experts", "expected"),
    [(True, False, ("mlp",)), (False, True, ("moe",)), (True, True, ("mlp", "moe"))],
)
def test_selective_means_mlps_unless_told(has_dense: bool, has_experts: bool, expected: tuple[str, ...]) -> None:
    kinds = {"has_dense": has_dense, "has_experts": has_experts}
    assert RecomputeConfig(recompute="selective").modules_of(**kinds) == expected
    assert RecomputeConfig(recompute="selective", recompute_modules=("layernorm",)).modules_of(**kinds) == (
        "layernorm",
    )
    assert RecomputeConfig(recompute="full").modules_of(**kinds) == ()


def test_in_words() -> None:
    every = (
        actor("none"),
        actor("selective"),
        actor("selective", "moe"),
        actor("full"),
        actor("full", recompute_layers=2),
    )
    assert [each.in_words() for each in every] == ["none", "mlp, moe", "moe", "full", "full, 2 layers"]
