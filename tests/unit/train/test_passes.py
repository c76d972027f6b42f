"""What the driver asks the ranks for: micro-batch plans, rows with what the objective reads, mini-batches of groups."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from megarl.algos.batch_statistics import step_scale
from megarl.algos.objectives import SftAlgorithm, ValueLoss
from megarl.algos.preference import preference_objective
from megarl.cluster.workers import RoleWorkers
from megarl.config.algo import AlgoConfig
from megarl.config.schema import ActorConfig, LayoutConfig, ModelConfig, OptimizerConfig, TrainPreferenceConfig
from megarl.errors import ConfigError
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
    Teaching,
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


def test_a_forward_pass_takes_rows_without_quantities() -> None:
    workers = FakeWorkers()
    rows = [make_row("a", 7, advantages=1.0), make_row("b", 9, advantages=2.0)]
    got = RolePasses(workers, role_of(), temperature=0.5, common=11).forward(rows, step=3)
    assert [values.tolist() for values in got["logprobs"]] == [[7.0] * 3, [9.0] * 3]
    ((sent, _, request),) = workers.forwarded
    assert request == ForwardRequest(role=Role.ACTOR, temperature=0.5, step=3, paired=False, common=11)
    assert [row.quantities for row in sent] == [{}, {}]
    assert [row.label for row in sent] == ["a/0", "b/0"]
    assert set(rows[0].quantities) == {"advantages"}


def test_rows_are_spread_over_ranks_and_micro_batches() -> None:
    workers = FakeWorkers()
    rows = [make_row("a", 0, 8), make_row("b", 0, 5), make_row("c", 0, 3)]
    RolePasses(workers, role_of(LayoutConfig(dp=2))).forward(rows, step=0)
    # 8 | 5 + 3 tokens: each fills its rank's one micro-batch of 8.
    assert list(workers.forwarded[0][1].ranks) in ([[[0]], [[1, 2]]], [[[1, 2]], [[0]]])
    # Two stages of two chunks each take micro-batches in pairs.
    RolePasses(workers, role_of(LayoutConfig(pp=2, virtual_pp=2))).forward(rows[:1], step=0)
    assert workers.forwarded[1][1].ranks == [[[0], []]]


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


def test_a_row_whose_paths_share_nothing_and_fill_more_than_a_micro_batch_has_one_of_its_own() -> None:
    """It has 32 tokens, and paths of 16, 16 and 16; without forks so many tokens would be refused."""
    row = make_row("a", 1, 32)
    mask = np.ones(row.num_response_tokens, dtype=np.bool_)
    forked = replace(row, loss_mask=mask, forks=(Fork(16, 7), Fork(24, 7)))
    workers, settings = FakeWorkers(), role_of(micro_batch_tokens=40)
    alone = replace(settings, settings=replace(settings.settings, share_prefixes=False))
    rows = [make_row("b", 2, 20), forked, make_row("b", 3, 20)]
    updater_of(workers, alone).update(rows, AlgoState(), step=1)
    assert workers.updated[0][1].ranks in ([[[1], [0, 2]]], [[[0, 2], [1]]])
    with pytest.raises(ConfigError, match="row 0 has 48 tokens, actor"):
        updater_of(workers, alone).update([make_row("a", 1, 48)], AlgoState(), step=1)


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


def test_the_learning_rate_follows_the_optimizer_steps() -> None:
    workers = FakeWorkers()
    role = role_of(lr=1.0, warmup_steps=2)
    updater = updater_of(workers, role)
    for step in (1, 1, 2):
        updater.update([make_row("a", 1)], AlgoState(), step=step)
    assert [request.lr for *_, request in workers.updated] == [0.5, 1.0, 1.0]
    # A resumed run sets how many there were.
    resumed = updater_of(workers, role)
    resumed.num_optimizer_steps = 1
    resumed.update([make_row("a", 1)], AlgoState(), step=2)
    assert workers.updated[-1][2].lr == 1.0


def test_the_learning_rate_is_scaled_by_what_the_rows_of_the_step_say() -> None:
    """Rows whose weights are 1, and 1 beside one of about 0: shares of 1 and a half, and their roots."""
    workers, scale = FakeWorkers(), partial(step_scale, cfg=AlgoConfig(step_scale_power=0.5))
    updater = RoleUpdater(workers, role_of(lr=1.0), SftAlgorithm(), total_steps=3, step_scale=scale)
    for weights in ((0.0, 0.0), (0.0, -20.0)):
        rows = [make_row(uid, 1, log_weight=weight) for uid, weight in zip("ab", weights, strict=True)]
        updater.update(rows, AlgoState(), step=1)
    assert [request.lr for *_, request in workers.updated] == pytest.approx([1.0, math.sqrt(0.5)])
    # Ranks do not get the weights.
    assert all(not row.quantities for rows, *_ in workers.updated for row in rows)


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


def test_before_is_that_of_rows_which_no_step_precedes() -> None:
    """The second mini-batch, of row 2, saw one step; no row's is that of the second epoch."""
    got = updater_of(FakeWorkers()).update_on_batch(ROWS, AlgoState(), step=1, mini_batch_prompts=2, num_epochs=2)
    assert {i: v.tolist() for i, v in got.before.items()} == {0: [0.0] * 3, 1: [1.0] * 3, 3: [3.0] * 3, 4: [4.0] * 3}


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


