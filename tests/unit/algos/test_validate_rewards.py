"""Every conflict between rewards and estimator, by the message users see."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.algos.rewards import reward_advantages
from megarl.algos.validate import check_algo_config
from megarl.algos.validate_rewards import reward_warnings
from megarl.config import Config, from_dict
from megarl.config.algo import AlgoConfig
from megarl.config.load import with_overrides
from megarl.errors import ConfigError
from tests.helpers.examples import step

FILES = Path(__file__).parents[3] / "configs" / "algo"


def algo(**keys: Any) -> AlgoConfig:
    return from_dict(Config, {"algo": keys}).algo


def critic(**reward: Any) -> dict[str, Any]:
    return {"reward": {"source": "critic", **reward}, "advantage": {"estimator": "critic_value"}}


BEFORE = {"ratio": 0.5, "flip_stage": "before_whiten"}
GDPO = {"estimator": "gdpo", "components": {"correct": 1.0, "style": 0.5}}
CONFLICTS: list[tuple[dict[str, Any], str]] = [
    (
        {"reward": {"source": "critic"}},
        "algo.reward.source: got 'critic' with algo.advantage.estimator=grpo, which reads no values; "
        "set algo.advantage.estimator=critic_value, or algo.reward.source=rule",
    ),
    (
        {"advantage": {"estimator": "critic_value"}},
        "algo.advantage.estimator: got 'critic_value' with algo.reward.source=rule, whose rewards it does not read; "
        "set algo.advantage.estimator=gae, or algo.reward.source=critic",
    ),
    (
        critic() | {"kl": {"where": "reward"}},
        "algo.kl.where: got 'reward' with algo.reward.source=critic, whose rewards take no KL penalty; "
        "set algo.kl.where=loss or none",
    ),
    (
        critic(truncated=0.5),
        "algo.reward.truncated: got 0.5, which is not read with algo.reward.source=critic; leave it at null, or set "
        "algo.reward.source=rule",
    ),
    (
        {"reward": {"mask": {"kind": "fixed"}}},
        "algo.reward.mask.kind: got fixed, which is not read with algo.reward.mask.ratio=0; leave it at bernoulli, or "
        "set algo.reward.mask.ratio > 0",
    ),
    (
        {"reward": {"mask": BEFORE | {"flip": False}}, "advantage": {"estimator": "gae"}},
        "algo.reward.mask.flip_stage: got before_whiten, which is not read with algo.reward.mask.flip=false; leave it "
        "at after_whiten, or flip advantages of an estimator that normalises them over the batch, such as gae",
    ),
    (
        {"reward": {"mask": BEFORE}},
        "algo.reward.mask.flip_stage: got before_whiten, which is not read with algo.advantage.estimator=grpo; leave "
        "it at after_whiten, or flip advantages of an estimator that normalises them over the batch, such as gae",
    ),
    (
        critic(mask=BEFORE),
        "algo.reward.mask.flip_stage: got before_whiten, which is not read with algo.reward.source=critic; leave it "
        "at after_whiten, or flip advantages of an estimator that normalises them over the batch, such as gae",
    ),
    (
        {"advantage": {"uniform_scale": True}},
        "algo.advantage.uniform_scale: got true, which is not read with algo.advantage.estimator=grpo; leave it at "
        "false, or use reinforce_max",
    ),
    (
        {"advantage": {"estimator": "rloo", "gamma": 0.9}},
        "algo.advantage.gamma: got 0.9, which is not read with algo.advantage.estimator=rloo; leave it at 1.0, or use "
        "gae or reinforce_plus_plus or turn_returns or tree_returns",
    ),
    (
        {"reward": {"source": "critic"}, "advantage": {"estimator": "gae", "lam": 0.9}},
        "algo.advantage.lam: got 0.9, which is not read with algo.advantage.estimator=gae and "
        "algo.reward.source=critic; leave it at 1.0, or set algo.reward.source=rule",
    ),
    (
        {"reward": {"overlong_factor": 0.5}},
        "algo.reward.overlong_factor: got 0.5, which is not read with algo.reward.overlong_buffer_tokens=null; "
        "leave it at 1.0, or set algo.reward.overlong_buffer_tokens",
    ),
    (
        {"reward": {"overlong_buffer_tokens": 101}},
        "algo.reward.overlong_buffer_tokens: got 101, expected at most rollout.max_response_tokens=100",
    ),
    (
        {"reward": {"clip": [1.0, 1.0]}},
        "algo.reward.clip: got [1.0, 1.0], expected [low, high] with low < high",
    ),
    (
        {"advantage": {"estimator": "maxrl"}, "kl": {"where": "reward"}},
        "algo.advantage.estimator: got 'maxrl' with algo.kl.where=reward, which can make rewards negative; "
        "maxrl divides by the mean of rewards in [0, 1]; drop one of the two",
    ),
    (
        {"advantage": {"estimator": "gdpo"}},
        "algo.advantage.components: got none with algo.advantage.estimator=gdpo, which normalises each of them; name "
        "them with their weights, as in {correct: 1.0, format: 0.5}",
    ),
    (
        {"advantage": GDPO, "kl": {"where": "reward"}},
        "algo.kl.where: got 'reward' with algo.advantage.estimator=gdpo, which it would not reach: the estimator reads "
        "the components correct, style; leave it at its default, or choose another estimator",
    ),
    (
        {"advantage": GDPO, "reward": {"mask": {"ratio": 0.5}}},
        "algo.reward.mask.ratio: got 0.5 with algo.advantage.estimator=gdpo, which it would not reach: the estimator "
        "reads the components correct, style; leave it at its default, or choose another estimator",
    ),
    (
        {"advantage": GDPO, "reward": {"clip": [0, 1]}},
        "algo.reward.{clip,overlong_buffer_tokens,truncated}: got a value with algo.advantage.estimator=gdpo, which it "
        "would not reach: the estimator reads the components correct, style; leave it at its default, or choose "
        "another estimator",
    ),
    (
        {"advantage": {"estimator": "remax"}, "reward": {"overlong_buffer_tokens": 10}},
        "algo.reward.{clip,overlong_buffer_tokens,truncated}: got a value with algo.advantage.estimator=remax, whose "
        "baseline is the reward of a greedy response as the scorer gave it; leave them at null",
    ),
    (
        {"advantage": {"components": {"format": 0.5}}},
        "algo.advantage.components: got {'format': 0.5}, which is not read with algo.advantage.estimator=grpo; leave "
        "it at {}, or use gdpo",
    ),
    (
        {"advantage": {"estimator": "maxrl"}, "reward": {"truncated": -0.5}},
        "algo.advantage.estimator: got 'maxrl' with algo.reward.truncated < 0, which can make rewards negative; "
        "maxrl divides by the mean of rewards in [0, 1]; drop one of the two",
    ),
]


@pytest.mark.parametrize(("keys", "message"), CONFLICTS, ids=[message[:50] for _, message in CONFLICTS])
def test_conflicts(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_algo_config(algo(**keys), max_response_tokens=100)
    assert str(caught.value) == message


@pytest.mark.parametrize("path", sorted(FILES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_algorithm_file_is_without_conflict(path: Path) -> None:
    config = from_dict(Config, yaml.safe_load(path.read_text(encoding="utf-8")))
    assert config.algo.name == path.stem
    check_algo_config(config.algo, max_response_tokens=8)
    critic = config.critic
    assert reward_warnings(config.algo, critic_frozen=critic.freeze, critic_warmup_steps=critic.warmup_steps) == []


@pytest.mark.parametrize(
    "keys",
    [
        {"reward": {"overlong_buffer_tokens": 100, "clip": [-1, 1]}},
        {"reward": {"mask": {"flip": False}}},
        {"reward": {"mask": BEFORE}, "advantage": {"estimator": "reinforce_baseline"}},
        {"reward": {"source": "critic"}, "advantage": {"estimator": "gae"}},
        {"advantage": {"estimator": "reinforce_max", "uniform_scale": True}},
        {"advantage": {"estimator": "gdpo", "components": {"score": 1.0}}, "reward": {"clip": [0, 1]}},
    ],
)
def test_no_conflict(keys: dict[str, Any]) -> None:
    check_algo_config(algo(**keys), max_response_tokens=100)


GAE = {"estimator": "gae"}
WARNINGS: list[tuple[dict[str, Any], bool, int, list[str]]] = [
    (critic(), False, 0, ["freeze the critic"]),
    (critic(), True, 0, []),
    (critic(), True, 3, ["its 3 steps only delay the policy"]),
    (critic(mask={"ratio": 0.5}), True, 0, ["advantages do not depend on rewards"]),
    (critic(mask={"ratio": 0.5, "flip": False}), True, 0, ["advantages do not depend on rewards"]),
    (critic(mask={"flip": True}), True, 0, ["with algo.reward.source=critic advantages are never flipped"]),
    ({"reward": {"mask": {"flip": True}}, "advantage": GAE}, False, 0, ["ratio=0 no row is hidden"]),
    ({"reward": {"mask": {"ratio": 0.5}}}, False, 0, ["estimator=grpo: hidden rows count as failures"]),
    ({"reward": {"mask": {"ratio": 0.5}}, "advantage": GAE}, False, 9, []),
    ({"reward": {"mask": {"ratio": 0.5, "flip": False}}, "advantage": GAE}, False, 0, ["advantages of about −V"]),
    ({"reward": {"mask": {"ratio": 1}}, "advantage": GAE}, False, 0, ["the critic's values are the only signal"]),
]


@pytest.mark.parametrize(("keys", "frozen", "warmup", "expected"), WARNINGS)
def test_warnings(keys: dict[str, Any], frozen: bool, warmup: int, expected: list[str]) -> None:
    got = reward_warnings(algo(**keys), critic_frozen=frozen, critic_warmup_steps=warmup)
    assert len(got) == len(expected)
    assert all(part in message for part, message in zip(expected, got, strict=True))


@pytest.mark.parametrize("source", ["rule", "critic"])
@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("flip", [None, True, False])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("name", ["ppo", "ppo_critic"])
def test_source_mask_flip_and_freeze_combine_freely(
    name: str, source: str, ratio: float, flip: bool | None, frozen: bool
) -> None:
    """An explicit flip that has no effect is a note; only kept rows without a critic's reward have a sign to lose."""
    changes = [f"algo.reward.source={source}", f"algo.reward.mask.ratio={ratio}", f"critic.freeze={frozen}"]
    changes.append(f"algo.reward.mask.flip={'null' if flip is None else flip}")
    config = with_overrides(from_dict(Config, yaml.safe_load((FILES / f"{name}.yaml").read_text())), changes)
    check_algo_config(config.algo, max_response_tokens=8)
    warnings = reward_warnings(config.algo, critic_frozen=frozen, critic_warmup_steps=0)
    flips_nothing = flip is True and (source == "critic" or ratio == 0)
    assert any("flips nothing" in warning for warning in warnings) == flips_nothing


@pytest.mark.parametrize(("source", "ratio"), [("critic", 0.0), ("critic", 0.5), ("rule", 0.0)])
def test_a_flip_without_effect_changes_no_advantage(source: str, ratio: float) -> None:
    batch = step("aabb", [1.0, 0.0, 2.0, 0.5], values=[[0.5, 0.1], [0.25, 1.0], [0.0, 0.3], [1.0, 0.0]])
    advantages = []
    for flip in (None, True, False):
        cfg = algo(reward={"source": source, "mask": {"ratio": ratio, "flip": flip}}, advantage=GAE)
        advantages.append(reward_advantages(batch, cfg.reward, cfg.advantage).advantages.tolist())
    assert advantages[0] == advantages[1] == advantages[2]
