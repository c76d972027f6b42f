"""Random trees of conversations as rows, and how far an update on them is from transformers on each row by itself."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.algos.objectives import SftAlgorithm
from megarl.algos.preference import preference_objective
from megarl.config.schema import ActorConfig, ModelConfig, TrainPreferenceConfig
from megarl.types import AlgoState, FloatArray, IdArray, Row
from megarl.types.forks import path_to
from megarl.types.messages import ForwardRequest, Head, LoadRequest, Role, RoleSpec, UpdateRequest
from tests.helpers.hf_models import VOCAB_SIZE
from tests.helpers.rank_pool import RankContext


@dataclass(slots=True)
class Node:
    """Tokens of one author, the policy or another, after those of its parent."""

    parent: "Node | None"
    tokens: IdArray
    by_policy: bool
    children: list["Node"] = field(default_factory=list)

    @property
    def path(self) -> list["Node"]:
        return [*([] if self.parent is None else self.parent.path), self]


def random_tree(seed: int, *, max_depth: int = 6, max_leaves: int = 64, max_tokens: int = 18) -> list[Row]:
    """Rows of a random tree: a path to each leaf, and to some nodes between; each policy token is trained in one.

    Nodes have up to `max_tokens` tokens, of few kinds, so that branches begin alike by chance too.
    """
    rng = np.random.default_rng(seed)

    def grow(parent: Node | None) -> Node:
        tokens = rng.integers(0, VOCAB_SIZE, rng.integers(1, max_tokens + 1)).astype(np.int32)
        if rng.random() < 0.3:
            tokens %= 4
        node = Node(parent, tokens, by_policy=parent is not None and bool(rng.random() < 0.6))
        if parent is not None:
            parent.children.append(node)
        return node

    nodes, leaves = [grow(None)], int(np.exp(rng.uniform(0, np.log(max_leaves + 0.99))))
    while sum(not node.children for node in nodes) < leaves:
        open_nodes = [node for node in nodes if len(node.path) < max_depth]
        if not open_nodes:
            break
        nodes.append(grow(open_nodes[rng.integers(len(open_nodes))]))
    if len(nodes) == 1:
        nodes.append(grow(nodes[0]))
    nodes[-1].by_policy = True
    ends = [node for node in nodes[1:] if not node.children or rng.random() < 0.2]
    trained: dict[int, list[Node]] = {id(end): [] for end in ends}
    for node in nodes:
        if node.by_policy:
            below = [end for end in ends if any(each is node for each in end.path)]
            trained[id(below[rng.integers(len(below))])].append(node)
    rows = []
    for i in rng.permutation(len(ends)):
        path, own = ends[i].path, trained[id(ends[i])]
        masks = [np.full(len(node.tokens), any(each is node for each in own)) for node in path]
        rows.append(
            Row(
                uid=f"t{seed}",
                sample_index=int(i),
                token_ids=np.concatenate([node.tokens for node in path]),
                num_prompt_tokens=len(path[0].tokens),
                loss_mask=np.concatenate(masks[1:]),
            )
        )
    assert sum(row.num_loss_tokens for row in rows) == sum(len(node.tokens) for node in nodes if node.by_policy)
    return rows


def process_plans_of(rows: Sequence[Row], dp: int) -> list[list[list[int]]]:
    """Two micro-batches for each data-parallel rank, of rows by turns, so that most branches meet others."""
    return [[list(range(2 * rank + half, len(rows), 2 * dp)) for half in range(2)] for rank in range(dp)]


def forest_errors(
    context: RankContext, model: ModelConfig, actor: ActorConfig, trees: Sequence[Sequence[Row]], *, whole: bool
) -> list[tuple[float, float]]:
    """For each tree, the relative errors of the loss and of this rank's gradients, of the tensor that errs most.

    Gradients that nearly vanish, as those of queries that see one key, err by a part of the whole gradient's norm. The
    reference runs transformers on row after row. whole: a tree is one micro-batch.
    """
    from tests.helpers.family_parity import load_transformers
    from tests.helpers.ranks import join_layout

    worker = join_layout(context, actor.layout)
    worker.load(LoadRequest(roles=(RoleSpec(role=Role.ACTOR, model=model, settings=actor),), seed=0))
    loaded, hf, algorithm = worker.roles[Role.ACTOR], load_transformers(Path(model.path)), SftAlgorithm()
    errors = []
    for tree in trees:
        request = UpdateRequest(
            step=0,
            objective=algorithm,
            state=algorithm.initial_state(),
            denominators=algorithm.denominators(tree),
            temperature=1.0,
            lr=0.0,
        )
        plan = [[list(range(len(tree)))]] if whole else process_plans_of(tree, actor.layout.dp)
        result = worker.update(tree, plan[worker.layout.dp_group.rank()], request)
        loss, expected = _reference(hf, tree)
        error = _gradient_error(loaded, worker.layout, expected)
        errors.append((0.0 if result is None else abs(result.metrics["actor/loss"] / loss - 1), error))
    return errors


def _gradient_error(loaded: Any, layout: Any, expected: Mapping[str, torch.Tensor]) -> float:
    from megarl.parallel.building import named_shards, rank_slices

    named = itertools.chain.from_iterable(named_shards(chunk) for chunk in loaded.chunks)
    shards: list[tuple[str, Any]] = [(name, shard) for name, _, shard in named if shard.requires_grad]
    whole_norm = math.sqrt(sum(float(wanted.square().sum()) for wanted in expected.values()))
    return max(
        float((each.view.reshape(wanted.shape) - wanted).norm()) / max(float(wanted.norm()), 0.1 * whole_norm)
        for each in rank_slices([(name, shard.main_grad) for name, shard in shards], loaded.model_spec, layout)
        for wanted in [expected[each.tensor][each.index]]
    )


def pairs_and_hints_apart(
    context: RankContext,
    model: ModelConfig,
    actor: ActorConfig,
    rows: Sequence[Row],
    hinted: Sequence[Row],
    beta: float,
) -> tuple[float, float, float, float]:
    """Errors of DPO's loss and gradients on pairs of rows that fork, the first half chosen, and of their log-probs and
    of the KLs to the same tokens behind hints; the reference runs transformers on the path to each trained token.
    """
    from tests.helpers.family_parity import load_transformers
    from tests.helpers.ranks import join_layout

    worker = join_layout(context, actor.layout)
    worker.load(LoadRequest(roles=(RoleSpec(role=Role.ACTOR, model=model, settings=actor),), seed=0))
    hf, count = load_transformers(Path(model.path)), len(rows)
    every = [_on_paths(hf, row) for row in rows]
    with torch.no_grad():
        behind = [_on_paths(hf, row) for row in hinted]
    request = ForwardRequest(role=Role.ACTOR, temperature=1.0, step=0, paired=True)
    outputs = worker.forward([*rows, *hinted], [list(range(2 * count))], request)
    logprob_error, kl_error = 0.0, 0.0
    if outputs is not None:
        for i, row in enumerate(rows):
            kl = (behind[i].exp() * (behind[i] - every[i])).sum(-1).detach().numpy()
            wanted = _labels(row, every[i]).detach().numpy()
            got = {name: outputs.quantities[name][i][row.loss_mask] for name in ("logprobs", "kl")}
            logprob_error = max(logprob_error, float(np.abs(got["logprobs"] - wanted).max()))
            kl_error = max(kl_error, float(np.abs(got["kl"] - kl).max()))
    objective = preference_objective(TrainPreferenceConfig(objective="dpo", beta=beta))
    denominators = objective.denominators(rows)
    update = UpdateRequest(
        step=0, objective=objective, state=AlgoState(), denominators=denominators, temperature=1.0, lr=0.0
    )
    result = worker.update(rows, [list(range(count))], update)
    gains = [
        (_labels(row, each) - torch.from_numpy(row.quantities["ref_logprobs"][row.loss_mask])).sum()
        for row, each in zip(rows, every, strict=True)
    ]
    margins = torch.stack(gains[: count // 2]) - torch.stack(gains[count // 2 :])
    loss = torch.log1p(torch.exp(-beta * margins)).mean()
    hf.zero_grad()
    loss.backward()
    expected = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in hf.named_parameters()}
    gradient_error = _gradient_error(worker.roles[Role.ACTOR], worker.layout, expected)
    loss_error = 0.0 if result is None else abs(result.metrics["actor/loss"] / loss.item() - 1)
    return loss_error, gradient_error, logprob_error, kl_error


def _on_paths(hf: torch.nn.Module, row: Row) -> torch.Tensor:
    """Log-probs of the whole vocabulary for each trained token, [n, V], each by the path to it alone."""
    tokens = torch.from_numpy(row.token_ids).long()
    labels = (np.flatnonzero(row.loss_mask) + row.num_prompt_tokens).tolist()
    paths = [tokens[torch.from_numpy(path_to(label + 1, row.forks))[:-1]] for label in labels]
    return torch.stack([hf(path[None]).logits[0, -1].log_softmax(-1) for path in paths])


def _labels(row: Row, logprobs: torch.Tensor) -> torch.Tensor:
    labels = torch.from_numpy(row.token_ids[row.num_prompt_tokens :][row.loss_mask]).long()
    return logprobs.gather(1, labels[:, None])[:, 0]


def _reference(hf: torch.nn.Module, rows: Sequence[Row]) -> tuple[float, dict[str, torch.Tensor]]:
    """The mean negative log-likelihood of the trained tokens, and its gradients by name."""
    hf.zero_grad()
    total, count = 0.0, sum(row.num_loss_tokens for row in rows)
    for row in rows:
        if not row.num_loss_tokens:
            continue
        tokens = torch.from_numpy(row.token_ids).long()
        log_p = hf(tokens[None]).logits[0].log_softmax(-1)[row.num_prompt_tokens - 1 : -1]
        picked = log_p.gather(1, tokens[row.num_prompt_tokens :, None])[:, 0]
        loss = -picked[torch.from_numpy(row.loss_mask)].sum() / count
        loss.backward()
        total += loss.item()
    return total, {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in hf.named_parameters()}


def outputs_apart(
    context: RankContext, model: ModelConfig, actor: ActorConfig, rows: Sequence[Row], hinted: Sequence[Row]
) -> list[dict[str, dict[int, FloatArray]]]:
    """A critic's values, and log-probs, entropies and KLs of rows beside hinted ones; each of one pack, then by row."""
    from tests.helpers.ranks import join_layout

    worker = join_layout(context, actor.layout)
    critic = RoleSpec(role=Role.CRITIC, model=model, settings=actor, head=Head.SCALAR)
    worker.load(LoadRequest(roles=(RoleSpec(role=Role.ACTOR, model=model, settings=actor), critic), seed=0))
    with torch.no_grad():
        for chunk in worker.roles[Role.CRITIC].chunks:
            torch.nn.init.constant_(chunk.value_head.weight, 0.3)
    count, outputs = len(rows), []
    for role, every, paired in ((Role.CRITIC, rows, False), (Role.ACTOR, [*rows, *hinted], True)):
        apart = [[i, count + i] if paired else [i] for i in range(count)]
        for batches in ([list(range(len(every)))], apart):
            result = worker.forward(every, batches, ForwardRequest(role=role, temperature=1.0, step=0, paired=paired))
            outputs.append({} if result is None else {name: dict(of) for name, of in result.quantities.items()})
    return outputs
