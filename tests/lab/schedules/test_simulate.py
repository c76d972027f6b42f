"""The simulator on cases small enough to work out by hand; seconds are those of the comments."""

import dataclasses

import pytest

from megarl.errors import ConfigError
from megarl_lab.schedules.simulate import Costs, GroupLengths, Setting, Workload, simulate

# A decode step takes 1 s however many sequences it has, and training 5 s per step.
COSTS = Costs(
    decode_step_s=1.0,
    decode_sequence_s=0.0,
    max_num_seqs=8,
    recompute_s=0.0,
    train_step_s=5.0,
    train_token_s=0.0,
    old_logprobs_token_s=0.0,
    sync_s=0.0,
)


def workload(*responses: int, prompts: int = 1) -> Workload:
    return Workload(
        prompts_per_step=prompts,
        num_samples=len(responses),
        groups=(GroupLengths(prompt=4, responses=responses),),
    )


def setting(staleness: int = 0, *, finish: bool = True, engines: int = 1, trainers: int = 1) -> Setting:
    return Setting(
        num_engines=engines, num_trainers=trainers, staleness=staleness, finish=finish, has_old_logprobs=not finish
    )


def test_synchronous_steps_follow_one_another() -> None:
    """10 s of decoding, 5 s of training, 2 s of sync; the engine works 10 of 17 s, and the trainer waits as long."""
    outcome = simulate(workload(10), dataclasses.replace(COSTS, sync_s=2.0), setting())
    assert outcome.step_s == pytest.approx(17.0)
    assert outcome.trainer_idle == pytest.approx(10 / 17)
    assert outcome.engine_idle == pytest.approx(7 / 17)
    assert (outcome.lag_mean, outcome.lag_max, outcome.recomputed_tokens) == (0.0, 0, 0.0)


@pytest.mark.parametrize(
    ("lengths", "slots", "per_step", "per_sequence", "expected"),
    [
        # Both at once, steps of 1 + 2 s: 10 × 3 s, then the longer one alone: 10 × 2 s.
        ((10, 20), 8, 1.0, 1.0, 50.0),
        # One after the other, steps of 2 s.
        ((10, 20), 1, 1.0, 1.0, 60.0),
        # Only sequences cost: each token 1 s.
        ((10, 20), 8, 0.0, 1.0, 30.0),
        # Three with two slots: 5 steps, then the third beside the second until 10, then 3 steps alone.
        ((5, 10, 8), 2, 1.0, 0.0, 13.0),
    ],
)
def test_continuous_batching(
    lengths: tuple[int, ...], slots: int, per_step: float, per_sequence: float, expected: float
) -> None:
    costs = dataclasses.replace(
        COSTS, max_num_seqs=slots, decode_step_s=per_step, decode_sequence_s=per_sequence, train_step_s=0.0
    )
    assert simulate(workload(*lengths), costs, setting()).step_s == pytest.approx(expected)


def test_samples_go_to_the_engine_with_the_fewest() -> None:
    """Of four sequences, each engine has two: 10 steps of 2 s."""
    costs = dataclasses.replace(COSTS, decode_step_s=0.0, decode_sequence_s=1.0, train_step_s=0.0)
    outcome = simulate(workload(10, 10, 10, 10), costs, setting(engines=2))
    assert outcome.step_s == pytest.approx(20.0)
    assert outcome.engine_idle == pytest.approx(0.0)


def test_training_scales_with_tokens_and_devices() -> None:
    """A step has 2 × (4 + 10) = 28 tokens: 28 × 0.5 s × devices on 4 devices take 3.5 s."""
    costs = dataclasses.replace(COSTS, train_step_s=0.0, train_token_s=0.5, old_logprobs_token_s=0.25)
    assert simulate(workload(10, 10), costs, setting(trainers=4)).step_s == pytest.approx(10 + 3.5)
    # One step off, 3.5 s are hidden behind 10 s of decoding.
    assert simulate(workload(10, 10), costs, setting(1, trainers=4)).trainer_idle == pytest.approx(6.5 / 10)
    # In flight, scoring makes it 5.25 s; two groups overlap, as below: two steps in 10 + 5.25 s.
    outcome = simulate(workload(10, 10), costs, setting(1, finish=False, trainers=4))
    assert outcome.step_s == pytest.approx(15.25 / 2)


