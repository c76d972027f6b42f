"""Estimate advantages of the turns of conversations, from the rewards that come after each turn."""

from megarl.algos.advantages.estimator import ADVANTAGE_ESTIMATORS, Estimate
from megarl.algos.advantages.group import leave_one_out
from megarl.algos.masked import group_index, group_stats
from megarl.algos.token_rewards import place_reward, returns_to_go, token_rewards, unplaced_rewards
from megarl.algos.trees import TurnTree, later_sums, turn_tree
from megarl.config.algo import AdvantageConfig
from megarl.config.torch_later import Tensor, torch
from megarl.types import ScoredBatch


def turn_rewards(batch: ScoredBatch, tree: TurnTree) -> Tensor:
    """Return [B, K]: what each turn earned by itself, without the rest of the row's reward that no turn was given.

    >>> batch = step("a", [1.0], [[1, 0, 1]], turn_rewards=[[0.25, 0.0, 0.5]])
    >>> turn_rewards(batch, turn_tree(batch, paths=True)).tolist()
    [[0.25, 0.5]]
    """
    rest = place_reward(unplaced_rewards(batch), batch.loss_mask)
    return tree.sums(torch.where(batch.loss_mask, token_rewards(batch) - rest, 0.0))


def others_at_depth(values: Tensor, tree: TurnTree, depths: Tensor, batch: ScoredBatch) -> Tensor:
    """Return [B, K]: the mean of `values` [B, K] of turns at the same depth over the other samples of the group.

    A sample with several turns at a depth counts once, with their mean. Where no other sample reached it: 0.

    >>> batch = step("aa", [1.0, 0.0], [[1, 0, 1], [1, 0, 0]])
    >>> tree = turn_tree(batch, paths=False)
    >>> others_at_depth(tensor([[1.0, 2.0], [3.0, 0.0]]), tree, tree.depths(), batch).tolist()
    [[3.0, 0.0], [1.0, 2.0]]
    """

    def by_depth(turns: Tensor) -> Tensor:
        return torch.zeros_like(values).scatter_add(1, depths, torch.where(tree.reached, turns, 0.0))

    group, num_groups = group_index(batch.uids, values.device)

    def of_group(rows: Tensor) -> Tensor:
        return rows.new_zeros(num_groups, rows.shape[1]).index_add(0, group, rows)[group]

    counts = by_depth(torch.ones_like(values))
    means = by_depth(values) / counts.clamp(min=1)
    others = (of_group(means) - means) / (of_group((counts > 0).double()) - 1).clamp(min=1)
    return others.gather(1, depths)


@ADVANTAGE_ESTIMATORS.register("turn_returns", options=("gamma", "credit"), min_group=2)
def turn_returns(batch: ScoredBatch, cfg: AdvantageConfig) -> Estimate:
    """Compute A_k = G_k − mean of G_k over the group's other samples that reached turn k, for all tokens of turn k.

    G_k = Σ_{j≥k} γ^{j−k}·r_j, with r_j the sum of the turn's token rewards (`token_rewards`). The baseline is 0 where
    no other sample reached the turn. It does not depend on what the sample did, so the estimate of the policy gradient
    is unbiased; a baseline of the rewards of single turns, summed afterwards, is not.

    With `credit=path`, G_k = r_k + γ·Σ G_j over the turns j that follow k on its branches. The rest of the reward,
    which no turn was given, is that of the whole conversation: it is added to every G_k. The baseline is that of turns
    with as many turns before them (`others_at_depth`). It is unbiased if no branch depends on what another one says.

    >>> mask = [[1, 0, 1], [1, 0, 1]]
    >>> batch = step("aa", [1.0, 0.0], mask, turn_rewards=[[0.25, 0.0, 0.75], [0.0, 0.0, 0.0]])
    >>> turn_returns(batch, AdvantageConfig(estimator="turn_returns")).advantages.tolist()
    [[1.0, 0.0, 0.75], [-1.0, 0.0, -0.75]]
    """
    tree = turn_tree(batch, paths=cfg.credit == "path")
    if not tree.reached.numel():
        return Estimate(advantages=torch.zeros_like(batch.loss_mask, dtype=torch.float64))
    if cfg.credit == "path":
        depths = tree.depths()
        returns = later_sums(turn_rewards(batch, tree), tree.after, cfg.gamma) + unplaced_rewards(batch)[:, None]
    else:
        depths = torch.arange(tree.reached.shape[1], device=tree.reached.device).expand(tree.reached.shape)
        returns = returns_to_go(tree.sums(torch.where(batch.loss_mask, token_rewards(batch), 0.0)), cfg.gamma)
    returns = torch.where(tree.reached, returns, 0.0)
    return Estimate(advantages=tree.on_tokens(returns - others_at_depth(returns, tree, depths, batch)))


@ADVANTAGE_ESTIMATORS.register("tree_returns", options=("gamma",))
def tree_returns(batch: ScoredBatch, cfg: AdvantageConfig) -> Estimate:
    """Compute A_k = G_k − mean of G over the other tries of turn k, those written beside it from the same context.

    G_k = r_k + γ·Σ G_j over the turns j that follow k on its branches. A turn that was written once is compared as by
    `turn_returns` with `credit=path`. The rest of the reward, which no turn was given, is compared with that of the
    group's other samples, and added. Tries are drawn independently, so the estimate is unbiased if no branch depends on
    what another one says. The mean over all n tries, the own one included, would scale A_k by (n − 1)/n.

    >>> batch = step("a", [3.0], turn_rewards=[[0.0, 2.0, 1.0]], turn=[[0, 1, 2]], after_turn=[[-1, 0, 0]],
    ...     first_try=[[0, 1, 1]])
    >>> tree_returns(batch, AdvantageConfig()).advantages.tolist()
    [[3.0, 1.0, -1.0]]
    """
    tree = turn_tree(batch, paths=True)
    if not tree.reached.numel():
        return Estimate(advantages=torch.zeros_like(batch.loss_mask, dtype=torch.float64))
    returns = torch.where(tree.reached, later_sums(turn_rewards(batch, tree), tree.after, cfg.gamma), 0.0)
    zeros = torch.zeros_like(returns)
    num_tries = zeros.scatter_add(1, tree.first_try, tree.reached.double()).gather(1, tree.first_try)
    other_tries = zeros.scatter_add(1, tree.first_try, returns).gather(1, tree.first_try) - returns
    baseline = torch.where(
        num_tries > 1,
        other_tries / (num_tries - 1).clamp(min=1),
        others_at_depth(returns, tree, tree.depths(), batch),
    )
    rest = unplaced_rewards(batch)
    compared = leave_one_out(rest, group_stats(rest, batch.uids))
    return Estimate(advantages=tree.on_tokens(returns - baseline + compared[:, None]))
