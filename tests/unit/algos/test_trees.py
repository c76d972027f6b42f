"""Credit in conversations that branch: by hand, and unbiased or not by enumeration of what a small policy can say."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch

from megarl.algos.advantages import ADVANTAGE_ESTIMATORS
from megarl.algos.token_rewards import TURN_REWARDS
from megarl.algos.trees import later_sums, next_sums, token_after, turn_tree
from megarl.config.algo import AdvantageConfig
from megarl.types import ScoredBatch, TokenQuantity
from megarl.types.turns import AFTER, FIRST_TRY, TURN

MakeScored = Callable[..., ScoredBatch]

# Turn 0 of two tokens; turns 1 and 2 were written beside each other after it, turn 3 after turn 1.
MASK = torch.tensor([[1, 1, 0, 1, 1, 0, 1]], dtype=torch.bool)
NUMBERS = {
    TURN: torch.tensor([[0.0, 0, -1, 1, 2, -1, 3]]),
    AFTER: torch.tensor([[-1.0, -1, -1, 0, 0, -1, 1]]),
    FIRST_TRY: torch.tensor([[0.0, 0, -1, 1, 1, -1, 3]]),
}


def by_hand(make_scored: MakeScored, cfg: AdvantageConfig, reward: float, **quantities: torch.Tensor) -> list[float]:
    # The environment gives 1 for turn 1, 2 for turn 2 and 4 for turn 3.
    earned = torch.tensor([[0, 0, 9, 1.0, 2.0, 9, 4.0]], dtype=torch.float64)
    batch = make_scored(["q"], [reward], MASK, **{TURN_REWARDS: earned}, **NUMBERS, **quantities)
    row: list[float] = ADVANTAGE_ESTIMATORS.get(cfg.estimator)(batch, cfg).advantages[0].tolist()
    return row


def test_paths_by_hand(make_scored: MakeScored) -> None:
    tree = turn_tree(make_scored(["q"], [7.0], MASK, **NUMBERS), paths=True)
    assert tree.depths().tolist() == [[0, 1, 1, 2]]
    assert token_after(tree).tolist() == [[-1, 0, -1, 1, 1, -1, 3]]
    written = turn_tree(make_scored(["q"], [7.0], MASK, **NUMBERS), paths=False)
    assert token_after(written).tolist() == [[-1, 0, -1, 1, 3, -1, 4]]
    # G: turn 3: 4, turn 2: 2, turn 1: 1 + 4/2, turn 0: (3 + 2)/2. The judges gave 0.5 more, for the whole.
    cfg = AdvantageConfig(estimator="turn_returns", gamma=0.5, credit="path")
    assert by_hand(make_scored, cfg, 7.5) == [3.0, 3.0, 0, 3.5, 2.5, 0, 4.5]
    cfg = AdvantageConfig(estimator="tree_returns", gamma=0.5)
    assert by_hand(make_scored, cfg, 7.5) == [3.0, 3.0, 0, 3 - 2 + 0.5, 2 - 3 + 0.5, 0, 4.5]


def test_gae_along_paths_by_hand(make_scored: MakeScored) -> None:
    values = torch.tensor([[1.0, 2.0, 9, 0.5, 0.5, 9, 3.0]])
    cfg = AdvantageConfig(estimator="gae", lam=0.5, whiten=False, credit="path")
    # δ: turn 3: 4 − 3; turn 2: 2 − 0.5; turn 1: 1 + 3 − 0.5; the second token: 0.5 + 0.5 − 2; the first: 2 − 1.
    last, other = 1.0, 1.5
    tried = 3.5 + 0.5 * last
    second = -1.0 + 0.5 * (tried + other)
    assert by_hand(make_scored, cfg, 7.0, values=values) == [1 + 0.5 * second, second, 0, tried, other, 0, last]


def test_the_other_samples_are_compared_at_the_same_depth(make_scored: MakeScored) -> None:
    """The second sample has one turn at each depth."""
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]], dtype=torch.bool)
    numbers = {
        TURN: torch.tensor([[0.0, 1, 2], [0, 1, 0]]),
        AFTER: torch.tensor([[-1.0, 0, 0], [-1, 0, 0]]),
        FIRST_TRY: torch.tensor([[0.0, 1, 1], [0, 1, 0]]),
    }
    earned = torch.tensor([[0.0, 1, 3], [0, 5, 0]])
    batch = make_scored(["q", "q"], [4.0, 5.0], mask, **{TURN_REWARDS: earned}, **numbers)
    for name, first in (("turn_returns", [-1.0, -4.0, -2.0]), ("tree_returns", [-1.0, -2.0, 2.0])):
        cfg = AdvantageConfig(estimator=name, credit="path" if name == "turn_returns" else "written")
        got = ADVANTAGE_ESTIMATORS.get(name)(batch, cfg).advantages
        assert got.tolist() == [first, [1.0, 3.0, 0.0]], name


@pytest.mark.parametrize("estimator", ["turn_returns", "gae"])
def test_a_conversation_without_branches_has_one_path(make_scored: MakeScored, estimator: str) -> None:
    mask = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0]], dtype=torch.bool)
    quantities = {"values": torch.arange(8.0).reshape(2, 4), TURN_REWARDS: torch.ones(2, 4)}
    batch = make_scored(["q", "q"], [3.0, 2.0], mask, **quantities)
    written, path = (
        ADVANTAGE_ESTIMATORS.get(estimator)(batch, AdvantageConfig(estimator=estimator, gamma=0.5, credit=credit))
        for credit in ("written", "path")
    )
    torch.testing.assert_close(path.advantages, written.advantages)


def test_sums_without_columns() -> None:
    empty, after = torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.long)
    assert later_sums(empty, after).shape == next_sums(empty, after).shape == (2, 0)


# A policy that says 0 or 1, with one logit for each context of what stands before on the path.
CONTEXTS: list[tuple[int, ...]] = [(), *itertools.product((0, 1)), *itertools.product((0, 1), repeat=2)]
LOGITS = dict(zip(CONTEXTS, (0.3, -0.4, 0.6, 0.2, -0.7, 0.5, -0.1), strict=True))
VALUES = dict(zip(CONTEXTS, (0.5, 1.5, -0.5, 0.25, 2.0, -1.0, 0.75), strict=True))
EARNED = dict(zip(itertools.product((0, 1), repeat=3), (0.0, 3.0, 1.0, -2.0, 4.0, 0.5, 2.0, 5.0), strict=True))


@dataclass(frozen=True, kw_only=True)
class Turn:
    context: tuple[int, ...]
    token: int
    after: int
    first_try: int
    reward: float

    @property
    def path(self) -> tuple[int, ...]:
        return (*self.context, self.token)

    @property
    def prob(self) -> float:
        one = 1 / (1 + math.exp(-LOGITS[self.context]))
        return one if self.token else 1 - one

    @property
    def grad(self) -> torch.Tensor:
        """∇log π by all logits."""
        grad = torch.zeros(len(CONTEXTS), dtype=torch.float64)
        one = 1 / (1 + math.exp(-LOGITS[self.context]))
        grad[CONTEXTS.index(self.context)] = self.token - one
        return grad


def turn(turns: Sequence[Turn], token: int, after: int, first_try: int) -> Turn:
    context = turns[after].path if after >= 0 else ()
    # The second token of a path earns 1 if it differs from the first; the third earns by all of them.
    path = (*context, token)
    reward = EARNED[path] if len(path) == 3 else float(len(path) == 2 and path[0] != path[1])
    return Turn(context=context, token=token, after=after, first_try=first_try, reward=reward)


def all_tries_go_on(tokens: Sequence[int]) -> list[Turn]:
    """One turn, two tries of the next one, and a turn after each of them."""
    turns: list[Turn] = []
    for token, after, first_try in zip(tokens, (-1, 0, 0, 1, 2), (0, 1, 1, 3, 4), strict=True):
        turns.append(turn(turns, token, after, first_try))
    return turns


def the_better_try_goes_on(tokens: Sequence[int]) -> list[Turn]:
    """The last turn follows the try that earned more, which depends on both."""
    turns: list[Turn] = []
    for token, first_try in zip(tokens, (0, 1, 1, 3), strict=True):
        best = 2 if len(turns) == 3 and turns[2].reward > turns[1].reward else 1
        turns.append(turn(turns, token, (-1, 0, 0, best)[len(turns)], first_try))
    return turns


Search = Callable[[Sequence[int]], list[Turn]]
SEARCHES: dict[Search, int] = {all_tries_go_on: 5, the_better_try_goes_on: 4}


def judged(turns: Sequence[Turn]) -> float:
    """What judges give for the conversation as a whole: 6 if any try says 1 where the first turn said 0."""
    return 6.0 * any(each.path == (0, 1) for each in turns)


def gradients(search: Search, cfg: AdvantageConfig, *, size: int, judges: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean of Σ A·∇log π over all groups of a size, per sample, and ∇ of the expected reward."""
    talks = [search(tokens) for tokens in itertools.product((0, 1), repeat=SEARCHES[search])]
    probs = [math.prod(each.prob for each in turns) for turns in talks]
    rests = [judged(turns) if judges else 0.0 for turns in talks]
    totals = [sum(each.reward for each in turns) + rest for turns, rest in zip(talks, rests, strict=True)]
    grads = torch.stack([torch.stack([each.grad for each in turns]) for turns in talks])
    expected = sum(p * total * grad.sum(0) for p, total, grad in zip(probs, totals, grads, strict=True))
    assert isinstance(expected, torch.Tensor)

    groups = list(itertools.product(range(len(talks)), repeat=size))
    rows = [i for group in groups for i in group]

    def tokens(values: Callable[[Turn], float]) -> torch.Tensor:
        return torch.tensor([[values(each) for each in turns] for turns in talks], dtype=torch.float64)[rows]

    batch = ScoredBatch(
        uids=tuple(str(group) for group in groups for _ in group),
        rewards=torch.tensor(totals, dtype=torch.float64)[rows],
        correct=torch.zeros(len(rows), dtype=torch.bool),
        loss_mask=torch.ones(len(rows), SEARCHES[search], dtype=torch.bool),
        quantities={
            TURN_REWARDS: tokens(lambda each: each.reward),
            TURN: torch.arange(float(SEARCHES[search])).expand(len(rows), -1),
            AFTER: tokens(lambda each: each.after),
            FIRST_TRY: tokens(lambda each: each.first_try),
            TokenQuantity.VALUES: tokens(lambda each: VALUES[each.context]),
        },
    )
    advantages = ADVANTAGE_ESTIMATORS.get(cfg.estimator)(batch, cfg).advantages
    weights = torch.tensor([math.prod(probs[i] for i in group) for group in groups], dtype=torch.float64)
    of_rows = torch.einsum("rt,rtp->rp", advantages, grads[rows])
    return (weights.repeat_interleave(size)[:, None] * of_rows).sum(0) / size, expected


