"""Vision towers as models' files have them."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch.utils.flop_counter import FlopCounterMode

from megarl.config.layout import LayoutConfig
from megarl.config.lora import LoraConfig
from megarl.config.vision import TowerPart
from megarl.errors import ConfigError
from megarl.sync.plan.engine_shards import engine_needs
from megarl.weights.adapters import adapter_spec
from megarl.weights.families import read_model_spec
from megarl.weights.safetensors_headers import not_expected
from megarl.weights.safetensors_map import untrained_tensors
from megarl.weights.shards import num_stage_parameters, num_trained_parameters
from megarl.weights.towers import MRope
from tests.helpers.hf_models import read_tensors
from tests.helpers.vision import VISION, make_vision_model


@pytest.mark.parametrize("family", VISION)
def test_the_tower_is_what_the_language_model_is_not(tmp_path: Path, family: str) -> None:
    """Trained, it is expected like the rest, by shape; frozen or unread, it stays as it is."""
    spec = read_model_spec(make_vision_model(tmp_path, family))
    files = read_tensors(tmp_path)
    whole, frozen = spec.with_tower("all"), spec.with_tower("none")
    shapes = {name: tuple(tensor.shape) for name, tensor in files.items()}
    assert whole.expected_tensors() == shapes
    assert frozen.expected_tensors() == spec.expected_tensors()
    tower = shapes.keys() - spec.expected_tensors().keys()
    assert len(tower) > 20
    for each in (spec, frozen):
        assert not_expected(files, each.expected_tensors(), each.ignored_tensors()) == []
        assert not_expected(tower, (), each.untrained()) == []
    assert not_expected(tower, (), whole.untrained()) == sorted(tower)
    assert whole.tower is not None
    held = {each.removeprefix("model.") for each in _names_in_transformers(tmp_path)}
    assert {*whole.tower.names.values()} == {name for name in held if not name.startswith("language_model.")}


@pytest.mark.parametrize(
    ("family", "part", "named"),
    [
        ("qwen3_vl", "none", ()),
        *((family, "projector", ("merger", "downsample", "multi_modal_projector")) for family in VISION),
        ("internvl_qwen3", "all", ("",)),
    ],
)
def test_a_part_of_a_tower_is_trained_counted_and_sent(
    tmp_path: Path, family: str, part: TowerPart, named: tuple[str, ...]
) -> None:
    """All of a tower is on the first stage; its trained part is among the weights, and the rest is kept."""
    model = make_vision_model(tmp_path, family)
    text, spec, files = read_model_spec(model), read_model_spec(model, tower=part), read_tensors(model)
    of_tower = files.keys() - text.expected_tensors().keys()
    trained = {name for name in of_tower if any(each in name for each in named)}
    assert bool(trained) == (part != "none")
    assert spec.expected_tensors().keys() - text.expected_tensors().keys() == trained
    kept = untrained_tensors(spec).keys()
    assert kept == of_tower - trained
    size = {name: each.numel() for name, each in files.items()}
    layout = LayoutConfig(pp=2, first_stage_layers=2)
    held, moved, texts = (
        [count(each, layout, stage, vocab_multiple=1).total for stage in range(2)]
        for count, each in ((num_stage_parameters, spec), (num_trained_parameters, spec), (num_stage_parameters, text))
    )
    assert held == [texts[0] + sum(size[name] for name in of_tower), texts[1]]
    assert moved == [texts[0] + sum(size[name] for name in trained), texts[1]]
    # vLLM has the tower on every stage.
    needs = engine_needs(spec, 2, stages=2)
    assert all({name for name in each if name in of_tower} == trained for each in needs)
    assert all(name not in adapter_spec(spec, LoraConfig()).expected_tensors() for name in of_tower)


@pytest.mark.parametrize("family", VISION)
def test_the_flops_of_an_image_are_those_that_transformers_computes(tmp_path: Path, family: str) -> None:
    """64 patches, which windows divide, or a picture of one size; products of matrices and convolutions are counted,
    each twice.
    """
    tower = read_model_spec(make_vision_model(tmp_path, family), tower="none").tower
    assert tower is not None
    model = transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="eager")
    vision = model.config.vision_config
    size, more = 56 if family.startswith("internvl") else 8 * vision.patch_size, 0
    if family.startswith(("mistral3", "internvl", "gemma3")):
        given = {"pixel_values": torch.zeros(1, 3, size, size)}
        if family == "mistral3":
            given["image_sizes"] = torch.tensor([[size, size]])
        elif family.startswith("internvl"):
            # What stands before the patches has no pixels; it is counted as if it had.
            more = 2 * 32 * 3 * 14**2
    else:
        patch = 3 * 2 * vision.patch_size**2
        given = {"pixel_values": torch.zeros(64, patch), "image_grid_thw": torch.tensor([[1, 8, 8]])}
    with torch.no_grad(), FlopCounterMode(display=False) as counted:
        answer = model.get_image_features(**given, return_dict=True)
    num_features = sum(len(each.flatten(0, -2)) for each in answer.pooler_output)
    total = counted.get_total_flops() + more
    assert tower.work.flops(num_features) == total
    # Backward takes twice as much, of what is trained.
    projected = 2 * num_features * tower.work.per_feature
    assert tower.work.flops(num_features, "all") == 3 * total
    assert tower.work.flops(num_features, "projector") == total + 2 * projected


def _names_in_transformers(path: Path) -> list[str]:
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(transformers.AutoConfig.from_pretrained(path))
    return [name for name, _ in model.named_parameters()]


def test_models_without_a_tower_are_refused() -> None:
    spec = read_model_spec(Path(__file__).parents[3] / "configs/model/hf/qwen3-0.6b")
    with pytest.raises(ConfigError, match="family qwen3 has no vision tower to read images with"):
        spec.with_tower("none")


def test_the_language_model_of_an_architecture_decides_about_its_family(tmp_path: Path) -> None:
    path = make_vision_model(tmp_path, "internvl_qwen3")
    assert read_model_spec(path).family.name == "internvl_qwen3"
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["model_type"] = "qwen2"
    (path / "config.json").write_text(json.dumps(config))
    # Qwen2's attention has biases.
    assert read_model_spec(path).expected_tensors().keys() - read_tensors(path).keys() == {
        f"language_model.model.layers.{i}.self_attn.{name}_proj.bias" for i in range(4) for name in "qkv"
    }
    config["text_config"]["model_type"] = "internlm2"
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"got 'internlm2', and InternVL.* is supported with one of qwen2, qwen3"):
        read_model_spec(path)


def test_names_of_gemma_3_as_published(tmp_path: Path) -> None:
    """In its files the tower has a part more in its name than in transformers."""
    path = make_vision_model(tmp_path, "gemma3")
    tensors = {name.replace("vision_tower.", "vision_tower.vision_model."): x for name, x in read_tensors(path).items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    tower = read_model_spec(path, tower="none").tower
    assert tower is not None
    held = {each.removeprefix("model.") for each in _names_in_transformers(path)}
    assert {*tower.names.values()} == {name for name in held if not name.startswith("language_model.")}


# Its sizes on Hugging Face, with the language model's beside the tower's, as files before transformers 4.52 have them.
QWEN2_5_VL_7B = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "hidden_act": "silu",
    "hidden_size": 3584,
    "image_token_id": 151655,
    "intermediate_size": 18944,
    "max_position_embeddings": 128000,
    "max_window_layers": 28,
    "model_type": "qwen2_5_vl",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"mrope_section": [16, 24, 24], "type": "mrope"},
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vision_config": {"depth": 32, "hidden_size": 1280, "out_hidden_size": 3584, "spatial_merge_size": 2},
    "vocab_size": 152064,
}


def test_qwen2_5_vl_as_published(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN2_5_VL_7B))
    spec = read_model_spec(tmp_path)
    # 7,615,616,512 of Qwen2.5-7B, whose language model has the same sizes.
    shapes = spec.expected_tensors()
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == 7_615_616_512
    assert spec.rope_theta == 1e6
    assert not spec.dims.windows
    with torch.device("meta"):
        text = transformers.AutoModel.from_config(transformers.AutoConfig.from_pretrained(tmp_path)).language_model
    assert {f"model.{name}" for name, _ in text.named_parameters()} == shapes.keys() - {"lm_head.weight"}


# The language model of Qwen3-VL-30B-A3B-Instruct on Hugging Face.
QWEN3_VL_30B = {
    "architectures": ["Qwen3VLMoeForConditionalGeneration"],
    "image_token_id": 151655,
    "model_type": "qwen3_vl_moe",
    "text_config": {
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": "qwen3_vl_moe_text",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000,
        "vocab_size": 151936,
    },
    "tie_word_embeddings": False,
    "vision_config": {"depth": 27, "hidden_size": 1152, "out_hidden_size": 2048, "spatial_merge_size": 2},
}


def test_qwen3_vl_with_experts_as_published(tmp_path: Path) -> None:
    """Files have inputs before outputs in the tensors of experts; engines take each expert's as other files have it."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_VL_30B))
    spec, layer = read_model_spec(tmp_path), "model.language_model.layers.47.mlp"
    shapes, sent = spec.expected_tensors(), spec.expected_tensors(by_expert=True)
    # 30,532,122,624 of Qwen3-30B-A3B, whose language model has the same sizes.
    for each in (shapes, sent):
        assert sum(torch.Size(shape).numel() for shape in each.values()) == 30_532_122_624
    assert shapes[f"{layer}.experts.gate_up_proj"] == (128, 2048, 2 * 768)
    assert shapes[f"{layer}.experts.down_proj"] == (128, 768, 2048)
    assert {sent[f"{layer}.experts.127.{name}_proj.weight"] for name in ("gate", "up")} == {(768, 2048)}
    assert sent[f"{layer}.experts.127.down_proj.weight"] == (2048, 768)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["norm_topk_prob"] = False
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="norm_topk_prob"):
        read_model_spec(tmp_path)


def test_axes_of_m_rope_are_those_of_transformers() -> None:
    """Frequencies of Qwen3-VL (24, 20, 20), where an axis is named by the position that turns them."""
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

    freqs = torch.arange(3.0)[:, None, None, None].expand(3, 1, 1, 64).clone()
    sections = SimpleNamespace(mrope_section=[24, 20, 20])
    found = Qwen3VLTextRotaryEmbedding.recomposition_frequencies(sections, freqs)
    assert MRope(sections=(24, 20, 20), interleaved=True).axes(64) == found[0, 0, :64].tolist()
    assert MRope(sections=(2, 3, 3), interleaved=False).axes(8) == [0, 0, 1, 1, 1, 2, 2, 2]


def test_m_rope_without_sections_is_refused(tmp_path: Path) -> None:
    path = make_vision_model(tmp_path, "qwen2_5_vl")
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["rope_parameters"].pop("mrope_section")
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="rope key mrope_section: got None, expected three numbers"):
        read_model_spec(path).with_tower("none")
