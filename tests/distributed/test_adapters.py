"""Adapters in every layout equal merged weights in transformers: log-probs, gradients, norm, and a step.

With W + s·B·A in place of W, the gradients are dA = s·Bᵀ·dW and dB = s·dW·Aᵀ.
"""

import functools
import itertools
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from megarl.config.lora import LoraConfig
from megarl.config.schema import ActorConfig, LayoutConfig, ModelConfig, OptimizerConfig
from megarl.types import Row
from megarl.weights.adapters import adapter_spec
from megarl.weights.dist_index import read_metadata
from megarl.weights.families import read_model_spec
from megarl.weights.safetensors_map import create_model_files, weight_specs
from tests.helpers.adapter_ranks import AdapterCase, AdapterOutcome, run_adapters
from tests.helpers.family_parity import TOLERANCE, load_transformers, make_rows, split_rows
from tests.helpers.hf_models import DENSE, WINDOWED, WITH_EXPERTS, make_model, read_tensors
from tests.helpers.rank_pool import RankPool
from tests.helpers.requests import update_request, with_advantages

RANK, ALPHA, LR, FLOAT32 = 4, 8.0, 1e-3, 5e-6
ONE_HEAD = "-one-kv-head"
LORA = {"rank": RANK, "alpha": ALPHA}
LAYOUTS = {
    "tp1": LayoutConfig(),
    "tp2": LayoutConfig(tp=2),
    "tp2-sp": LayoutConfig(tp=2, sequence_parallel=True),
    "pp2": LayoutConfig(pp=2, first_stage_layers=3),
    "vpp2": LayoutConfig(pp=2, virtual_pp=2, overlap_p2p=True, pipeline_layout="Et|tt|t|tL"),
    "cp2": LayoutConfig(cp=2),
    "dp2": LayoutConfig(dp=2),
    "ep2": LayoutConfig(dp=2, ep=2),
    "tp2-sp-ep2": LayoutConfig(tp=2, ep=2, sequence_parallel=True),
}

GetPool = Callable[[int], RankPool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """What transformers makes of merged weights in float64, and of the base."""

    model: Path
    adapters: Path
    tensors: dict[str, torch.Tensor]
    logprobs: list[torch.Tensor]
    base: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]

    @property
    def grad_norm(self) -> float:
        return math.sqrt(sum(float(g.square().sum()) for g in self.gradients.values()))


def write_adapters(path: Path, model: Path, seed: int = 1, **settings: object) -> dict[str, torch.Tensor]:
    """A directory as PEFT writes it, in which no B is 0.

    With twice these, delta nets are so sensitive that transformers in float32 errs by more than the tolerance.
    """
    spec = adapter_spec(read_model_spec(model), LoraConfig(**LORA, **settings))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed)
    tensors = {n: 0.05 * torch.randn(shape, generator=generator) for n, shape in spec.expected_tensors().items()}
    path.mkdir()
    save_file({f"base_model.model.{name}": t for name, t in tensors.items()}, path / "adapter_model.safetensors")
    written: dict[str, object] = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA}
    if spec.dims.experts is not None:
        # Experts' adapters of another rank, with the same scale.
        rank = RANK // spec.dims.experts.per_token
        pattern = r"experts\.\d+\.\w+"
        written |= {"rank_pattern": {pattern: rank}, "alpha_pattern": {pattern: ALPHA / RANK * rank}}
    (path / "adapter_config.json").write_text(json.dumps(written))
    return tensors


def rows_of() -> list[Row]:
    return with_advantages(make_rows())


