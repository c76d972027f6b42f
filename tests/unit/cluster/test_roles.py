"""Which roles a run has, and under which settings and layouts."""

from collections.abc import Mapping
from typing import Any

from megarl.cluster.roles import actor_role, by_layout, reward_role, roles_of
from megarl.config import Config, from_dict
from megarl.config.schema import ActorConfig, LayoutConfig, ModelConfig
from megarl.types import TokenQuantity
from megarl.types.messages import Head, Role, RoleSpec


def roles(tree: Mapping[str, Any], *quantities: TokenQuantity) -> dict[Role, RoleSpec]:
    return {role.role: role for role in roles_of(from_dict(Config, {"model": {"path": "m"}, **tree}), quantities)}


def test_an_algorithm_gets_the_roles_whose_quantities_it_reads() -> None:
    assert list(roles({})) == list(roles({}, TokenQuantity.OLD_LOGPROBS)) == [Role.ACTOR]
    assert list(roles({}, TokenQuantity.REF_LOGPROBS)) == [Role.ACTOR, Role.REFERENCE]
    assert list(roles({}, TokenQuantity.VALUES)) == [Role.ACTOR, Role.CRITIC]
    assert list(roles({}, TokenQuantity.VALUES, TokenQuantity.REF_LOGPROBS)) == [
        Role.ACTOR,
        Role.REFERENCE,
        Role.CRITIC,
    ]


def test_what_is_left_open_is_the_actors() -> None:
    tree = {"actor": {"layout": {"tp": 2}, "micro_batch_tokens": 500, "head": {"chunk_tokens": 7}, "recompute": "full"}}
    found = roles(tree, TokenQuantity.VALUES, TokenQuantity.REF_LOGPROBS)
    actor, reference, critic = (found[role] for role in (Role.ACTOR, Role.REFERENCE, Role.CRITIC))
    assert reference == RoleSpec(role=Role.REFERENCE, model=actor.model, settings=actor.settings, trainable=False)
    assert critic.layout == LayoutConfig(tp=2)
    assert (critic.settings.micro_batch_tokens, critic.settings.recompute) == (500, "none")
    assert (critic.head, critic.trainable, critic.model) == (Head.SCALAR, True, actor.model)
    # Its optimizer is its own.
    assert (critic.settings.optimizer.lr, actor.settings.optimizer.lr) == (1e-5, 1e-6)


def test_a_reference_that_is_reset_moves_all_the_way_in_some_steps() -> None:
    resets = {"algo": {"kl": {"where": "loss", "reset_every_steps": 40}}}
    reference = roles(resets, TokenQuantity.REF_LOGPROBS)[Role.REFERENCE]
    assert (reference.update_rate, reference.update_every, reference.changes) == (1.0, 40, True)
    assert reference.is_beside(Role.ACTOR)


def test_who_is_on_the_base_of_an_actor_with_adapters() -> None:
    """A reference without adapters and a critic with some, if model and layout are the actor's."""
    needed, lora = (TokenQuantity.VALUES, TokenQuantity.REF_LOGPROBS), {"lora": {"rank": 8}}

    def bases(actor: Mapping[str, Any], **sections: Mapping[str, Any]) -> list[Role | None]:
        return [role.base_of for role in roles({"actor": actor, **sections}, *needed).values()]

    assert bases(lora, critic=lora) == [None, Role.ACTOR, Role.ACTOR]
    found = roles({"actor": lora, "critic": lora}, *needed)
    assert found[Role.REFERENCE].memory == (Role.ACTOR,)
    assert found[Role.CRITIC].memory == (Role.CRITIC, Role.ACTOR)
    judged = {"rewards": {"manager": "model"}, "reward_model": {"lora": {"rank": 4, "path": "adapters"}}}
    reward = roles({"actor": lora, **judged})[Role.REWARD]
    assert (reward.base_of, reward.trainable, reward.memory) == (Role.ACTOR, False, (Role.REWARD, Role.ACTOR))
    # A critic that trains its weights needs its own; so does one of another model, or in another layout.
    assert bases(lora) == [None, Role.ACTOR, None]
    assert bases(lora, critic={**lora, "model_path": "values"}) == [None, Role.ACTOR, None]
    assert bases({**lora, "layout": {"tp": 2}}, critic={**lora, "layout": {"dp": 2}}) == [None, Role.ACTOR, None]
    # An actor that trains its weights is no base.
    assert bases({}, critic=lora) == [None, None, None]


