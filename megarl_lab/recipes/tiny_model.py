"""Make a Qwen3 model directory that is small enough for a laptop, with random weights and a byte-level tokenizer.

The tokenizer has no merges: every byte is a token, and so is every digit, which helps a small model to calculate.
A few words of the chat format are tokens of their own, to keep prompts short.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from megarl.errors import ConfigError
from megarl.host.sharing import obey_umask
from megarl.vision.torchvision_part import import_torchvision

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


PAD = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (PAD, TURN_START, TURN_END)
# Tokens that decoding keeps: scorers read the answer tags.
WORDS = ("user", "assistant", "Hint: ", "<answer>", "</answer>")

# ChatML. As in Qwen3's template, answers before the last user turn lose their thoughts.
CHAT_TEMPLATE = (
    "{% set last = namespace(user=-1) %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{% set last.user = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' and loop.index0 < last.user %}"
    "{{ message['content'].split('</think>')[-1] }}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModelConfig:
    """The sizes of the tiny model; the defaults give 625 thousand parameters."""

    hidden_size: int = 128
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    ffn_size: int = 384
    max_positions: int = 512
    rope_theta: float = 10000.0
    tied: bool = True
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "ffn_size", "max_positions"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: got {getattr(self, name)}, expected >= 1")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_kv_heads: got {self.num_kv_heads}, expected a divisor of num_heads={self.num_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim: got {self.head_dim}, expected an even number (rotary embedding)")
        if self.dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"dtype: got {self.dtype!r}, expected float32 or bfloat16")

    def of_language_model(self, tokenizer: "PreTrainedTokenizerBase") -> dict[str, Any]:
        """Return the settings that transformers' configs of language models share."""
        return {
            "vocab_size": len(tokenizer),
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.ffn_size,
            "max_position_embeddings": self.max_positions,
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        }


def make_tiny_model(path: str | Path, config: TinyModelConfig, *, seed: int) -> int:
    """Write a model directory (config, safetensors, tokenizer, generation config); return the number of parameters."""
    tokenizer = make_byte_tokenizer()
    # Imported here: it takes two seconds, which makers of tokenizers alone need not wait.
    from transformers import Qwen3Config, Qwen3ForCausalLM

    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    sizes = config.of_language_model(tokenizer)
    hf_config = Qwen3Config(
        **sizes, max_window_layers=config.num_layers, rope_parameters=rope, tie_word_embeddings=config.tied
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(hf_config)
    model.to(getattr(torch, config.dtype)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    obey_umask(Path(path))
    return sum(p.numel() for p in model.parameters())


def make_byte_tokenizer() -> "PreTrainedTokenizerBase":
    """Make a tokenizer with a token for each byte, 3 special tokens and 5 whole words; its chat template is ChatML."""
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    backend.add_tokens([AddedToken(t, normalized=False) for t in WORDS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=TURN_END, pad_token=PAD)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


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