def gae(credit: str) -> AdvantageConfig:
    return AdvantageConfig(estimator="gae", whiten=False, credit=credit)  # type: ignore[arg-type]


def turn_returns(credit: str) -> AdvantageConfig:
    return AdvantageConfig(estimator="turn_returns", credit=credit)  # type: ignore[arg-type]


TREE = AdvantageConfig(estimator="tree_returns")
RLOO = AdvantageConfig(estimator="rloo")


@pytest.mark.parametrize(
    ("search", "cfg", "size", "judges"),
    [
        *((search, cfg, 2, True) for search in SEARCHES for cfg in (RLOO, turn_returns("written"))),
        (the_better_try_goes_on, gae("written"), 1, True),
        (all_tries_go_on, turn_returns("path"), 2, True),
        (all_tries_go_on, TREE, 2, True),
        (all_tries_go_on, TREE, 1, False),
        (all_tries_go_on, gae("path"), 1, False),
    ],
)
def test_the_policy_gradient_is_unbiased(search: Search, cfg: AdvantageConfig, size: int, judges: bool) -> None:
    got, expected = gradients(search, cfg, size=size, judges=judges)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("cfg", [turn_returns("path"), TREE, gae("path")], ids=lambda cfg: str(cfg.estimator))
def test_it_is_biased_along_paths_where_a_search_compares_tries(cfg: AdvantageConfig) -> None:
    """A try earns more by being chosen than its own branch shows, as the other one would have gone on in its place."""
    got, expected = gradients(the_better_try_goes_on, cfg, size=2, judges=False)
    assert (got - expected).abs().max() > 0.05


