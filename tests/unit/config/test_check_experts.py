"""Rules of models with experts, by their messages."""

import re
from dataclasses import replace
from typing import Any, Literal

import pytest

from megarl.config import check_engines
from megarl.config.algo import AlgoConfig, DemonstrationConfig
from megarl.config.check_engines import check_replayed_routing
from megarl.config.check_model import check_expert_width, check_experts, check_moe_settings
from megarl.config.generation import ScheduleConfig
from megarl.config.schema import ActorConfig, Config, EngineConfig, LayoutConfig, MoeConfig, RolloutConfig, RunConfig
from megarl.errors import ConfigError
from megarl.host.device.platform import PLATFORMS

QWEN = {"num_experts": 6, "moe_intermediate_size": 40, "intermediate_size": 80}
MIXTRAL = {"num_local_experts": 6, "intermediate_size": 80}
DENSE = {"intermediate_size": 80}


def test_groups_of_experts_are_not_chosen_by_the_fused_router() -> None:
    config = Config(actor=ActorConfig(moe=MoeConfig(fuse_router=True)))
    check_moe_settings(config, {**QWEN, "n_group": 1})
    with pytest.raises(ConfigError, match=r"^actor.moe.fuse_router: got true, but the model has n_group=8, and the"):
        check_moe_settings(config, {**QWEN, "n_group": 8})


def test_no_kernels_for_experts_are_batch_invariant() -> None:
    config = Config(run=RunConfig(batch_invariant=True))
    check_moe_settings(config, DENSE)
    with pytest.raises(ConfigError, match=r"^run.batch_invariant: got true for a model with experts, for whose"):
        check_moe_settings(config, QWEN)