def place_of(hf: PreTrainedModel, module: str) -> tuple[torch.nn.Parameter, Callable[[torch.Tensor], torch.Tensor]]:
    """The parameter that has a module's weight [out, in], and how a view of that is had from it.

    Transformers keeps all experts of a layer in one, with gates and ups one after the other or, in gpt-oss, in turns.
    """
    state = dict(hf.named_parameters())
    if f"{module}.weight" in state:
        return state[f"{module}.weight"], lambda tensor: tensor
    match = re.fullmatch(r"(model\.layers\.\d+\.).*experts\.(\d+)\.(\w+)", module)
    assert match is not None, module
    layer, expert, kind = match[1], int(match[2]), match[3]
    is_down, is_gate = kind in ("down_proj", "w2"), kind in ("gate_proj", "w1")
    ends = ("experts.down_proj", "output_linear.weight") if is_down else ("experts.gate_up_proj", "input_linear.weight")
    (parameter,) = (p for name, p in state.items() if name.startswith(layer) and name.endswith(ends))

    def view(tensor: torch.Tensor) -> torch.Tensor:
        own = tensor[expert]
        if hf.config.model_type == "gpt_oss":
            return own.T if is_down else own.T[0 if is_gate else 1 :: 2]
        half = len(own) // 2
        return own if is_down else own[:half] if is_gate else own[half:]

    return parameter, view


def merged(model: Path, adapters: Path, tensors: dict[str, torch.Tensor], rows: Sequence[Row]) -> Merged:
    hf, scale = load_transformers(model, torch.float64), ALPHA / RANK
    # Grouped products of experts have no float64.
    hf.config._experts_implementation = "eager"

    def logprobs(row: Row) -> torch.Tensor:
        tokens = torch.from_numpy(row.token_ids)
        log_p = hf(tokens[None]).logits[0, row.num_prompt_tokens - 1 : -1].log_softmax(-1)
        return log_p.gather(1, tokens[row.num_prompt_tokens :, None])[:, 0] * torch.from_numpy(row.loss_mask)

    base = [logprobs(row).detach() for row in rows]
    modules = sorted({name.rsplit(".lora_", 1)[0] for name in tensors})
    pairs = {m: [tensors[f"{m}.lora_{x}.weight"].double() for x in "AB"] for m in modules}
    with torch.no_grad():
        for module, (a, b) in pairs.items():
            weight, view = place_of(hf, module)
            view(weight).add_(scale * b @ a)
    hf.save_pretrained(adapters / "merged")
    found = [logprobs(row) for row in rows]
    # Of the policy gradient with advantages 1 before the first step, where the ratio is 1.
    (-sum(each.sum() for each in found) / sum(int(row.loss_mask.sum()) for row in rows)).backward()
    gradients = {}
    for module, (a, b) in pairs.items():
        weight, view = place_of(hf, module)
        assert weight.grad is not None
        by_weight = view(weight.grad)
        gradients[f"{module}.lora_A.weight"] = scale * b.t() @ by_weight
        gradients[f"{module}.lora_B.weight"] = scale * by_weight @ a.t()
    logged = [each.detach() for each in found]
    return Merged(
        model=model,
        adapters=adapters,
        tensors=tensors,
        logprobs=logged,
        base=base,
        gradients=gradients,
        weights=read_tensors(adapters / "merged"),
    )


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Merged]:
    @functools.cache
    def get(name: str) -> Merged:
        path, changes = tmp_path_factory.mktemp(name), {"num_key_value_heads": 1} if name.endswith(ONE_HEAD) else {}
        model = make_model(path / "model", name.removesuffix(ONE_HEAD), tied=True, **changes)
        tensors = write_adapters(path / "adapters", model)
        return merged(model, path / "adapters", tensors, rows_of())

    return get


def case_of(
    expected: Merged,
    layout: LayoutConfig,
    *,
    recompute: str = "none",
    load: str = "",
    save: str = "",
    distributed: bool = False,
    eps: float = 1e-8,
) -> AdapterCase:
    """eps: Adam's ε; one that is large against the rounding of gradients keeps this from moving weights by ±lr."""
    rows = rows_of()
    request = update_request(rows, lr=LR)
    return AdapterCase(
        model=ModelConfig(path=str(expected.model), dtype="float32", vocab_multiple=4),
        actor=ActorConfig(
            layout=layout,
            lora=LoraConfig(**LORA, path=str(expected.adapters)),  # type: ignore[arg-type]
            optimizer=OptimizerConfig(weight_decay=0.0, clip_grad_norm=1e9, distributed=distributed, eps=eps),
            recompute=recompute,  # type: ignore[arg-type]
        ),
        rows=rows,
        micro_batches=split_rows(len(rows), layout.dp),
        request=request,
        load=load,
        save=save,
    )


