"""Engines on small models of every family: log-probs are transformers', also those of weights that were sent."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.cluster.roles import engine_spec
from megarl_lab.recipes.tiny_model import make_byte_tokenizer
from tests.e2e import family_engines
from tests.e2e.family_engines import Scored
from tests.e2e.support import random_sequences, small_config
from tests.helpers.checkpoints import VOCAB_SIZE
from tests.helpers.family_parity import load_transformers
from tests.helpers.hf_models import make_model
from tests.helpers.rank_pool import RankPool
from tests.helpers.towers import make_whole
from tests.helpers.vision import make_vision_model

# float32 rounding of two implementations, through five layers and a cache.
NATS = 5e-5
# vLLM's CPU kernels take heads of 32 and widths that 32 divides, on each worker. Windows are shorter than most prompts.
SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
_EXPERTS = {"moe_intermediate_size": 64}
_DELTA = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
_DELTA_AND_EXPERTS = {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 64}
# The one size of latents that vLLM's CPU kernel takes.
_LATENT = {
    **_EXPERTS,
    "num_key_value_heads": 4,
    # transformers takes it for that of rope.
    "head_dim": 64,
    "kv_lora_rank": 512,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineModel:
    """What a model of `hf_models` has besides SIZES, and keys of published configs that transformers 5 leaves out."""

    tied: bool = False
    # The name in `towers` of the larger model, of which it is the language model.
    tower: str | None = None
    sizes: Mapping[str, Any] = field(default_factory=dict)
    published: Mapping[str, Any] = field(default_factory=dict)
    reads_images: bool = False


# The default case has sinks, windows and experts that are sent one by one, but are in one tensor.
DEFAULT = "gpt_oss"
_V3 = EngineModel(sizes=_LATENT, published={"topk_method": "noaux_tc", "scoring_func": "sigmoid"})
MODELS: Mapping[str, EngineModel] = {
    "llama-3": EngineModel(),
    "llama-linear": EngineModel(),
    "mistral": EngineModel(),
    "mistral-window": EngineModel(sizes={"sliding_window": 16}),
    "mistral-small": EngineModel(sizes={"head_dim": 48}),
    "qwen2": EngineModel(),
    "qwen3": EngineModel(),
    "gemma": EngineModel(),
    "phi3": EngineModel(),
    "granite": EngineModel(),
    "granitemoe": EngineModel(),
    "seed_oss": EngineModel(),
    "qwen2_moe": EngineModel(sizes={**_EXPERTS, "shared_expert_intermediate_size": 64}),
    "qwen3_moe": EngineModel(sizes=_EXPERTS),
    "mixtral": EngineModel(),
    "glm4_moe": EngineModel(sizes=_EXPERTS),
    "glm4_moe-air": EngineModel(sizes=_EXPERTS),
    "gemma2": EngineModel(tied=True, sizes={"sliding_window": 16}),
    "gemma3": EngineModel(tied=True, sizes={"sliding_window": 16}),
    "olmo2": EngineModel(),
    "olmo3": EngineModel(sizes={"sliding_window": 16}),
    "minimax_m2": EngineModel(
        published={
            "rotary_dim": 16,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "use_qk_norm": True,
            "shared_intermediate_size": 0,
        }
    ),
    "gpt_oss": EngineModel(sizes={"sliding_window": 16}),
    "qwen3_5": EngineModel(sizes=_DELTA),
    "qwen3_5_moe": EngineModel(sizes=_DELTA_AND_EXPERTS),
    # As published, with a vision tower, which no sync sends.
    "gemma3+tower": EngineModel(tied=True, tower="gemma3", sizes={"sliding_window": 16}),
    "mistral-small+tower": EngineModel(tower="mistral3", sizes={"head_dim": 48}),
    "qwen3_5+tower": EngineModel(tower="qwen3_5", sizes=_DELTA),
    "qwen3_5_moe+tower": EngineModel(tower="qwen3_5_moe", sizes=_DELTA_AND_EXPERTS),
    "qwen2_5_vl+tower": EngineModel(reads_images=True),
    "qwen3_vl+tower": EngineModel(reads_images=True),
    "qwen3_next": EngineModel(sizes=_DELTA_AND_EXPERTS),
    "deepseek_v2": EngineModel(sizes=_LATENT),
    "deepseek_v3-yarn": _V3,
    "deepseek_v3-kimi": _V3,
    "glm4_moe_lite": EngineModel(sizes=_LATENT),
}
PROMPTS = [random_sequences(1, length, seed=length)[0] for length in (5, 33, 70)]
MAX_TOKENS = 40


def make_engine_model(path: Path, name: str) -> Path:
    """A model of sizes that an engine takes, with a tokenizer and its token at the end."""
    described, tokenizer = MODELS[name], make_byte_tokenizer()
    if described.reads_images:
        return make_vision_model(path, name.partition("+")[0])
    text = path if described.tower is None else path.with_name("text")
    make_model(text, name.partition("+")[0], tied=described.tied, **{**SIZES, **described.sizes})
    config, ends = text / "config.json", {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    config.write_text(json.dumps({**json.loads(config.read_text()), **described.published, **ends}))
    # It has the family's own tokens at the end, of which a small vocabulary has none.
    (text / "generation_config.json").unlink()
    if described.tower is not None:
        make_whole(path, described.tower, text)
        (path / "generation_config.json").unlink(missing_ok=True)
    tokenizer.save_pretrained(path)
    return path


def trained_copy(model: Path, path: Path) -> Path:
    """A copy of a checkpoint in which each weight has moved by about a tenth."""
    shutil.copytree(model, path)
    generator = torch.Generator().manual_seed(1)
    for file in path.glob("*.safetensors"):
        moved = {
            name: tensor * (1 + 0.1 * torch.randn(tensor.shape, generator=generator))
            for name, tensor in sorted(load_file(file).items())
        }
        save_file(moved, file, metadata={"format": "pt"})
    return path


@torch.no_grad()
def largest_errors(model: Path, scored: Scored, prompts: Sequence[Sequence[int]]) -> tuple[float, float]:
    """max |Δ| to transformers' log-probs over the tokens of prompts, and over those that were sampled."""
    hf, errors = load_transformers(model), list[tuple[float, float]]()
    for prompt, given, completion in zip(prompts, scored.prompts, scored.completions, strict=True):
        ids = torch.tensor([*prompt, *completion.token_ids.tolist()])
        logprobs = hf(ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        told = torch.cat([torch.from_numpy(given), torch.from_numpy(completion.logprobs)])
        error = (told - logprobs).abs()
        errors.append((float(error[: len(prompt) - 1].max()), float(error[len(prompt) - 1 :].max())))
    return max(first for first, _ in errors), max(second for _, second in errors)


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == DEFAULT else pytest.mark.long) for n in MODELS])
def test_an_engine_equals_transformers_before_and_after_a_sync(
    name: str, tp: int, engine_process: RankPool, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Each worker's other parts of tensors are NaN, so that a part which its plan forgot would spoil every answer."""
    model = make_engine_model(tmp_path / "model", name)
    trained = trained_copy(model, tmp_path / "trained")
    spec = engine_spec(small_config(model, f"rollout.engine.tp={tp}"))
    found = engine_process.run(family_engines.follow, spec, trained, PROMPTS, max_tokens=MAX_TOKENS)[0]
    errors = [largest_errors(path, scored, PROMPTS) for path, scored in ((model, found.before), (trained, found.after))]
    record_property("nats", errors)
    assert max(map(max, errors)) <= NATS, errors
    assert found.sent == found.received
    assert all(sums.keys() == found.sent[0].keys() and len(sums) > 9 for sums in found.sent)
    moved = [abs(a - b).mean() for a, b in zip(found.before.prompts, found.after.prompts, strict=True)]
    assert min(moved) > 0.01