def test_settings_of_their_own() -> None:
    tree = {
        "model": {"path": "m", "config_path": "sizes", "dtype": "float32"},
        "actor": {"layout": {"tp": 2}},
        "reference": {"layout": {"dp": 2}, "model_path": "teacher", "micro_batch_tokens": 9},
        "critic": {
            "layout": {"pp": 2},
            "model_path": "values",
            "micro_batch_tokens": 8,
            "recompute": "selective",
            "freeze": True,
            # A single key leaves the critic's other defaults alone.
            "optimizer": {"warmup_steps": 3},
        },
    }
    found = roles(tree, TokenQuantity.VALUES, TokenQuantity.REF_LOGPROBS)
    reference, critic = found[Role.REFERENCE], found[Role.CRITIC]
    assert (reference.layout, reference.settings.micro_batch_tokens) == (LayoutConfig(dp=2), 9)
    # The published sizes are those of model.path, not of another model.
    assert reference.model == ModelConfig(path="teacher", dtype="float32")
    assert (critic.layout, critic.settings.micro_batch_tokens) == (LayoutConfig(pp=2), 8)
    assert (critic.model.path, critic.settings.recompute, critic.trainable) == ("values", "selective", False)
    assert (critic.settings.optimizer.lr, critic.settings.optimizer.warmup_steps) == (1e-5, 3)


def test_a_reward_model_is_frozen_and_hosted_where_one_judges() -> None:
    own = {"model_path": "judge", "layout": {"dp": 2}, "micro_batch_tokens": 7}
    judged = {"actor": {"recompute": "full"}, "rewards": {"manager": "model"}, "reward_model": own}
    found = roles(judged)
    assert list(found) == [Role.ACTOR, Role.REWARD]
    model = found[Role.REWARD]
    assert (model.model.path, model.head, model.trainable) == ("judge", Head.SCALAR, False)
    assert (model.layout, model.settings.micro_batch_tokens) == (LayoutConfig(dp=2), 7)
    mixed = {"manager": "hybrid", "hybrid": {"parts": {"judge": {"manager": "model"}}}}
    assert list(roles(judged | {"rewards": mixed})) == [Role.ACTOR, Role.REWARD]
    assert list(roles({"reward_model": own})) == [Role.ACTOR]


def test_a_reward_model_in_training_is_the_model_under_the_actors_settings() -> None:
    config = from_dict(Config, {"model": {"path": "m"}, "actor": {"layout": {"tp": 2}}})
    role = reward_role(config)
    assert (role.role, role.model.path, role.settings) == (Role.REWARD, "m", config.actor)
    assert (role.head, role.trainable) == (Head.SCALAR, True)


def test_roles_of_one_layout_go_together_and_the_actors_layout_first() -> None:
    tp2, dp2 = ActorConfig(layout=LayoutConfig(tp=2)), ActorConfig(layout=LayoutConfig(dp=2))
    actor = actor_role(Config(actor=tp2))
    reference = RoleSpec(role=Role.REFERENCE, model=ModelConfig(), settings=dp2, trainable=False)
    critic = RoleSpec(role=Role.CRITIC, model=ModelConfig(), settings=tp2, head=Head.SCALAR)
    grouped = by_layout([reference, actor, critic])
    assert list(grouped.items()) == [(tp2.layout, (actor, critic)), (dp2.layout, (reference,))]