def assembled(
    outcomes: Sequence[AdapterOutcome], shapes: dict[str, tuple[int, ...]], what: str
) -> dict[str, torch.Tensor]:
    """Whole tensors of all ranks' slices, of which those that several ranks have must be equal."""
    full = {name: torch.full(shape, math.nan) for name, shape in shapes.items()}
    for outcome in outcomes:
        for name, index, view in getattr(outcome, what):
            place = full[name][index]
            known = ~place.isnan()
            assert torch.equal(place[known], view.reshape(place.shape)[known]), name
            place.copy_(view.reshape(place.shape))
    assert not any(t.isnan().any() for t in full.values())
    return full


def assert_equals_merged(outcomes: Sequence[AdapterOutcome], expected: Merged, *, tolerance: float = FLOAT32) -> None:
    assert torch.cat(expected.logprobs).sub(torch.cat(expected.base)).abs().max() > 0.1
    for what, wanted in (("logprobs", expected.logprobs), ("base", expected.base)):
        got = {i: values for outcome in outcomes for i, values in getattr(outcome, what).items()}
        assert sorted(got) == list(range(len(wanted)))
        error = max(float(np.abs(got[i] - wanted[i].numpy()).max()) for i in got)
        assert error <= tolerance, f"{what}: max |Δ| is {error:.2e}"
    shapes = {name: tuple(t.shape) for name, t in expected.tensors.items()}
    gradients = assembled(outcomes, shapes, "gradients")
    largest = max(float(g.abs().max()) for g in expected.gradients.values())
    error = max(float((gradients[name] - g).abs().max()) for name, g in expected.gradients.items()) / largest
    assert error <= tolerance, f"gradients: max |Δ| is {error:.2e} of the largest"
    assert [name for outcome in outcomes for name in outcome.changed] == []
    assert [o.grad_norm for o in outcomes] == pytest.approx([expected.grad_norm] * len(outcomes), rel=1e-6)
    after = assembled(outcomes, shapes, "after")
    for name, gradient in expected.gradients.items():
        # The first step of Adam moves by lr·sign where the gradient is not small.
        stepped = expected.tensors[name] - LR * gradient / (gradient.abs() + 1e-8)
        clear = gradient.abs() > 1e-4 * largest
        assert torch.allclose(after[name][clear].double(), stepped[clear], atol=1e-3 * LR, rtol=0), name


# What most can go wrong in is a default test; the rest is long. Qwen3-Next has gated delta nets, output gates, experts
# and a shared one; experts of gpt-oss are transposed.
QUICK = {("qwen2", "tp2-sp", "full"), ("qwen3_next", "tp2-sp-ep2", "none"), ("gpt_oss", "tp2-sp-ep2", "none")}
DENSE_LAYOUTS = ("tp1", "tp2", "tp2-sp", "pp2", "vpp2", "cp2", "dp2")
CASES = [("qwen2", layout, recompute) for layout in DENSE_LAYOUTS for recompute in ("none", "full")]
# Two ranks share the only key-value head.
CASES += [("qwen2-one-kv-head", "tp2-sp", "none")]
CASES += [("qwen3_moe", layout, "none") for layout in ("tp1", "pp2", "ep2", "tp2-sp")]
CASES += [(name, "tp2-sp-ep2", "full") for name in ("qwen3_moe", "deepseek_v3")]
CASES += [(name, "tp2-sp", "none") for name in (*DENSE, *WINDOWED) if name != "qwen2"]
CASES += [(name, "tp2-sp-ep2", "none") for name in WITH_EXPERTS]


