"""Reference, critic and reward model on the base of an actor with adapters compute as with weights of their own."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.algos.objectives import ValueLoss
from megarl.config.lora import LoraConfig
from megarl.config.schema import ActorConfig, ModelConfig, OptimizerConfig
from megarl.types import AlgoState, Row
from megarl.types.messages import Head, Role, RoleSpec, UpdateRequest
from tests.distributed.test_adapters import ALPHA, LAYOUTS, LORA, RANK, place_of, rows_of, write_adapters
from tests.helpers.family_parity import load_transformers, split_rows
from tests.helpers.hf_models import make_model
from tests.helpers.rank_pool import RankPool
from tests.helpers.requests import update_request
from tests.helpers.shared_base_ranks import SharedCase, SharedOutcome, run_shared

CASES = [
    pytest.param(name, layout, marks=() if (name, layout) == ("qwen2", "tp2-sp") else pytest.mark.long)
    for name, layout in (
        *(("qwen2", layout) for layout in ("tp1", "tp2-sp", "pp2", "vpp2", "cp2", "dp2")),
        ("qwen3_moe", "tp2-sp-ep2"),
    )
]


def with_value_head(path: Path) -> torch.Tensor:
    """Add a scalar head to a model's file: language models pass it over."""
    tensors = load_file(path / "model.safetensors")
    hidden = tensors["model.norm.weight"].shape[0]
    tensors["score.weight"] = 0.1 * torch.randn(1, hidden, generator=torch.Generator().manual_seed(3))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return tensors["score.weight"]


def with_returns(rows: Sequence[Row]) -> list[Row]:
    rng = np.random.default_rng(4)
    return [row.with_quantities(returns=rng.normal(0, 1, len(row.loss_mask)).astype(np.float32)) for row in rows]


def dense_critic(
    model: Path, adapters: dict[str, torch.Tensor], head: torch.Tensor, rows: Sequence[Row]
) -> tuple[list[np.ndarray], float]:
    """The values of merged weights in transformers in float64, and the norm of the gradients of adapters and head."""
    hf, scale, head = load_transformers(model, torch.float64), ALPHA / RANK, head.double().requires_grad_()
    hf.config._experts_implementation = "eager"
    modules = sorted({name.rsplit(".lora_", 1)[0] for name in adapters})
    pairs = {module: [adapters[f"{module}.lora_{x}.weight"].double() for x in "AB"] for module in modules}
    with torch.no_grad():
        for module, (a, b) in pairs.items():
            weight, view = place_of(hf, module)
            view(weight).add_(scale * b @ a)
    values, loss = [], torch.zeros((), dtype=torch.float64)
    for row in rows:
        hidden = hf.model(torch.from_numpy(row.token_ids)[None]).last_hidden_state[0, row.num_prompt_tokens - 1 : -1]
        mask = torch.from_numpy(row.loss_mask)
        values.append((hidden @ head[0]) * mask)
        loss = loss + (0.5 * (values[-1] - torch.from_numpy(row.quantities["returns"])).square() * mask).sum()
    (loss / sum(int(row.loss_mask.sum()) for row in rows)).backward()
    assert head.grad is not None
    squares = float(head.grad.square().sum())
    for module, (a, b) in pairs.items():
        weight, view = place_of(hf, module)
        assert weight.grad is not None
        by_weight = view(weight.grad)
        squares += float((scale * b.t() @ by_weight).square().sum() + (scale * by_weight @ a.t()).square().sum())
    return [each.detach().numpy() for each in values], math.sqrt(squares)


def merged(outcomes: Sequence[SharedOutcome], which: str, role: Role) -> dict[int, np.ndarray]:
    return {i: values for outcome in outcomes for i, values in getattr(outcome, which)[role].items()}


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_roles_on_one_base(rank_pool: Callable[[int], RankPool], tmp_path: Path, name: str, layout: str) -> None:
    model, under, rows = make_model(tmp_path / "model", name, tied=True), LAYOUTS[layout], with_returns(rows_of())
    head = with_value_head(model)
    write_adapters(tmp_path / "actor", model, seed=1)
    own = write_adapters(tmp_path / "critic", model, seed=2)
    settings = ActorConfig(
        layout=under, optimizer=OptimizerConfig(weight_decay=0.0, clip_grad_norm=1e9, distributed=False)
    )
    shared = tuple(
        RoleSpec(
            role=role,
            model=ModelConfig(path=str(model), dtype="float32", vocab_multiple=4),
            settings=replace(settings, lora=lora and LoraConfig(**LORA, path=str(tmp_path / lora))),
            head=Head.SCALAR if lora == "critic" else Head.LM,
            trainable=role in (Role.ACTOR, Role.CRITIC),
            base_of=None if role is Role.ACTOR else Role.ACTOR,
        )
        for role, lora in (
            (Role.ACTOR, "actor"),
            (Role.REFERENCE, None),
            (Role.CRITIC, "critic"),
            (Role.REWARD, "critic"),
        )
    )
    loss, actors = ValueLoss(clip=None), update_request(rows)
    critics = UpdateRequest(
        role=Role.CRITIC,
        step=0,
        objective=loss,
        state=AlgoState(),
        denominators=loss.denominators(rows),
        temperature=1.0,
        lr=1e-3,
    )
    case = SharedCase(roles=shared, rows=rows, micro_batches=split_rows(len(rows), under.dp), updates=[critics, actors])
    separate = replace(case, roles=tuple(replace(spec, base_of=None) for spec in shared))
    pool = rank_pool(under.world_size)
    together, apart = pool.run(run_shared, case), pool.run(run_shared, separate)
    for outcome, alone in zip(together, apart, strict=True):
        assert outcome.added[Role.REFERENCE] == 0
        assert outcome.added[Role.CRITIC] == outcome.trained[Role.CRITIC] == outcome.freed[Role.CRITIC]
        assert outcome.added[Role.REWARD] == outcome.added[Role.CRITIC]
        assert outcome.freed[Role.ACTOR] == outcome.added[Role.ACTOR] == alone.added[Role.ACTOR]
        # Their own base would be most of what they have.
        assert min(alone.added[Role.REFERENCE], alone.added[Role.CRITIC]) > 2 * outcome.added[Role.CRITIC]
        assert outcome.grad_norms == alone.grad_norms
    for role in (spec.role for spec in shared):
        for which in ("before", "after"):
            ours, theirs = (merged(each, which, role) for each in (together, apart))
            assert sorted(ours) == list(range(len(rows)))
            assert all(np.array_equal(ours[i], theirs[i]) for i in ours), (role, which)
        first, then = (merged(together, which, role) for which in ("before", "after"))
        moved = max(float(np.abs(first[i] - then[i]).max()) for i in first)
        assert (moved == 0) == (role in (Role.REFERENCE, Role.REWARD)), f"the {role} moved by {moved:.2e}"
    values, norm = dense_critic(model, own, head, rows)
    got = merged(together, "before", Role.CRITIC)
    assert max(float(np.abs(got[i] - expected).max()) for i, expected in enumerate(values)) <= 5e-6
    found = [outcome.grad_norms[Role.CRITIC] for outcome in together if outcome.grad_norms]
    assert found == pytest.approx([norm] * len(found), rel=1e-6)
