"""What the driver asks the ranks for: micro-batch plans, rows with what the objective reads, mini-batches of groups."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pytest

from megarl.algos.objectives import SftAlgorithm, ValueLoss
from megarl.algos.preference import preference_objective
from megarl.cluster.workers import RoleWorkers
from megarl.config.schema import ActorConfig, LayoutConfig, ModelConfig, OptimizerConfig, TrainPreferenceConfig
from megarl.train import passes
from megarl.train.passes import CountedObjective, RolePasses, RoleUpdater
from megarl.types import AlgoState, FloatArray, Row, RowImage
from megarl.types.forks import Fork
from megarl.types.messages import (
    AccumulateRequest,
    ForwardRequest,
    MicroBatchPlan,
    Role,
    RoleSpec,
    UpdateRequest,
    UpdateResult,
    Vision,
)
from megarl.weights.dims import Dims, Experts
from megarl.weights.towers import Tower, TowerWork


@dataclass(slots=True)
class FakeWorkers(RoleWorkers):
    """Ranks that say of a row its first token and of an update how many came before, and keep what they were asked."""

    forwarded: list[tuple[Sequence[Row], MicroBatchPlan, ForwardRequest]] = field(default_factory=list)
    updated: list[tuple[Sequence[Row], MicroBatchPlan, UpdateRequest]] = field(default_factory=list)
    accumulated: list[MicroBatchPlan] = field(default_factory=list)

    def forward(
        self, rows: Sequence[Row], plan: MicroBatchPlan, request: ForwardRequest
    ) -> dict[str, list[FloatArray]]:
        self.forwarded.append((rows, plan, request))
        names = ["logprobs", "kl"] if request.paired else ["logprobs"]
        return {name: [said_of(row) for row in rows] for name in names}

    def update(self, rows: Sequence[Row], plan: MicroBatchPlan, request: UpdateRequest) -> UpdateResult:
        number = len(self.updated)
        self.updated.append((rows, plan, request))
        # In the order in which the ranks had them.
        order = [i for batches in plan.ranks for indices in batches for i in indices]
        return UpdateResult(
            metrics={"actor/loss": float(number), "actor/grad_norm": 1.0},
            before={i: said_of(rows[i]) + number for i in order},
            divergences={i: -said_of(rows[i]) for i in order} if request.teaching and request.with_outputs else {},
        )

    def accumulate(self, rows: Sequence[Row], plan: MicroBatchPlan, request: AccumulateRequest) -> UpdateResult:
        self.accumulated.append(plan)
        return UpdateResult(metrics={}, before={})


def said_of(row: Row) -> FloatArray:
    return np.full(row.num_response_tokens, row.token_ids[0], dtype=np.float32)


def make_row(uid: str, first_token: int, num_tokens: int = 4, **quantities: float) -> Row:
    return Row(
        uid=uid,
        sample_index=0,
        token_ids=np.array([first_token, *range(num_tokens - 1)]),
        num_prompt_tokens=1,
        loss_mask=np.ones(num_tokens - 1, dtype=np.bool_),
        quantities={name: np.full(num_tokens - 1, value, np.float32) for name, value in quantities.items()},
    )


def role_of(layout: LayoutConfig | None = None, micro_batch_tokens: int = 8, **optimizer: float) -> RoleSpec:
    settings = ActorConfig(
        layout=layout or LayoutConfig(),
        micro_batch_tokens=micro_batch_tokens,
        optimizer=OptimizerConfig(**optimizer),  # type: ignore[arg-type]
    )
    return RoleSpec(role=Role.ACTOR, model=ModelConfig(), settings=settings)


def updater_of(
    workers: FakeWorkers, role: RoleSpec | None = None, objective: CountedObjective | None = None, total_steps: int = 4
) -> RoleUpdater:
    return RoleUpdater(
        workers, role or role_of(), objective or SftAlgorithm(), total_steps=total_steps, temperature=0.5
    )


# --- forward passes


def test_rows_of_one_prompt_stay_together() -> None:
    """Samples of two prompts, by turns: by their lengths alone, each rank would get one of each prompt."""
    workers = FakeWorkers()
    rows = [
        replace(make_row(uid, first, 24), num_prompt_tokens=20, loss_mask=np.ones(4, dtype=np.bool_))
        for uid, first in [("a", 7), ("b", 9), ("a", 7), ("b", 9)]
    ]
    dims = Dims(num_layers=1, hidden=64, ffn=128, num_heads=4, num_kv_heads=4, head_dim=16, vocab=32, tied=False)
    role = role_of(LayoutConfig(dp=2), micro_batch_tokens=96)
    RolePasses(workers, role, dims=dims).forward(rows, step=0)
    assert workers.forwarded[0][1].ranks == [[[0, 2]], [[1, 3]]]
    # Pairs go by the first half's prompts.
    RolePasses(workers, role, dims=dims).forward_pairs(rows, [make_row("h", i, 24) for i in range(4)], step=0)
    assert workers.forwarded[1][1].ranks == [[[0, 2, 4, 6]], [[1, 3, 5, 7]]]
    # Ranks of context parallelism have chunks of each row, and share no prompts.
    RolePasses(workers, role_of(LayoutConfig(dp=2, cp=2), 96), dims=dims).forward(rows, step=0)
    assert [batches[0] for batches in workers.forwarded[2][1].ranks] in ([[0, 3], [1, 2]], [[1, 2], [0, 3]])


def test_a_conversation_that_forks_is_cut_by_its_unique_tokens() -> None:
    """Turns of a conversation whose history was rewritten; 24 + 8 + 8 of 64 tokens are computed, in one micro-batch."""
    dims = Dims(num_layers=1, hidden=64, ffn=128, num_heads=4, num_kv_heads=4, head_dim=16, vocab=32, tied=False)
    rows = [make_row("a", 1, 24), make_row("a", 1, 24), make_row("a", 1, 16)]
    rows[1] = replace(rows[1], token_ids=np.append(rows[0].token_ids[:16], np.full(8, 31)))
    rows[2] = replace(rows[2], token_ids=np.append(rows[0].token_ids[:8], np.full(8, 31)))
    workers = FakeWorkers()
    updater = RoleUpdater(workers, role_of(micro_batch_tokens=40), SftAlgorithm(), total_steps=1, dims=dims)
    result = updater.update(rows, AlgoState(), step=1)
    assert workers.updated[0][1].ranks == [[[0, 1, 2]]]
    assert result.metrics["perf/shared_tokens_frac"] == pytest.approx(1 - 40 / 64)
    # Without sharing, no two of the longer rows fit.
    alone = role_of(micro_batch_tokens=40)
    alone = replace(alone, settings=replace(alone.settings, share_prefixes=False))
    result = RoleUpdater(workers, alone, SftAlgorithm(), total_steps=1, dims=dims).update(rows, AlgoState(), step=1)
    assert [len(members) for members in workers.updated[1][1].ranks[0]] in ([1, 2], [2, 1])
    assert result.metrics["perf/shared_tokens_frac"] == 0


def test_branches_of_a_row_share_what_lies_before_them() -> None:
    """Tokens 0 to 23, and a branch of 8 after token 15: paths of 24 and 24 tokens, of which 32 are computed."""
    dims = Dims(num_layers=1, hidden=64, ffn=128, num_heads=4, num_kv_heads=4, head_dim=16, vocab=32, tied=False)
    row = make_row("a", 1, 32)
    forked = replace(row, loss_mask=np.ones(row.num_response_tokens, dtype=np.bool_), forks=(Fork(24, 15),))
    workers, settings = FakeWorkers(), role_of(micro_batch_tokens=64)
    updater = RoleUpdater(workers, settings, SftAlgorithm(), total_steps=1, dims=dims)
    assert updater.update([forked], AlgoState(), step=1).metrics["perf/shared_tokens_frac"] == pytest.approx(
        1 - 32 / 48
    )
    alone = replace(settings, settings=replace(settings.settings, share_prefixes=False))
    updater = RoleUpdater(workers, alone, SftAlgorithm(), total_steps=1, dims=dims)
    assert updater.update([forked], AlgoState(), step=1).metrics["perf/shared_tokens_frac"] == 0


# --- updates


def test_an_objective_over_pairs_has_both_rows_of_one_in_a_micro_batch() -> None:
    """The lengths of the test above; whoever accumulates may give a denominator of their own."""
    workers, objective = FakeWorkers(), preference_objective(TrainPreferenceConfig(objective="orpo"))
    rows = [make_row("a", 1, num_tokens) for num_tokens in (4, 3, 3, 8, 5, 3)]
    updater = updater_of(workers, role_of(micro_batch_tokens=14), objective)
    updater.update(rows, AlgoState(), step=5)
    updater.accumulate(rows, AlgoState(), objective, step=5, denominators={"pairs": 9.0})
    updater.accumulate(rows, AlgoState(), SftAlgorithm(), step=5)
    plans = [workers.updated[0][1].ranks, *(plan.ranks for plan in workers.accumulated)]
    assert plans[:2] == [[[[1, 2, 4, 5], [0, 3]]]] * 2
    assert plans[2] != plans[0]


def test_an_update_sends_what_the_objective_reads() -> None:
    workers = FakeWorkers()
    rows = [make_row("a", 7, returns=1.0, values=2.0, advantages=3.0, rollout_logprobs=4.0), make_row("b", 9, 3)]
    result = updater_of(workers, objective=ValueLoss()).update(rows, AlgoState(kl_coef=0.3), step=6)
    (sent, _, request) = workers.updated[0]
    assert [set(row.quantities) for row in sent] == [{"returns", "values"}, set()]
    assert (request.step, request.temperature, request.state) == (6, 0.5, AlgoState(kl_coef=0.3))
    # 3 and 2 response tokens.
    assert request.denominators == {"tokens": 5}
    assert [values.tolist() for values in result.before.values()] == [[7.0] * 3, [9.0] * 2]
    assert list(result.before) == [0, 1]


# --- all steps of a batch


# Groups need not lie together: by uid, 0 and 3 | 1 and 4 | 2.
ROWS = [make_row(uid, first) for first, uid in enumerate("abcab")]


def test_mini_batches_are_groups_in_order_of_appearance() -> None:
    workers = FakeWorkers()
    got = updater_of(workers).update_on_batch(ROWS, AlgoState(), step=1, mini_batch_prompts=2, num_epochs=2)
    firsts = [[int(row.token_ids[0]) for row in rows] for rows, *_ in workers.updated]
    assert firsts == [[0, 1, 3, 4], [2], [0, 1, 3, 4], [2]]
    assert [request.denominators["tokens"] for *_, request in workers.updated] == [12, 3, 12, 3]
    # Losses 0, 1, 2, 3.
    assert got.metrics.items() >= {"actor/loss": 1.5, "actor/grad_norm": 1.0}.items()
    # Mini-batches of four rows and of one row, of four tokens each, on a single rank.
    assert (got.metrics["global_seqlen/mean"], got.metrics["global_seqlen/tokens_imbalance"]) == (10.0, 1.0)


def test_no_step_sends_outputs_back_that_are_known_or_that_nobody_reads() -> None:
    """Old log-probs stand for those from before the first step; the policy of later steps has moved."""
    workers = FakeWorkers()
    updater_of(workers).update_on_batch(ROWS, AlgoState(), step=1, mini_batch_prompts=2, num_epochs=1)
    assert [request.with_outputs for *_, request in workers.updated] == [True, False]
    workers = FakeWorkers()
    known = [row.with_quantities(old_logprobs=np.zeros(row.num_response_tokens, np.float32)) for row in ROWS]
    got = updater_of(workers).update_on_batch(known, AlgoState(), step=1, mini_batch_prompts=2, num_epochs=1)
    assert [request.with_outputs for *_, request in workers.updated] == [False, False]
    assert got.before == {}


@pytest.mark.parametrize(("digests", "shares"), [("a  b", False), ("aab ", True)])
def test_ranks_share_the_work_of_towers(monkeypatch: pytest.MonkeyPatch, digests: str, shares: bool) -> None:
    """Rows of equal length, some of which show an image that costs more than all else; the same one counts once."""
    work = TowerWork(
        patches=4, per_patch=10**6, per_feature=0, kept_per_patch=0, kept_per_feature=0, windows=(), width=1, features=1
    )
    read = {"none": Tower(part="none", work=work, rules=(), trained=(), names={}, mrope=None)}
    monkeypatch.setattr(passes, "read_model_spec", lambda path, tower: SimpleNamespace(tower=read[tower]))
    dims = Dims(num_layers=1, hidden=2, ffn=2, num_heads=1, num_kv_heads=1, head_dim=2, vocab=10, tied=True)
    settings = replace(role_of(LayoutConfig(dp=2), 64).settings, share_prefixes=shares)
    rows = [make_row(str(i), i) for i in range(4)]
    shown = [RowImage(places=np.array([1]), digest=digest) for digest in digests]
    rows = [
        replace(row, images=() if image.digest == " " else (image,)) for row, image in zip(rows, shown, strict=True)
    ]
    workers = FakeWorkers()
    role = replace(role_of(), settings=settings, vision=Vision(store="images"))
    RolePasses(workers, role, dims=dims).forward(rows, step=0)
    ((_, plan, _),) = workers.forwarded
    assert [len({digests[i] for bins in rank for i in bins} - {" "}) for rank in plan.ranks] == [1, 1]


def test_experts_count_a_token_in_the_first_row_that_has_it() -> None:
    """Whether rows share prefixes or not, as under context parallelism."""
    experts = Experts(num=4, per_token=2, ffn=8, normalized=True, layers=(0,))
    dims = Dims(num_layers=1, hidden=64, ffn=8, num_heads=4, num_kv_heads=4, head_dim=16, vocab=32, tied=False)
    rows = [make_row("a", 1, 6), make_row("b", 2, 5), make_row("a", 1, 8)]
    for layout in (LayoutConfig(), LayoutConfig(cp=2)):
        workers = FakeWorkers()
        role = role_of(layout, micro_batch_tokens=64)
        sparse = replace(dims, experts=experts)
        RoleUpdater(workers, role, SftAlgorithm(), total_steps=1, dims=sparse).update(rows, AlgoState(), step=1)
        assert [row.num_uncounted for row in workers.updated[0][0]] == [0, 0, 6]
