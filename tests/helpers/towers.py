"""Small models of every family with a vision tower, as they are published."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from tests.helpers.hf_models import read_tensors

_SMALL = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
_IMAGE = {"image_size": 28, "patch_size": 14}
_QWEN = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 24}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """Names of transformers' config and model; the tower's settings, and those of the whole model; a tensor that the
    published files have besides.
    """

    config: str
    model: str
    vision: Mapping[str, Any]
    whole: Mapping[str, Any] = field(default_factory=dict)
    predicts: bool = False


# By megarl's name of the family.
TOWERS = {
    "gemma3": Tower(
        config="Gemma3Config",
        model="Gemma3ForConditionalGeneration",
        vision={**_SMALL, **_IMAGE},
        whole={"mm_tokens_per_image": 1},
    ),
    "mistral3": Tower(
        config="Mistral3Config",
        model="Mistral3ForConditionalGeneration",
        vision={**_SMALL, **_IMAGE, "model_type": "pixtral", "head_dim": 16},
    ),
    "qwen3_5": Tower(config="Qwen3_5Config", model="Qwen3_5ForConditionalGeneration", vision=_QWEN, predicts=True),
    "qwen3_5_moe": Tower(
        config="Qwen3_5MoeConfig", model="Qwen3_5MoeForConditionalGeneration", vision=_QWEN, predicts=True
    ),
}


def make_whole(path: Path, family: str, text: Path) -> Path:
    """A model with the language model `text` and a small tower, as published: layers that predict further tokens too,
    and all experts of a layer in one tensor, where transformers writes one for each.
    """
    described, own = TOWERS[family], transformers.AutoModelForCausalLM.from_pretrained(text)
    width = {"out_hidden_size": own.config.hidden_size} if described.predicts else {}
    config = getattr(transformers, described.config)(
        text_config=json.loads((text / "config.json").read_text()),
        vision_config={**described.vision, **width},
        tie_word_embeddings=own.config.tie_word_embeddings,
        **described.whole,
    )
    whole = getattr(transformers, described.model)(config)
    whole.model.language_model.load_state_dict(own.model.state_dict())
    whole.lm_head.load_state_dict(own.lm_head.state_dict())
    whole.save_pretrained(path)
    if described.predicts:
        tensors = {key: value for key, value in read_tensors(path).items() if ".mlp.experts." not in key}
        for layer, each in enumerate(whole.model.language_model.layers):
            if hasattr(each.mlp, "experts"):
                for kind, stacked in each.mlp.experts.named_parameters():
                    tensors[f"model.language_model.layers.{layer}.mlp.experts.{kind}"] = stacked.detach().clone()
        tensors["mtp.norm.weight"] = torch.linspace(-1, 1, own.config.hidden_size)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "tokenizer.json").write_text("{}")
    return path
