"""Directories of adapters that others wrote are read as PEFT means them, or refused with the reason."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.config.load import from_dict
from megarl.config.lora import LoraConfig, Target
from megarl.config.schema import Config
from megarl.errors import ConfigError
from megarl.run.first_checks import adapter_warnings
from megarl.weights.adapters import lost_in_peft
from megarl.weights.families import ModelSpec, read_model_spec
from megarl.weights.peft_files import create_adapter_files, read_adapters, read_peft
from tests.helpers.hf_models import VOCAB_SIZE, make_model

# [out, in] of the attention of tests/helpers/hf_models: six heads of 8, two of them for keys and values.
SHAPES = {"q_proj": (48, 48), "k_proj": (16, 48), "v_proj": (16, 48), "o_proj": (48, 48)}
PREFIX = "base_model.model."
Write = Callable[..., Path]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return read_model_spec(make_model(tmp_path_factory.mktemp("qwen2"), "qwen2", tied=False, num_hidden_layers=2))


def low_rank(module: str, shape: tuple[int, int], rank: int) -> dict[str, torch.Tensor]:
    out, width = shape
    return {f"{module}.lora_A.weight": torch.randn(rank, width), f"{module}.lora_B.weight": torch.randn(out, rank)}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes adapters of rank 4 and α 8 for the attention of both layers, with changes."""

    def write_it(
        *, add: dict[str, torch.Tensor] | None = None, without: str = "-", ranks: Any = None, **options: Any
    ) -> Path:
        tensors = {}
        for layer in range(2):
            for name, shape in SHAPES.items():
                module = f"{PREFIX}model.layers.{layer}.self_attn.{name}"
                tensors |= low_rank(module, shape, (ranks or {}).get(name, 4))
        tensors = {name: tensor for name, tensor in tensors.items() if without not in name} | (add or {})
        path = tmp_path / "adapters"
        path.mkdir()
        save_file(tensors, path / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": list(SHAPES)}
        (path / "adapter_config.json").write_text(json.dumps({**config, **options}))
        return path

    return write_it


def at(path: Path, **changes: Any) -> LoraConfig:
    return LoraConfig(**{"rank": 4, "alpha": 8.0, "targets": ("attention",), "path": str(path), **changes})


def test_training_begins_from_all_that_say_the_same(base: ModelSpec, write: Write) -> None:
    path = write(lora_dropout=0.1, bias="none", inference_mode=True, init_lora_weights="gaussian")
    written, read = load_file(path / "adapter_model.safetensors"), read_adapters(base, at(path))
    assert {f"{PREFIX}{name}" for name in read} == written.keys()
    assert all(torch.equal(tensor, written[f"{PREFIX}{name}"]) for name, tensor in read.items())


def test_the_scale_of_rank_stabilised_adapters(base: ModelSpec, write: Write) -> None:
    """α / √r = 8 / 2."""
    path = write(use_rslora=True)
    assert {update.scale for update in read_peft(path, base).updates.values()} == {4.0}
    read_adapters(base, at(path, alpha=16.0))
    with pytest.raises(ConfigError, match=r"scaled by 4, but lora.alpha / lora.rank is 2; set lora.alpha=16"):
        read_adapters(base, at(path))


def test_patterns_give_modules_their_own_rank_and_scale(base: ModelSpec, write: Write) -> None:
    patterns = {"rank_pattern": {"k_proj": 2, r"layers\.1\.self_attn\.o_proj": 4}, "alpha_pattern": {"v_proj": 2}}
    path = write(ranks={"k_proj": 2}, **patterns)
    scales = {name: update.scale for name, update in read_peft(path, base).updates.items()}
    for layer in range(2):
        named = {key: scales[f"model.layers.{layer}.self_attn.{key}.weight"] for key in SHAPES}
        assert named == {"q_proj": 2.0, "k_proj": 4.0, "v_proj": 0.5, "o_proj": 2.0}
    with pytest.raises(ConfigError, match=r"k_proj\.weight have rank 2, but lora says 4; set lora\.rank=2, or merge"):
        read_adapters(base, at(path))


def test_embeddings_are_added_to_transposed(base: ModelSpec, write: Write) -> None:
    module, a, b = f"{PREFIX}model.embed_tokens", torch.randn(4, VOCAB_SIZE), torch.randn(48, 4)
    add = {f"{module}.lora_embedding_A": a, f"{module}.lora_embedding_B": b}
    path = write(add=add, target_modules=[*SHAPES, "embed_tokens"])
    update = read_peft(path, base).updates["model.embed_tokens.weight"]
    torch.testing.assert_close(update.rows(7, 5), 2.0 * (b @ a).T[7:12])
    with pytest.raises(ConfigError, match=r"has adapters of model\.embed_tokens\.weight .*set lora\.targets"):
        read_adapters(base, at(path))


def test_names_of_raw_state_dicts(base: ModelSpec, write: Write) -> None:
    path = write()
    tensors = load_file(path / "adapter_model.safetensors")
    wrapped = f"module._orig_mod.{PREFIX}model._fsdp_wrapped_module."
    for prefix, end in (("", ".weight"), ("", ".default.weight"), (wrapped, ".weight")):
        raw = {
            name.replace(PREFIX + "model.", prefix or "model.").replace(".weight", end): t
            for name, t in tensors.items()
        }
        save_file(raw, path / "adapter_model.safetensors")
        read = read_adapters(base, at(path))
        assert all(torch.equal(read[name.removeprefix(PREFIX)], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    "options",
    [
        {"layers_to_transform": [1]},
        {"layers_to_transform": 1},
        {"target_modules": r"model\.layers\.1\.self_attn\..*_proj"},
        {"target_modules": "all-linear"},
        {"exclude_modules": [f"layers.0.self_attn.{name}" for name in SHAPES]},
    ],
)
def test_some_layers_alone(base: ModelSpec, write: Write, options: dict[str, Any]) -> None:
    path = write(without="layers.0.", **options)
    assert len(read_peft(path, base).updates) == 4
    with pytest.raises(ConfigError, match=r"has no adapters of model\.layers\.0\.self_attn\.k_proj\.weight \(4 such"):
        read_adapters(base, at(path))


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"use_dora": True}, ["use_dora: got True", "scales the rows"]),
        ({"bias": "lora_only"}, ["bias: got 'lora_only'", "merge_and_unload"]),
        ({"lora_bias": True}, ["lora_bias"]),
        ({"fan_in_fan_out": True}, ["fan_in_fan_out", "transposed"]),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, ["target_parameters", "all experts"]),
        ({"layer_replication": [[0, 2]]}, ["layer_replication"]),
        ({"init_lora_weights": "pissa_niter_4"}, ["init_lora_weights: got 'pissa_niter_4'", "base's weights"]),
        ({"peft_type": "IA3"}, ["peft_type: got 'IA3'"]),
        ({"r": "4"}, ["r: got '4', expected a positive number"]),
        ({"lora_alpha": 0}, ["lora_alpha: got 0"]),
        ({"r": 8}, ["has shape (4, 48)", "gives it rank 8"]),
        ({"rank_pattern": {"(": 2}}, ["adapter_config.json"]),
        ({"target_modules": [*SHAPES, "down_proj"]}, ["has no adapters of ['model.layers.0.mlp.down_proj.weight'"]),
        ({"without": "layers.1."}, ["has no adapters of ['model.layers.1.self_attn.q_proj.weight'", "(4 in all)"]),
        ({"without": "0.self_attn.q_proj.lora_B"}, ["model.layers.0.self_attn.q_proj has no lora_B"]),
        (
            {"add": low_rank(f"{PREFIX}model.layers.2.self_attn.q_proj", (48, 48), 4)},
            ["layers.2", "lacks", "base that"],
        ),
        ({"add": low_rank(f"{PREFIX}model.visual.q_proj", (48, 48), 4)}, ["model.visual.q_proj.weight"]),
        ({"add": {f"{PREFIX}model.layers.0.self_attn.q_proj.lora_magnitude_vector": torch.ones(48)}}, ["magnitude"]),
        ({"add": low_rank(f"{PREFIX}model.layers.0.mlp.up_proj", (48, 48), 4)}, ["up_proj.weight: has shape (48, 48)"]),
        ({"add": {f"{PREFIX}model.norm.weight": torch.ones(48)}}, ["unexpected tensors ['model.norm.weight']"]),
    ],
)
def test_what_is_refused(base: ModelSpec, write: Write, options: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read_peft(write(**options), base)
    assert not [part for part in parts if part not in str(caught.value)], str(caught.value)


def test_tensors_that_are_kept_whole(base: ModelSpec, write: Write) -> None:
    head, score = torch.randn(VOCAB_SIZE, 48), torch.randn(1, 48)
    add = {f"{PREFIX}lm_head.weight": head, f"{PREFIX}score.weight": score}
    path = write(add=add, modules_to_save=["lm_head", "score"])
    found = read_peft(path, base)
    assert found.replaced.keys() == {"lm_head.weight", "score.weight"}
    assert torch.equal(found.replaced["lm_head.weight"], head)
    with pytest.raises(ConfigError, match=r"has lm_head\.weight as a whole"):
        read_adapters(base, at(path), scalar_head=True)


def test_a_scalar_head_is_for_roles_that_have_one(base: ModelSpec, write: Write) -> None:
    score = torch.randn(1, 48)
    path = write(add={f"{PREFIX}score.weight": score}, modules_to_save=["score"])
    assert torch.equal(read_adapters(base, at(path), scalar_head=True)["score.weight"], score)
    with pytest.raises(ConfigError, match=r"has score\.weight as a whole, which this role does not train"):
        read_adapters(base, at(path))


def test_a_tied_head(tmp_path: Path, write: Write) -> None:
    tied = read_model_spec(make_model(tmp_path / "tied", "qwen2", tied=True, num_hidden_layers=2))
    path = write(add=low_rank(f"{PREFIX}lm_head", (VOCAB_SIZE, 48), 4))
    with pytest.raises(ConfigError, match=r"lm_head\.weight is also the embedding there"):
        read_peft(path, tied)


@pytest.mark.parametrize(
    ("embedding", "head", "options", "is_read"),
    [
        # PEFT trains the embedding alone, beside a head that stays as it was, unless it is told to train them as one.
        (1.0, None, {}, False),
        (1.0, 2.0, {}, False),
        (1.0, 1.0, {"ensure_weight_tying": True}, True),
        (1.0, None, {"ensure_weight_tying": True}, True),
    ],
)
def test_an_embedding_that_the_base_ties_to_the_head(
    embedding: float, head: float | None, options: dict[str, Any], is_read: bool, tmp_path: Path, write: Write
) -> None:
    tied = read_model_spec(make_model(tmp_path / "tied", "qwen2", tied=True, num_hidden_layers=2))
    values = {"model.embed_tokens": embedding, "lm_head": head}
    add = {f"{PREFIX}{name}.weight": torch.full((VOCAB_SIZE, 48), x) for name, x in values.items() if x is not None}
    path = write(add=add, modules_to_save=["embed_tokens", "lm_head"], **options)
    if is_read:
        assert read_peft(path, tied).replaced.keys() == {"model.embed_tokens.weight"}
    else:
        with pytest.raises(ConfigError, match=r"embedding there|the head was left as it was in training"):
            read_peft(path, tied)


def test_an_embedding_with_adapters_that_the_base_ties_to_the_head(tmp_path: Path, write: Write) -> None:
    tied = read_model_spec(make_model(tmp_path / "tied", "qwen2", tied=True, num_hidden_layers=2))
    module = f"{PREFIX}model.embed_tokens.lora_embedding"
    path = write(add={f"{module}_A": torch.ones(4, VOCAB_SIZE), f"{module}_B": torch.ones(48, 4)})
    with pytest.raises(ConfigError, match=r"changes model\.embed_tokens\.weight, which .* ties to lm_head\.weight"):
        read_peft(path, tied)


@pytest.mark.parametrize("target", ["attention", "mlp", "experts"])
def test_what_a_run_exports_is_read_again(target: Target, tmp_path: Path) -> None:
    """Dense layers, and experts of other layers, have modules of the same names: the file tells which have adapters."""
    sizes = {"num_hidden_layers": 2, "mlp_only_layers": [0], "num_experts": 4, "moe_intermediate_size": 8}
    spec = read_model_spec(make_model(tmp_path / "moe", "qwen3_moe", tied=False, **sizes))
    config = LoraConfig(rank=2, expert_rank=1, targets=(target,), path=str(tmp_path / "adapters"))
    create_adapter_files(tmp_path / "adapters", spec, config, "float32")
    found = read_adapters(spec, config)
    # A and B of four projections in both layers, of three in one, or of three in each of four experts of one layer.
    assert len(found) == {"attention": 16, "mlp": 6, "experts": 24}[target]
    # PEFT takes the names of the dense layers' modules for those of experts.
    assert lost_in_peft(spec, ("attention", target)) == ("mlp" if target == "mlp" else None)


def test_the_base_must_compute_as_that_of_the_training(base: ModelSpec, write: Write, tmp_path: Path) -> None:
    config = json.loads((base.path / "config.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    path = write(base_model_name_or_path=str(other))
    (other / "config.json").write_text(json.dumps({**config, "transformers_version": "1", "use_cache": False}))
    read_adapters(base, at(path))
    (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    with pytest.raises(ConfigError, match=r"other' *, whose config.json has other norm_eps than.*; name that base"):
        read_adapters(base, at(path))


def test_files_that_are_not_there(base: ModelSpec, write: Write) -> None:
    path = write()
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"has no adapter_model\.safetensors; it has adapter_model\.bin, a pickle"):
        read_peft(path, base)
    (path / "adapter_model.bin").unlink()
    with pytest.raises(ConfigError, match="copy the directory again"):
        read_peft(path, base)
    (path / "adapter_config.json").rename(path / "config.json")
    with pytest.raises(ConfigError, match=r"has no adapter_config\.json.*it is a whole model"):
        read_peft(path, base)


@pytest.mark.parametrize(
    ("named", "other"),
    [
        (None, ""),
        ("Qwen/Base-1B/", ""),
        ("/elsewhere/Base-1B", ""),
        ("lab/Origin-1B", ""),
        ("Qwen/Instruct-1B", "Instruct-1B"),
        ("lab/Base-1B-bnb-4bit", "Base-1B-bnb-4bit"),
    ],
)
def test_a_base_of_another_name_is_told(write: Write, tmp_path: Path, named: str | None, other: str) -> None:
    """A model has the name of its directory, of its part of the hub's cache, and that in its config.json."""
    path = make_model(tmp_path / "models--Qwen--Base-1B" / "snapshots" / "1f", "qwen2", tied=False, num_hidden_layers=2)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "_name_or_path": "lab/Origin-1B"}))
    options = {} if named is None else {"base_model_name_or_path": named}
    spec = read_model_spec(path)
    adapters = write(**options)
    assert read_peft(adapters, spec).other_base(spec) == other
    config = from_dict(
        Config, {"model": {"path": str(path)}, "actor": {"lora": {"path": str(adapters), "targets": ["attention"]}}}
    )
    found = list(adapter_warnings(config))
    assert [text.startswith(f"actor.lora.path: the adapters were trained on {other}, by") for text in found] == (
        [True] if other else []
    )


def test_a_quantised_base_is_compared_by_its_config(base: ModelSpec, write: Write, tmp_path: Path) -> None:
    """Training in four bits names a base that megarl does not train itself; its other numbers count all the same."""
    quantised, config = tmp_path / "base-bnb-4bit", json.loads((base.path / "config.json").read_text())
    quantised.mkdir()
    path = write(base_model_name_or_path=str(quantised))
    for theta, fits in ((10000.0, True), (50000.0, False)):
        rope = {"rope_parameters": {**(config.get("rope_parameters") or {}), "rope_theta": theta}, "rope_theta": theta}
        changed = {**config, **rope, "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
        (quantised / "config.json").write_text(json.dumps(changed))
        if fits:
            read_peft(path, base)
        else:
            with pytest.raises(ConfigError, match=r"whose config\.json has other rope_theta than that of"):
                read_peft(path, base)