def test_experts_are_split_over_the_ranks_of_a_stage() -> None:
    message = (
        "x.ep: ep 2 × etp 3 = 6, expected a divisor of the tp 2 × cp 1 × dp 2 = 4 ranks of a pipeline stage, over "
        "which experts are split; change one of them"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        LayoutConfig(tp=2, pp=3, dp=2, ep=2, etp=3).check("x")
    for layout in (LayoutConfig(tp=2, ep=2), LayoutConfig(cp=2, dp=3, ep=3, etp=2), LayoutConfig(pp=2, dp=4, ep=2)):
        layout.check("x")


@pytest.mark.parametrize(
    ("layout", "model", "message"),
    [
        (
            LayoutConfig(dp=4, ep=4),
            QWEN,
            "actor.layout.ep: got 4, which does not divide the model's num_experts=6; valid values: 1, 2, 3, 6",
        ),
        (
            LayoutConfig(dp=4, ep=4),
            MIXTRAL,
            "actor.layout.ep: got 4, which does not divide the model's num_local_experts=6; valid values: 1, 2, 3, 6",
        ),
        (
            LayoutConfig(dp=3, etp=3),
            QWEN,
            "actor.layout.etp: got 3, which does not divide the model's moe_intermediate_size=40; valid values: 1, 2, "
            "4, 5, 8, 10, 20, 40",
        ),
        (
            LayoutConfig(dp=3, etp=3),
            MIXTRAL,
            "actor.layout.etp: got 3, which does not divide the model's intermediate_size=80; valid values: 1, 2, 4, "
            "5, 8, 10, 16, 20, 40, 80",
        ),
        (
            LayoutConfig(tp=2),
            QWEN,
            "actor.layout.sequence_parallel: got false with tp=2, but Megatron trains models with experts only with "
            "it; set actor.layout.sequence_parallel=true or actor.layout.tp=1",
        ),
        (
            LayoutConfig(dp=2, ep=2),
            DENSE,
            "actor.layout.ep: got 2, but the model has no experts to split; set actor.layout.ep=1",
        ),
        (
            LayoutConfig(dp=2, etp=2),
            DENSE,
            "actor.layout.etp: got 2, but the model has no experts to split; set actor.layout.etp=1",
        ),
    ],
)
def test_what_does_not_split(layout: LayoutConfig, model: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        check_experts(layout, model, "actor")


def test_what_splits() -> None:
    for model in (QWEN, MIXTRAL):
        check_experts(LayoutConfig(tp=2, sequence_parallel=True, dp=3, ep=3, etp=2), model, "actor")
    check_experts(LayoutConfig(tp=2), DENSE, "actor")


def test_settings_for_experts_need_some() -> None:
    config = Config(actor=ActorConfig(moe=MoeConfig(freeze_router=True)))
    with pytest.raises(ConfigError, match=r"^actor\.moe: is set, but the model has no experts; remove it$"):
        check_moe_settings(config, DENSE)
    check_moe_settings(config, QWEN)
    check_moe_settings(Config(), DENSE)


@pytest.mark.parametrize(
    ("source", "captured", "known"),
    [("replay", False, True), ("vllm", True, True), ("vllm", False, False), ("regenerate", True, False)],
)
def test_routing_is_replayed_from_records_and_from_engines_that_capture_it(
    source: Literal["replay", "vllm", "regenerate"], captured: bool, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_engines, "platform", PLATFORMS["cuda" if captured else "cpu"])
    actor = ActorConfig(moe=MoeConfig(replay_routing=True))
    config = Config(actor=actor, rollout=RolloutConfig(source=source, replay_dir="records"))
    if known:
        check_replayed_routing(config)
        # Weights that change in the middle of samples, and samples that begin with demonstrations.
        schedule = ScheduleConfig(staleness=1, on_update="continue")
        config = replace(config, rollout=replace(config.rollout, schedule=schedule))
        check_replayed_routing(replace(config, algo=AlgoConfig(demonstrations=DemonstrationConfig(strategy="fixed"))))
    else:
        message = rf"^actor\.moe\.replay_routing: got true with rollout\.source={source}, but only a record"
        with pytest.raises(ConfigError, match=message):
            check_replayed_routing(config)
    check_replayed_routing(Config())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"run": RunConfig(deterministic=True)}, "run.deterministic=true"),
        (
            {"rollout": RolloutConfig(engine=EngineConfig(prefix_caching=False))},
            "rollout.engine.prefix_caching=false",
        ),
        ({"rollout": RolloutConfig(engine=EngineConfig(pp=2))}, "rollout.engine.pp > 1"),
    ],
)
def test_engines_capture_no_routing_without_a_prefix_cache_or_over_stages(
    changes: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_engines, "platform", PLATFORMS["cuda"])
    config = Config(actor=ActorConfig(moe=MoeConfig(replay_routing=True)), **changes)
    with pytest.raises(ConfigError, match=f"source=vllm and {re.escape(named)}, with which vLLM does not record"):
        check_replayed_routing(config)


@pytest.mark.parametrize(
    ("tp", "width", "remedy"), [(2, 96, "set rollout.engine.tp to one of 1, 3"), (1, 40, "use another model")]
)
def test_padded_experts_cannot_take_new_weights(tp: int, width: int, remedy: str) -> None:
    config, model = engine_config(tp), {"num_experts": 6, "moe_intermediate_size": width}
    message = (
        f"rollout.engine.tp: got {tp}, so an engine's worker has {width // tp} of moe_intermediate_size={width} of "
        f"each expert, expected a multiple of 32: vLLM pads others on this device, and padded experts cannot take new "
        f"weights; {remedy}, or run on CUDA"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        check_expert_width(config, model, 32)
    check_expert_width(config, model, 1)


@pytest.mark.parametrize(
    ("tp", "model"), [(2, {"num_experts": 6, "moe_intermediate_size": 64}), (2, {"intermediate_size": 80})]
)
def test_whole_blocks_of_experts_and_dense_models_can(tp: int, model: dict[str, object]) -> None:
    check_expert_width(engine_config(tp), model, 32)


def engine_config(tp: int) -> Config:
    return Config(rollout=RolloutConfig(engine=EngineConfig(tp=tp)))