@pytest.mark.parametrize(
    ("name", "layout", "recompute"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.long) for case in CASES],
)
def test_adapters_equal_merged_weights(
    rank_pool: GetPool, reference: Callable[[str], Merged], name: str, layout: str, recompute: str, tmp_path: Path
) -> None:
    expected, under = reference(name), LAYOUTS[layout]
    files = create_model_files(tmp_path / "merged", weight_specs(read_model_spec(expected.model), "float32"))
    case = replace(case_of(expected, under, recompute=recompute), weight_files=[str(file) for file in files])
    # Some families are less exact in float32 without adapters, too.
    tolerance = FLOAT32 if name.startswith(("qwen2", "qwen3_moe")) else TOLERANCE
    assert_equals_merged(rank_pool(under.world_size).run(run_adapters, case), expected, tolerance=tolerance)
    written = read_tensors(tmp_path / "merged")
    assert written.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        torch.testing.assert_close(written[name], weight.to(written[name].dtype), atol=1e-6, rtol=1e-6, msg=name)


RESUMED = [("qwen2", *pair) for pair in itertools.permutations(("tp2-sp", "pp2", "dp2"), 2)]
# Latents, delta nets, output gates, shared experts; transposed ones.
RESUMED += [(name, "tp2-sp-ep2", "pp2") for name in ("qwen3_next", "deepseek_v3", "gpt_oss")]
RESUMED += [(name, "pp2", "tp2-sp-ep2") for name in ("qwen3_next", "deepseek_v3", "gpt_oss")]


@pytest.mark.parametrize(
    ("name", "saved", "loaded"),
    [pytest.param(*case, marks=() if case == ("qwen2", "tp2-sp", "pp2") else pytest.mark.long) for case in RESUMED],
)
def test_a_run_goes_on_in_another_layout(
    rank_pool: GetPool, reference: Callable[[str], Merged], name: str, saved: str, loaded: str, tmp_path: Path
) -> None:
    """The second step, with moments of the first, is that of a run that stayed in its layout."""
    expected, steps = reference(name), []
    shapes = {name: tuple(t.shape) for name, t in expected.tensors.items()}
    for layout in (saved, saved, loaded):
        under, save, load = LAYOUTS[layout], "", ""
        if not (tmp_path / "one").exists():
            save = str(tmp_path / "one")
        else:
            load = str(tmp_path / "one")
        case = case_of(expected, under, save=save, load=load, distributed=True, eps=1e-3)
        outcomes = rank_pool(under.world_size).run(run_adapters, case)
        steps.append(assembled(outcomes, shapes, "after"))
    moved = max(float((steps[1][name] - steps[0][name]).abs().max()) for name in shapes)
    assert moved > 0.3 * LR
    for tensor in shapes:
        torch.testing.assert_close(steps[2][tensor], steps[1][tensor], atol=1e-3 * LR, rtol=0, msg=tensor)
    if name == "qwen2":
        # All adapters, whose keys say nothing of the layout.
        modules = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
        halves = {"mlp.linear_fc1": ("a", "b.0", "b.1")}
        names = [f"{module}.lora.{part}" for module in modules for part in halves.get(module, ("a", "b"))]
        written = read_metadata(tmp_path / "one" / "actor").state_dict_metadata.keys()
        assert {key for key in written if key.startswith("decoder.")} == {
            f"decoder.layers.{layer}.{each}" for layer in range(5) for each in names
        }


def test_adapters_that_were_read_are_what_the_optimizer_starts_from(
    rank_pool: GetPool, reference: Callable[[str], Merged]
) -> None:
    """In bfloat16 it has main parameters in float32: a step of length 0 writes these to the adapters."""
    expected = reference("qwen2")
    case = case_of(expected, LAYOUTS["tp2-sp"])
    model, request = replace(case.model, dtype="bfloat16"), replace(case.request, lr=0.0)
    outcomes = rank_pool(2).run(run_adapters, replace(case, model=model, request=request))
    after = assembled(outcomes, {name: tuple(t.shape) for name, t in expected.tensors.items()}, "after")
    for name, tensor in expected.tensors.items():
        assert torch.equal(after[name], tensor.bfloat16().float()), name
