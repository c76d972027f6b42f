"""Follow the turns of conversations that branch: which tokens and turns come after which, and sums over these.

Numbers of turns come with the rows of a batch in which some conversation branches; else a turn is a run of loss tokens,
and follows the one before it.
"""

from dataclasses import dataclass

from megarl.config.torch_later import Tensor, torch
from megarl.types import ScoredBatch
from megarl.types.turns import AFTER, FIRST_TRY, TURN


def turn_numbers(loss_mask: Tensor) -> Tensor:
    """Return the number of each loss token's turn, [B, T] from 0, and −1 elsewhere; a turn is a run of loss tokens.

    >>> turn_numbers(torch.tensor([[True, True, False, True, False]])).tolist()
    [[0, 0, -1, 1, -1]]
    """
    before = torch.nn.functional.pad(loss_mask, (1, 0))[:, :-1]
    return torch.where(loss_mask, (loss_mask & ~before).cumsum(-1) - 1, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTree:
    """The turns of rows, K of them in the row with the most.

    of_token: [B, T], the number of each loss token's turn, −1 elsewhere. reached: [B, K] bool, the turns that there
    are. after: [B, K], the turn that each follows, −1: none. first_try: [B, K], the first of those written beside it.
    """

    of_token: Tensor
    reached: Tensor
    after: Tensor
    first_try: Tensor

    def sums(self, tokens: Tensor) -> Tensor:
        """Return [B, K]: the sum of `tokens` [B, T] over each turn's loss tokens."""
        num_rows, num_turns = self.reached.shape
        # The last column takes what is in no turn.
        index = torch.where(self.of_token < 0, num_turns, self.of_token)
        return tokens.new_zeros(num_rows, num_turns + 1).scatter_add(1, index, tokens)[:, :num_turns]

    def on_tokens(self, turns: Tensor) -> Tensor:
        """Return [B, T]: the value of each loss token's turn, given those of turns [B, K]; 0 elsewhere."""
        return torch.where(self.of_token < 0, 0.0, turns.gather(1, self.of_token.clamp(min=0)))

    def depths(self) -> Tensor:
        """Return [B, K]: how many turns are on the path before each."""
        depths = torch.full_like(self.after, -1)
        rows = torch.arange(len(depths), device=depths.device)
        for turn in range(depths.shape[1]):
            before = self.after[:, turn]
            depths[:, turn] = torch.where(before < 0, 0, depths[rows, before] + 1)
        return depths


def turn_tree(batch: ScoredBatch, *, paths: bool) -> TurnTree:
    """Return the turns of a batch. paths: let them follow each other as branches do, and not in the order of writing.

    >>> batch = step("a", [1.0], turn=[[0, 1, 2]], after_turn=[[-1, 0, 0]], first_try=[[0, 1, 1]])
    >>> turn_tree(batch, paths=True).after.tolist(), turn_tree(batch, paths=False).after.tolist()
    ([[-1, 0, 0]], [[-1, 0, 1]])
    """
    mask, has_numbers = batch.loss_mask, TURN in batch.quantities
    of_token = torch.where(mask, batch.quantities[TURN].long(), -1) if has_numbers else turn_numbers(mask)
    placed = of_token
    if has_numbers:
        # A turn without a loss token stands between others all the same. Elsewhere there may be anything, and padding
        # has 0 for all numbers.
        number, before = batch.quantities[TURN], batch.quantities[AFTER]
        placed = torch.where(mask | ((before < number) & (number < mask.shape[1])), number, -1.0).long()
    num_turns = int(placed.max().item()) + 1 if placed.numel() else 0
    own = torch.arange(num_turns, device=mask.device).expand(len(mask), num_turns)
    index = torch.where(placed < 0, num_turns, placed)

    def of_turns(tokens: Tensor, otherwise: Tensor) -> Tensor:
        wide = torch.nn.functional.pad(otherwise, (0, 1))
        return wide.scatter(1, index, tokens.long())[:, :num_turns]

    after, first_try = own - 1, own
    if paths and has_numbers:
        after, first_try = (of_turns(batch.quantities[name], own - 1 + i) for i, name in enumerate((AFTER, FIRST_TRY)))
    reached = of_turns(placed >= 0, torch.zeros_like(own)) > 0
    return TurnTree(of_token=of_token, reached=reached, after=after, first_try=first_try)


def later_sums(values: Tensor, after: Tensor, discount: float = 1.0) -> Tensor:
    """Return y_k = x_k + discount·Σ y_j over all j that follow k (after_j = k), for values x [B, N].

    Every j follows an earlier one; −1: none.

    >>> later_sums(tensor([[1.0, 10.0, 100.0]]), torch.tensor([[-1, 0, 0]]), 0.5).tolist()
    [[56.0, 10.0, 100.0]]
    """
    # Tokens that follow nothing go to the last line.
    sums = torch.nn.functional.pad(values, (0, 1)).t().contiguous()
    rows = torch.arange(len(values), device=values.device)
    for place in range(len(sums) - 2, 0, -1):
        sums[after[:, place], rows] += discount * sums[place]
    return sums[:-1].t()


def next_sums(values: Tensor, after: Tensor) -> Tensor:
    """Return [B, N]: for each k the sum of `values` over all j that follow it (after_j = k).

    >>> next_sums(tensor([[1.0, 10.0, 100.0]]), torch.tensor([[-1, 0, 0]])).tolist()
    [[110.0, 0.0, 0.0]]
    """
    width = values.shape[1]
    index = torch.where(after < 0, width, after)
    return values.new_zeros(len(values), width + 1).scatter_add(1, index, values)[:, :width]


def token_after(tree: TurnTree) -> Tensor:
    """Return [B, T]: the place of the loss token that each loss token follows on its path; −1: there is none.

    >>> batch = step("a", [1.0], turn=[[0, 0, 1, 2]], after_turn=[[-1, -1, 0, 0]], first_try=[[0, 0, 1, 1]])
    >>> token_after(turn_tree(batch, paths=True)).tolist()
    [[-1, 0, 1, 1]]
    """
    of_token, mask = tree.of_token, tree.of_token >= 0
    num_turns = tree.reached.shape[1]
    places = torch.where(mask, torch.arange(mask.shape[1], device=mask.device), -1)
    index = torch.where(mask, of_token, num_turns)
    ends = torch.full((len(mask), num_turns + 1), -1, device=mask.device).scatter_reduce(1, index, places, "amax")
    for turn in range(1, num_turns):
        # A turn without loss tokens hands on what it follows. The last column does not belong to a turn.
        own, before = ends[:, turn], tree.after[:, turn, None]
        ends[:, turn] = torch.where(own < 0, ends.gather(1, before.where(before >= 0, num_turns))[:, 0], own)
    before = torch.nn.functional.pad(places, (1, 0), value=-1)[:, :-1].cummax(-1).values if places.numel() else places
    is_within = (before >= 0) & (of_token.gather(1, before.clamp(min=0)) == of_token)
    # The last column of `ends`, which −1 chooses, is not a turn's.
    parents = torch.nn.functional.pad(tree.after, (0, 1), value=-1).gather(1, index)
    of_parents = torch.where(parents < 0, -1, ends.gather(1, parents.clamp(min=0)))
    return torch.where(mask, torch.where(is_within, before, of_parents), -1)