def test_gae_along_paths_gives_judges_verdicts_to_the_last_path_alone() -> None:
    got, expected = gradients(all_tries_go_on, gae("path"), size=1, judges=True)
    assert (got - expected).abs().max() > 0.05


@pytest.mark.parametrize(("name", "credit"), [("turn_returns", "path"), ("tree_returns", "written"), ("gae", "path")])
@pytest.mark.parametrize("turn", range(4))
def test_a_turn_without_loss_tokens_keeps_its_place(make_scored: MakeScored, name: str, credit: str, turn: int) -> None:
    """The others get what they get beside one that is trained, and earns nothing."""
    numbers = {
        TURN: torch.tensor([[0.0, 1, 2, 3, 0]]),
        AFTER: torch.tensor([[-1.0, 0, 0, 2, 0]]),
        FIRST_TRY: torch.tensor([[0.0, 1, 1, 3, 0]]),
    }
    earned = torch.tensor([[1.0, 2.0, 4.0, 8.0, 9.0]])
    earned[0, turn] = 0.0
    quantities = {TURN_REWARDS: earned, "values": torch.zeros(1, 5), **numbers}
    options = {"whiten": False} if name == "gae" else {}
    cfg = AdvantageConfig(estimator=name, credit=credit, gamma=1.0, **options)  # type: ignore[arg-type]
    found = []
    for mask in ([[1, 1, 1, 1, 0]], [[i != turn and i < 4 for i in range(5)]]):
        loss_mask = torch.tensor(mask, dtype=torch.bool)
        batch = make_scored(["q"], [float(earned[0, :4].sum())], loss_mask, **quantities)
        found.append(ADVANTAGE_ESTIMATORS.get(name)(batch, cfg).advantages[0])
    others = [i for i in range(4) if i != turn]
    assert found[1][others].tolist() == found[0][others].tolist()
    assert not found[1][[turn, 4]].any()
