"""Make a Qwen3-VL model directory that is small enough for a laptop, with random weights and files of its processor."""

import json
from pathlib import Path

import torch
from tokenizers import AddedToken

from megarl.host.sharing import obey_umask
from megarl.vision.torchvision_part import import_torchvision
from megarl_lab.recipes.tiny_model import CHAT_TEMPLATE, TinyModelConfig, make_byte_tokenizer

_MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_NAMES = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
# A turn is a text or a list of parts.
_CONTENT = (
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
)
# A token for each square of 32 × 32 pixels.
_IMAGES = {
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "size": {"shortest_edge": 4 * 32**2, "longest_edge": 64 * 32**2},
}


def make_tiny_vision_model(path: str | Path, config: TinyModelConfig, *, seed: int) -> int:
    """Write a model directory with a vision tower of two layers; return the number of parameters."""
    import_torchvision()
    tokenizer = make_byte_tokenizer()
    marks = [AddedToken(mark, special=True, normalized=False) for mark in _MARKS]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.chat_template = CHAT_TEMPLATE.replace("{{ message['content'] }}", _CONTENT)
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    # The pairs of a head turn by time, by row, or by column.
    pairs, third = config.head_dim // 2, config.head_dim // 6
    rope = {"rope_type": "default", "rope_theta": config.rope_theta, "mrope_interleaved": True}
    hf_config = Qwen3VLConfig(
        text_config={
            **config.of_language_model(tokenizer),
            "rope_parameters": {**rope, "mrope_section": [pairs - 2 * third, third, third]},
        },
        vision_config={
            "depth": 2,
            "hidden_size": config.hidden_size // 2,
            "num_heads": 2,
            "intermediate_size": config.hidden_size,
            "out_hidden_size": config.hidden_size,
            "patch_size": 16,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
        tie_word_embeddings=config.tied,
        **{name: tokenizer.convert_tokens_to_ids(mark) for name, mark in zip(_NAMES, _MARKS, strict=True)},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3VLForConditionalGeneration(hf_config)
    path = Path(path)
    model.to(getattr(torch, config.dtype)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    whole = {"processor_class": "Qwen3VLProcessor"}
    for name, content in {
        "preprocessor_config.json": {**_IMAGES, **whole, "image_processor_type": "Qwen2VLImageProcessor"},
        "video_preprocessor_config.json": {**_IMAGES, "video_processor_type": "Qwen3VLVideoProcessor"},
        "processor_config.json": whole,
    }.items():
        (path / name).write_text(json.dumps(content), encoding="utf-8")
    obey_umask(path)
    return sum(p.numel() for p in model.parameters())