def test_divergences_from_a_teacher_come_back_although_log_probs_are_known() -> None:
    """Those of the first mini-batch, by the places of its rows in the batch."""
    known = [row.with_quantities(old_logprobs=np.zeros(row.num_response_tokens, np.float32)) for row in ROWS]
    teaching = Teaching(role=Role.TEACHER, divergence="reverse", beta=0.5)
    updater = RoleUpdater(FakeWorkers(), role_of(), SftAlgorithm(), total_steps=4, teaching=teaching)
    got = updater.update_on_batch(known, AlgoState(), step=1, mini_batch_prompts=2, num_epochs=1)
    assert got.before == {}
    assert {i: v.tolist() for i, v in got.divergences.items()} == {
        0: [0.0] * 3,
        1: [-1.0] * 3,
        3: [-3.0] * 3,
        4: [-4.0] * 3,
    }


@pytest.mark.parametrize(("mini_batch_prompts", "num_steps"), [(1, 3), (2, 2), (3, 1), (8, 1)])
def test_a_batch_that_a_filter_made_smaller_takes_fewer_steps(mini_batch_prompts: int, num_steps: int) -> None:
    workers = FakeWorkers()
    updater = updater_of(workers)
    updater.update_on_batch(ROWS, AlgoState(), step=1, mini_batch_prompts=mini_batch_prompts, num_epochs=1)
    assert len(workers.updated) == updater.num_optimizer_steps == num_steps


@pytest.mark.parametrize(("digests", "shares"), [("a  b", False), (" ab ", False), ("ab  ", False), ("aab ", True)])
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


def test_pairs_share_a_micro_batch() -> None:
    workers = FakeWorkers()
    rows = [make_row("a", 1, 4), make_row("b", 2, 3), make_row("c", 3, 3)]
    hinted = [make_row("a", 11, 8), make_row("b", 12, 5), make_row("c", 13, 3)]
    role = role_of(micro_batch_tokens=14)
    found = RolePasses(workers, role).forward_pairs(rows, hinted, step=5)
    ((sent, plan, request),) = workers.forwarded
    assert request.paired
    assert [row.token_ids[0] for row in sent] == [1, 2, 3, 11, 12, 13]
    # Pairs have 12, 8 and 6 tokens, of which 14 fit: the last two together, the first alone.
    assert plan.ranks == [[[1, 2, 4, 5], [0, 3]]]
    # The divergences are those of the first halves.
    assert [values.tolist() for values in found["kl"]] == [[1.0] * 3, [2.0] * 2, [3.0] * 2]
    assert [values[0] for values in found["logprobs"]] == [1, 2, 3, 11, 12, 13]
