"""The simulation of engines that share samples, by hand; and that routing by load keeps its promise there."""

from pathlib import Path

import pytest

from megarl.config.load import with_overrides
from megarl.rollout.routing import InTurns, router_of
from megarl.rollout.stepping import EngineStepCost
from megarl_lab.bench import routing
from megarl_lab.bench.routing_model import Mix, SimulatedEngines


class Given(Mix):
    """Two prompts of two samples each."""

    def lengths(self, seed: int) -> list[list[int]]:
        return [[4, 5], [1, 1]]


MIX = Given(num_prompts=2, num_samples=2, prompt_tokens=4)


def test_engines_that_share_in_turns() -> None:
    """A step takes 1 s, 0.5 s for each sequence and 0.25 s for each token of a prompt; requests take 2 s to arrive.

    The first engine takes 1 + 2 · 0.5 + 8 · 0.25 = 4 s, three times 2 s, and 1.5 s with one sample left: 11.5 s. The
    second takes 4 s, of 13.5 s in all.
    """
    cost = EngineStepCost(base_s=1.0, sequence_s=0.5, prompt_token_s=0.25)
    engines = SimulatedEngines(InTurns(), num_engines=2, num_slots=4, cost=cost, delay_s=2.0)
    found = engines.run(MIX, 0)
    assert (found.step_s, found.idle) == (13.5, pytest.approx(1 - 15.5 / 27))
    assert (found.num_tokens, found.num_moved) == (11, 0)
    # A later step counts its own time.
    assert engines.run(MIX, 1) == found


def test_a_sample_that_waits_for_a_place_moves_to_an_idle_engine() -> None:
    """With a place each, engines take 4 + 5 steps of 1 s beside 1 + 1. By load, 5 begin after 1 + 1 instead."""
    cost = EngineStepCost(base_s=1.0, sequence_s=0.0, prompt_token_s=0.0)
    config = routing.config_of(Path(), "by_load", num_engines=2)
    rollout = with_overrides(config, ["rollout.engine.max_num_seqs=1"]).rollout
    by_load = router_of(rollout, deterministic=False)
    for router, step_s in ((InTurns(), 9.0), (by_load, 7.0)):
        engines = SimulatedEngines(router, num_engines=2, num_slots=1, cost=cost, delay_s=0.0)
        found = engines.run(MIX, 0)
        assert (found.step_s, found.idle) == (step_s, pytest.approx(1 - 11 / (2 * step_s)))
        assert (found.num_tokens, found.num_moved) == (11, 0)


@pytest.mark.parametrize("quantity", ["idle", "step_s"])
def test_routing_by_load_holds_the_limits_of_the_bench(quantity: str) -> None:
    steps = routing.simulate(2, routing.MIX, routing.COST, 12)
    before, after = (routing.mean_of(steps[name], quantity) for name in routing.ROUTINGS)
    assert after <= routing.LIMITS[quantity] * before
    assert [step.num_tokens for step in steps["by_load"]] == [step.num_tokens for step in steps["in_turns"]]
