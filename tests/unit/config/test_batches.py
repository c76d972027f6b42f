"""Rows, optimizer steps and the steps in which the actor learns."""

from typing import Any

import pytest

from megarl.config.batches import BatchCounts, actor_learns, batch_counts, num_actor_steps
from megarl.config.schema import Config, CriticConfig, RolloutConfig, TrainerConfig


def test_counts_are_in_prompts(golden: Any) -> None:
    case = golden("C.counts")
    params, expected = case["params"], case["expected"]
    config = Config(
        rollout=RolloutConfig(num_samples=params["n"], max_response_tokens=params["max_response_length"]),
        trainer=TrainerConfig(
            prompts_per_step=params["train_batch_size"],
            mini_batch_prompts=params["ppo_mini_batch_size"],
            num_epochs=params["ppo_epochs"],
        ),
    )
    assert batch_counts(config) == BatchCounts(
        rows_per_step=expected["rows"],
        rows_per_optimizer_step=expected["rows_per_mini"],
        optimizer_steps_per_step=expected["optimizer_steps_per_iteration"],
    )
    assert [batch_counts(config).rows_per_step, config.rollout.max_response_tokens] == expected["response_shape"]


def test_the_actor_waits_for_the_critic(golden: Any) -> None:
    case = golden("C.schedule")
    warmup, total = case["params"]["critic_warmup"], case["params"]["total_training_steps"]
    steps = [step for step in range(1, total + 1) if actor_learns(step, critic_warmup_steps=warmup)]
    assert steps == case["expected"]["actor_update_steps_exact"]
    config = Config(critic=CriticConfig(warmup_steps=warmup), trainer=TrainerConfig(total_steps=total))
    assert num_actor_steps(config, has_critic=True) == len(steps)
    assert num_actor_steps(config, has_critic=False) == total


@pytest.mark.parametrize("warmup", [0, 1])
def test_without_warm_up_the_actor_learns_from_the_first_step(warmup: int) -> None:
    assert actor_learns(1, critic_warmup_steps=warmup)
    config = Config(critic=CriticConfig(warmup_steps=warmup), trainer=TrainerConfig(total_steps=7))
    assert num_actor_steps(config, has_critic=True) == 7
