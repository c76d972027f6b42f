"""Every matrix of every family's layers has an adapter, or is one of those of which the page on adapters says none."""

import re

import pytest

from megarl.config.load import PACKAGED
from megarl.config.lora import LoraConfig, Target
from megarl.errors import ConfigError
from megarl.weights.adapters import adapter_rules, adapter_spec, matrices_of, target_of
from megarl.weights.families import FAMILIES, read_model_spec
from megarl.weights.rules import Partition
from megarl.weights.tables import Family

TARGETS = ("attention", "mlp", "experts")


# By hand, from transformers' modeling files: the linear modules of a layer.
_QKVO = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"}
_SWIGLU = {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
_EXPERTS = {f"mlp.experts.N.{kind}_proj" for kind in ("gate", "up", "down")}
_SHARED_EXPERTS = {f"mlp.shared_experts.{kind}_proj" for kind in ("gate", "up", "down")}
_SHARED_EXPERT = {f"mlp.shared_expert.{kind}_proj" for kind in ("gate", "up", "down")}
_SPARSE = {f"block_sparse_moe.experts.N.{name}" for name in ("w1", "w2", "w3")}
_LATENT = {"q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
_DENSE = {"attention": _QKVO, "mlp": _SWIGLU}
_DEEPSEEK = {
    "attention": {f"self_attn.{name}" for name in _LATENT},
    "mlp": _SWIGLU | _SHARED_EXPERTS,
    "experts": _EXPERTS,
}
_BY_PART = {f"linear_attn.in_proj_{name}" for name in ("qkv", "z", "b", "a")}
_QWEN3_5 = _QKVO | _BY_PART | {"linear_attn.out_proj"}
_QWEN3_5_DENSE = {"attention": _QWEN3_5, "mlp": _SWIGLU}
_QWEN3_5_MOE = {"attention": _QWEN3_5, "mlp": _SHARED_EXPERT, "experts": _EXPERTS}
_GLM = {"attention": _QKVO, "mlp": _SWIGLU | _SHARED_EXPERTS, "experts": _EXPERTS}
MODULES: dict[str, dict[str, set[str]]] = {
    **dict.fromkeys(
        ("llama", "mistral", "mistral3", "qwen2", "qwen2_5_vl", "qwen3", "qwen3_vl", "seed_oss", "granite"), _DENSE
    ),
    **dict.fromkeys(("internvl_qwen2", "internvl_qwen3"), _DENSE),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text", "olmo2", "olmo3"), _DENSE),
    "phi3": {
        "attention": {"self_attn.qkv_proj", "self_attn.o_proj"},
        "mlp": {"mlp.gate_up_proj", "mlp.down_proj"},
    },
    **{name: {**_DENSE, "experts": _EXPERTS} for name in ("qwen3_moe", "qwen3_vl_moe")},
    "qwen2_moe": {"attention": _QKVO, "mlp": _SWIGLU | _SHARED_EXPERT, "experts": _EXPERTS},
    **dict.fromkeys(("glm4_moe", "glm4v_moe"), _GLM),
    "mixtral": {"attention": _QKVO, "experts": _SPARSE},
    "minimax_m2": {"attention": _QKVO, "experts": _SPARSE},
    "granitemoe": {
        "attention": _QKVO,
        "experts": {f"block_sparse_moe.experts.N.{kind}_proj" for kind in ("gate", "up", "down")},
    },
    "gpt_oss": {"attention": _QKVO, "experts": _EXPERTS},
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), _DEEPSEEK),
    "qwen3_next": {
        "attention": _QKVO | {f"linear_attn.{name}" for name in ("in_proj_qkvz", "in_proj_ba", "out_proj")},
        "mlp": _SWIGLU | _SHARED_EXPERT,
        "experts": _EXPERTS,
    },
    **dict.fromkeys(("qwen3_5", "qwen3_5_text"), _QWEN3_5_DENSE),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), _QWEN3_5_MOE),
}
# What users do not train with adapters: which experts a token goes to, and how much of the shared one it gets.
WITHOUT = {"mlp.router.weight", "mlp.shared_experts.gate_weight"}


def short(name: str) -> str:
    """A module's name within its layer."""
    return name.partition("layers.{layer}.")[2].replace("{expert}", "N")


@pytest.mark.parametrize("family", FAMILIES.entries().values(), ids=lambda family: family.name)
def test_no_matrix_is_left_out(family: Family) -> None:
    found: dict[str, set[str]] = {}
    for rule in family.weights:
        if (target := target_of(rule)) is not None:
            found.setdefault(target, set()).update(short(matrix.name) for matrix in matrices_of(rule))
        elif "{layer}" in rule.names[0] and any(len(tensor.shape) == 2 for tensor in rule.tensors):
            # Biases of stacked experts have two axes with that of experts.
            assert short(rule.names[0]) in WITHOUT, rule.names[0]
    assert found == MODULES[family.name]


def test_a_latent_has_whole_adapters_and_a_transposed_matrix_those_of_its_turned_one() -> None:
    rules = {rule.names[0]: rule for name in ("deepseek_v3", "gpt_oss") for rule in FAMILIES.get(name).weights}
    adapters = {rule.names[0]: rule for rule in adapter_rules(rules.values(), TARGETS)}
    down, experts = "decoder.layers.{layer}.self_attention.linear_kv_down_proj", "linear_fc1"
    assert [adapters[f"{down}.lora.{x}"].partition for x in "ab"] == [Partition.REPLICATED] * 2
    fc1 = f"decoder.layers.{{layer}}.mlp.experts.local_experts.{{expert}}.{experts}"
    a, b = (adapters[f"{fc1}.lora.{x}"] for x in "ab")
    assert [each.shape for each in a.tensors] == [("expert_rank", "hidden")] * 2
    assert [each.shape for each in b.tensors] == [("expert_ffn", "expert_rank")] * 2
    assert b.partition is Partition.GATE_UP
    assert b.tensors[1].name == "model.layers.{layer}.mlp.experts.{expert}.up_proj.lora_B.weight"


@pytest.mark.parametrize(
    ("model", "target", "known"),
    [("qwen3-8b", "experts", "['attention', 'mlp']"), ("qwen3-30b-a3b", "mlp", "['attention', 'experts']")],
)
def test_targets_that_a_model_lacks_are_refused(model: str, target: Target, known: str) -> None:
    """All layers of the second have experts, and none a shared one."""
    spec = read_model_spec(PACKAGED / "model" / "hf" / model)
    with pytest.raises(ConfigError, match=re.escape(f"lora.targets: got ['{target}'], but ")) as refused:
        adapter_spec(spec, LoraConfig(targets=(target,)))
    assert str(refused.value).endswith(f"has no such layers; expected some of {known}")
    names = [rule.names[0] for rule in adapter_spec(spec, LoraConfig()).family.weights]
    assert any(".mlp.linear_fc1." in name for name in names) == (target == "experts")


@pytest.mark.parametrize("family", [each for each in FAMILIES.entries().values() if each.expert_ffn_key])
def test_what_peft_leaves_out(family: Family) -> None:
    """Compared with PEFT 0.21.2 and transformers 5.19, logits of a small model of each family and of the merged one:
    of Mixtral and MiniMax-M2 nothing is lost.
    """
    experts = {"gpt_oss", "granitemoe", "qwen2_moe", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_vl_moe"}
    expected = None if family.name in ("mixtral", "minimax_m2") else "experts" if family.name in experts else "mlp"
    assert family.lost_in_peft == expected