def test_one_step_off_takes_as_long_as_the_longer_side() -> None:
    """The group that is admitted at an update decodes for 10 s while the trainer works 5 s on the one before."""
    outcome = simulate(workload(10), COSTS, setting(1))
    assert outcome.step_s == pytest.approx(10.0)
    assert outcome.trainer_idle == pytest.approx(0.5)
    assert outcome.engine_idle == pytest.approx(0.0)
    assert (outcome.lag_mean, outcome.lag_max, outcome.recomputed_tokens) == (1.0, 1, 0.0)


def test_in_flight_updates_let_two_groups_overlap() -> None:
    """Tickets 0 and 1 decode until 10. Step 1 ends at 15 and admits 2 (15 to 25), step 2 ends at 20 and admits 3 (20 to
    30), step 3 waits until 25 and ends at 30, step 4 ends at 35, and so on: two steps in 15 s. The trainer waits for 5
    of them, the engine for none. At each update one sequence is under way: at 20 with 5 of its tokens, at 30 (step 3)
    ticket 3 has just ended, so that every second update recomputes 4 + 5 tokens.
    """
    outcome = simulate(workload(10), COSTS, setting(1, finish=False))
    assert outcome.step_s == pytest.approx(7.5)
    assert outcome.trainer_idle == pytest.approx(1 / 3)
    assert outcome.engine_idle == pytest.approx(0.0)
    assert (outcome.lag_mean, outcome.lag_max) == (1.0, 1)
    assert outcome.recomputed_tokens == pytest.approx(9 / 2)


def test_recomputing_takes_time() -> None:
    """A sequence of 100 tokens, the trainer's 5 s and 0.5 s per recomputed token: two groups in turn, and while one is
    trained on, the other goes on decoding.

    Groups 0 and 1 end at 100, step 1 at 105, which admits 2; step 2 ends at 110, when 2 has 5 tokens: (4 + 5)/2 = 4.5 s
    later it goes on, beside 3. Group 2 ends at 114.5 + 95 = 209.5, and 3, admitted at 110, waits for the same
    recomputation and ends at 214.5. Step 3 ends at 214.5 with nothing under way and admits 4; step 4 ends at 219.5 when
    4 has 5 tokens: as at 110. So two steps take 109.5 s.
    """
    outcome = simulate(workload(100), dataclasses.replace(COSTS, recompute_s=0.5), setting(1, finish=False))
    assert outcome.step_s == pytest.approx(109.5 / 2)
    assert outcome.recomputed_tokens == pytest.approx(9 / 2)


def test_a_window_passes_the_straggler() -> None:
    """Strict order waits for every ticket in turn; a window of 3 lets two younger ones train meanwhile."""
    groups = tuple(GroupLengths(prompt=4, responses=(length,)) for length in (5, 5, 5, 60))
    mixed = Workload(prompts_per_step=1, num_samples=1, groups=groups)
    strict = simulate(mixed, COSTS, Setting(num_engines=1, num_trainers=1, staleness=2, finish=False), num_steps=40)
    window = simulate(
        mixed, COSTS, Setting(num_engines=1, num_trainers=1, staleness=2, finish=False, window=3), num_steps=40
    )
    assert window.step_s < strict.step_s
    assert strict.lag_max == 2
    # η + ⌈(W − 1)/P⌉
    assert 2 < window.lag_max <= 4


def test_groups_of_another_size_give_as_many_samples() -> None:
    """From one recorded response of 10 tokens, four are drawn: 4 × 14 tokens of 1 s."""
    one = Workload(prompts_per_step=1, num_samples=4, groups=(GroupLengths(prompt=4, responses=(10,)),))
    costs = dataclasses.replace(COSTS, train_step_s=0.0, train_token_s=1.0)
    assert simulate(one, costs, setting()).step_s == pytest.approx(10 + 56)


def test_decoding_must_take_time() -> None:
    with pytest.raises(ConfigError, match=r"0.0 s per decode step and 0.0 s per sequence in it, expected one"):
        dataclasses.replace(COSTS, decode_step_s=0.0)
