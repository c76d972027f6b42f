"""Small models that read images, with all files of their processors; rows with images, and transformers' answers."""

import copy
import hashlib
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from megarl.types import FloatArray, Row
from megarl.types.forks import Fork
from megarl.types.images import RowImage, shifted
from megarl.vision.reader import ImageReader
from megarl.vision.store import ImageStore
from megarl.vision.torchvision_part import import_torchvision
from tests.helpers.rank_pool import RankContext

MARKS = (
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    *("<|begin_of_image|>", "<|end_of_image|>", "<|image|>", "<|begin_of_video|>", "<|end_of_video|>", "<|video|>"),
    *("<img>", "</img>", "<IMG_CONTEXT>", "<video>", "<start_of_image>", "<end_of_image>", "<image_soft_token>"),
)
_TEXT = {
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "pad_token_id": None,
    "eos_token_id": 1,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_INTERLEAVED = {**_ROPE, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
_QWEN_IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.6, 0.7],
}
_VIT = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_QWEN_VISION = {"depth": 3, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
_QWEN_IDS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
# ChatML, in which a turn is a text or a list of parts.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}MARK{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_QWEN_MARK = "<|vision_start|><|image_pad|><|vision_end|>"
# Not square, as transformers tells by the shape which axis comes first, and what vLLM does not pad on CPUs.
_EXPERTS = {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
_DELTA = {
    **_TEXT,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "rope_parameters": {**_INTERLEAVED, "partial_rotary_factor": 0.5},
}
# Its heads have the width that its hidden size leaves.
_QWEN2 = {
    **{key: value for key, value in _TEXT.items() if key != "head_dim"},
    "hidden_size": 128,
    "use_sliding_window": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionModel:
    """Names of transformers' config and model; settings; how an image is written in a prompt; marks that the tokenizer
    has under names.
    """

    config: str
    model: str
    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    ids: Mapping[str, str]
    images: Mapping[str, Any]
    processor: Mapping[str, Any]
    mark: str
    whole: Mapping[str, Any] = field(default_factory=dict)
    video: str = ""
    tokens: Mapping[str, str] = field(default_factory=dict)
    # Whether several have one token.
    line_feeds: bool = False
    # How published files have the experts of a layer: in one tensor, perhaps with inputs before outputs. Transformers
    # reads that, but writes them apart, or with outputs first.
    experts: Literal["apart", "stacked", "transposed"] = "apart"


def _qwen3(name: str, text: Mapping[str, Any], vision: Mapping[str, Any]) -> VisionModel:
    return VisionModel(
        config=f"{name}Config",
        model=f"{name}ForConditionalGeneration",
        text=text,
        vision={**_QWEN_VISION, "patch_size": 16, "num_position_embeddings": 64, **vision},
        ids=_QWEN_IDS,
        images={**_QWEN_IMAGES, "patch_size": 16, "size": {"shortest_edge": 4 * 32**2, "longest_edge": 64 * 32**2}},
        processor={"processor_class": "Qwen3VLProcessor"},
        video="Qwen3VLVideoProcessor",
        mark=_QWEN_MARK,
    )


# By megarl's name of the family.
VISION = {
    "qwen2_5_vl": VisionModel(
        config="Qwen2_5_VLConfig",
        model="Qwen2_5_VLForConditionalGeneration",
        text={**_QWEN2, "rope_parameters": {**_ROPE, "mrope_section": [4, 6, 6]}},
        vision={
            **_QWEN_VISION,
            "out_hidden_size": 128,
            "patch_size": 14,
            "window_size": 56,
            "fullatt_block_indexes": [1],
        },
        ids=_QWEN_IDS,
        images={**_QWEN_IMAGES, "patch_size": 14, "size": {"shortest_edge": 4 * 28**2, "longest_edge": 64 * 28**2}},
        processor={"processor_class": "Qwen2_5_VLProcessor"},
        video="Qwen2VLVideoProcessor",
        mark=_QWEN_MARK,
    ),
    "qwen3_vl": _qwen3("Qwen3VL", {**_TEXT, "rope_parameters": _INTERLEAVED}, {"deepstack_visual_indexes": [0, 1]}),
    "qwen3_vl_moe": replace(
        _qwen3(
            "Qwen3VLMoe",
            {**_TEXT, **_EXPERTS, "rope_parameters": _INTERLEAVED, "tie_word_embeddings": False},
            {"deepstack_visual_indexes": [0, 1]},
        ),
        experts="transposed",
    ),
    "qwen3_5": _qwen3("Qwen3_5", _DELTA, {}),
    "qwen3_5_moe": replace(
        _qwen3("Qwen3_5Moe", {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 32}, {}), experts="stacked"
    ),
    "mistral3": VisionModel(
        config="Mistral3Config",
        model="Mistral3ForConditionalGeneration",
        text={**_TEXT, "model_type": "mistral", "sliding_window": None, "rope_parameters": _ROPE},
        vision={
            "model_type": "pixtral",
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "head_dim": 16,
            "image_size": 112,
            "patch_size": 14,
            "rope_parameters": _ROPE,
        },
        ids={"image_token_index": "[IMG]"},
        whole={"spatial_merge_size": 2},
        images={
            "image_processor_type": "PixtralImageProcessor",
            "size": {"longest_edge": 112},
            "patch_size": {"height": 14, "width": 14},
        },
        processor={
            "processor_class": "PixtralProcessor",
            "patch_size": 14,
            "spatial_merge_size": 2,
            "image_token": "[IMG]",
            "image_break_token": "[IMG_BREAK]",
            "image_end_token": "[IMG_END]",
        },
        mark="[IMG]",
    ),
    "internvl_qwen3": VisionModel(
        config="InternVLConfig",
        model="InternVLForConditionalGeneration",
        text={**_TEXT, "model_type": "qwen3", "use_sliding_window": False, "rope_parameters": _ROPE},
        vision={**_VIT, "image_size": [56, 56], "patch_size": [14, 14]},
        ids={"image_token_id": "<IMG_CONTEXT>"},
        whole={"image_seq_length": 4},
        # Wide pictures are read in several squares.
        images={
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": {"height": 56, "width": 56},
            "crop_to_patches": True,
            "min_patches": 1,
            "max_patches": 4,
        },
        processor={"processor_class": "InternVLProcessor", "image_seq_length": 4},
        video="InternVLVideoProcessor",
        mark="<IMG_CONTEXT>",
        tokens={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    ),
    "glm4v_moe": VisionModel(
        config="Glm4vMoeConfig",
        model="Glm4vMoeForConditionalGeneration",
        text={
            **_TEXT,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            # Published, and read by vLLM alone.
            "use_qk_norm": False,
            "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3]},
        },
        vision={**_QWEN_VISION, "patch_size": 14, "image_size": 56},
        ids={
            "image_token_id": "<|image|>",
            "video_token_id": "<|video|>",
            "image_start_token_id": "<|begin_of_image|>",
            "image_end_token_id": "<|end_of_image|>",
        },
        images={
            **_QWEN_IMAGES,
            "image_processor_type": "Glm4vImageProcessor",
            "patch_size": 14,
            # Of two frames.
            "size": {"shortest_edge": 8 * 28**2, "longest_edge": 128 * 28**2},
        },
        processor={"processor_class": "Glm4vProcessor"},
        video="Glm4vVideoProcessor",
        mark="<|begin_of_image|><|image|><|end_of_image|>",
    ),
    "gemma3": VisionModel(
        config="Gemma3Config",
        model="Gemma3ForConditionalGeneration",
        text={
            **_TEXT,
            "query_pre_attn_scalar": 32,
            # Smaller than an image.
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "sliding_attention": {**_ROPE, "rope_theta": 100.0},
                "full_attention": {**_ROPE, "rope_type": "linear", "factor": 4.0},
            },
            "tie_word_embeddings": True,
        },
        vision={**_VIT, "image_size": 56, "patch_size": 7, "vision_use_head": False},
        ids={
            "image_token_index": "<image_soft_token>",
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
        },
        whole={"mm_tokens_per_image": 16, "tie_word_embeddings": True},
        images={
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": 56, "width": 56},
            "image_seq_length": 16,
        },
        processor={"processor_class": "Gemma3Processor", "image_seq_length": 16},
        mark="<start_of_image>",
        tokens={
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
        line_feeds=True,
    ),
}
VISION["internvl_qwen2"] = replace(
    VISION["internvl_qwen3"], text={**_QWEN2, "model_type": "qwen2", "rope_parameters": _ROPE}
)


@torch.no_grad()
def make_vision_model(path: Path, family: str) -> Path:
    """Write a random model as it is published, far from uniform, with tokenizer and processor."""
    import transformers
    from tokenizers import AddedToken

    from megarl_lab.recipes.tiny_model import make_byte_tokenizer

    described, tokenizer = VISION[family], make_byte_tokenizer()
    marks = [AddedToken(mark, special=True, normalized=False) for mark in MARKS]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    if described.line_feeds:
        tokenizer.add_tokens([AddedToken("\n" * count, normalized=False) for count in (1, 2, 3, 4)])
    tokenizer.chat_template = CHAT_TEMPLATE.replace("MARK", described.mark)
    config = getattr(transformers, described.config)(
        text_config=copy.deepcopy(described.text),
        vision_config=copy.deepcopy(described.vision),
        **{name: tokenizer.convert_tokens_to_ids(mark) for name, mark in described.ids.items()},
        **{"tie_word_embeddings": False, **described.whole},
    )
    torch.manual_seed(0)
    model = getattr(transformers, described.model)(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 0.7 / parameter[0].numel() ** 0.5)
        elif name.endswith("bias"):
            parameter.normal_(0, 0.1)
        else:
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.get_input_embeddings().weight.normal_()
    model.lm_head.weight.normal_(0, 3 / described.text["hidden_size"] ** 0.5)
    model.save_pretrained(path)
    if described.experts != "apart":
        tensors = {
            name: each for name, each in load_file(path / "model.safetensors").items() if ".experts." not in name
        }
        tensors |= {name: each for name, each in model.named_parameters() if ".experts." in name}
        tensors = transposed_experts(tensors) if described.experts == "transposed" else tensors
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(path)
    if described.tokens:
        own = json.loads((file := path / "tokenizer_config.json").read_text())
        file.write_text(json.dumps({**own, **described.tokens, "extra_special_tokens": dict(described.tokens)}))
    (path / "preprocessor_config.json").write_text(json.dumps({**described.images, **described.processor}))
    (path / "processor_config.json").write_text(json.dumps(described.processor))
    if described.video:
        video = {key: value for key, value in described.images.items() if key != "image_processor_type"}
        (path / "video_preprocessor_config.json").write_text(
            json.dumps({**video, "video_processor_type": described.video})
        )
    return path


def transposed_experts(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors with those of experts as published files have them."""
    return {name: each.mT.contiguous() if ".mlp.experts." in name else each for name, each in tensors.items()}


def picture(seed: int, width: int, height: int) -> bytes:
    """A smooth picture as PNG."""
    coarse = np.random.default_rng(seed).integers(0, 255, (max(2, height // 16), max(2, width // 16), 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(out, "PNG")
    return out.getvalue()


# Two of one size, and another.
PICTURES = {"A": picture(1, 98, 70), "B": picture(2, 98, 70), "C": picture(3, 60, 120)}


class VisionCase:
    """A model, a store with the pictures, and rows that show them."""

    def __init__(self, path: Path, family: str, store: Path) -> None:
        self.path, self.store = make_vision_model(path, family), ImageStore(store)
        self.digests = {self.store.put(data): name for name, data in PICTURES.items()}
        self.family = family
        self.reader, self.mark = ImageReader(self.path, self.store), VISION[family].mark

    def row(self, pieces: Sequence[str | int], seed: int) -> Row:
        """Make a row of texts, marks of images ("A", …) among them, and numbers of sampled tokens."""
        rng, tokens, sampled, images = np.random.default_rng(seed), list[int](), list[bool](), list[RowImage]()
        for piece in pieces:
            if isinstance(piece, int):
                tokens += rng.integers(10, 200, piece).tolist()
                sampled += [True] * piece
                continue
            before, _, after = self.mark.partition(self.reader.processor.image_token)
            for text in (before, piece, after) if piece in PICTURES else (piece,):
                ids = self.reader.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
                if text in PICTURES:
                    digest = hashlib.sha256(PICTURES[text]).hexdigest()
                    found = self.reader.read(digest)
                    ids, places = found.token_ids, (len(tokens) + np.flatnonzero(found.is_feature)).astype(np.int32)
                    images.append(RowImage(places=places, digest=digest, grid=found.grid))
                tokens += ids
                sampled += [False] * len(ids)
        start = sampled.index(True)
        return Row(
            uid=" ".join(map(str, pieces)),
            sample_index=seed,
            token_ids=np.array(tokens, np.int32),
            num_prompt_tokens=start,
            loss_mask=np.array(sampled[start:]),
            images=tuple(images),
        )

    def rows(self) -> list[Row]:
        """Make rows without an image, with one that others show as well, with several, and in replies."""
        shown = [
            ("plain words only", 6),
            ("look ", "A", " what?", 8),
            ("look ", "A", " what?", 5),
            ("look ", "B", " what?", 7),
            ("A", " and ", "B", " compare", 9),
            ("use a tool", 5, "shot ", "C", " end", 5),
            ("A", " x", 6, "then ", "B", ".", 6),
            ("a longer text without any picture", 20),
        ]
        return [self.row(pieces, seed) for seed, pieces in enumerate(shown)]

    def branches(self) -> list[Row]:
        """Make two rows that begin alike, with an image, of which one goes on with another; and a third of text."""
        one, two = ("look ", "A", " what?", 8), ("look ", "A", " what?", 3, "then ", "B", ".", 4)
        return [self.row(one, 1), self.row(two, 2), self.row(("plain words only", 6), 3)]

    def inputs(self, row: Row) -> dict[str, Any]:
        """Return what transformers' model gets for a row; images of one row have one size."""
        shown = torch.zeros(1, row.num_tokens, dtype=torch.long)
        tensors = [self.reader.read(image.digest).tensors for image in row.images]
        for image in row.images:
            shown[0, image.places] = 1
        given = {name: torch.cat([each[name] for each in tensors]) for name in (tensors[0] if tensors else ())}
        if "image_grid_thw" in given:
            given["mm_token_type_ids"] = shown
        elif row.images and self.family == "gemma3":
            given["token_type_ids"] = shown
        return {"input_ids": torch.from_numpy(row.token_ids).long()[None], **given}

    def logprobs(self, logits: torch.Tensor, row: Row) -> torch.Tensor:
        """Return those of a row's labels, 0 where they are not trained on."""
        labels = torch.from_numpy(row.label_ids).long()[:, None]
        log_p = logits.float().log_softmax(-1)[row.num_prompt_tokens - 1 : -1].gather(1, labels)[:, 0]
        return log_p * torch.from_numpy(row.loss_mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Rows with images, and what transformers makes of them. norm: that of all gradients."""

    path: Path
    store: str
    rows: list[Row]
    logprobs: list[FloatArray]
    gradients: dict[str, torch.Tensor]
    norm: float


def forked(one: Row, other: Row) -> Row:
    """Return two rows with the same prompt as one that forks after it."""
    n, images = one.num_prompt_tokens, [each for each in other.images if each.places[0] >= one.num_prompt_tokens]
    return replace(
        one,
        token_ids=np.concatenate([one.token_ids, other.token_ids[n:]]),
        loss_mask=np.concatenate([one.loss_mask, other.loss_mask]),
        forks=(Fork(one.num_tokens, n - 1),),
        images=(*one.images, *shifted(images, one.num_tokens - n)),
    )


def ask_transformers(
    context: RankContext, family: str, directory: Path, *, forks: bool = False, chosen: Sequence[int] = range(8)
) -> Answers:
    """Run transformers row by row, in a process of its own: there it finds torchvision.

    forks: return two rows as one that forks. chosen: the rows otherwise, in this order.
    """
    import_torchvision()
    from tests.helpers.family_parity import _gradients, load_transformers

    case = VisionCase(directory / "model", family, directory / "images")
    rows = case.branches() if forks else [case.rows()[i] for i in chosen]
    hf, found = load_transformers(case.path), list[FloatArray]()
    num_tokens = sum(row.num_loss_tokens for row in rows)
    for row in rows:
        logprobs = case.logprobs(hf(**case.inputs(row)).logits[0], row)
        (-logprobs.sum() / num_tokens).backward()
        found.append(logprobs.detach().numpy())
    if forks:
        (one, other, *rest), (a, b, *others) = rows, found
        rows, found = [forked(one, other), *rest], [np.concatenate([a, b]), *others]
    gradients = _gradients(hf)
    if VISION[family].experts == "transposed":
        gradients = transposed_experts(gradients)
    norm = math.sqrt(sum(each.grad.square().sum().item() for each in hf.parameters() if each.grad is not None))
    return Answers(
        path=case.path,
        store=str(case.store.directory),
        rows=rows,
        logprobs=found,
        gradients=gradients,
        norm=norm,
    )


def ask_with_stray_placeholders(
    context: RankContext, family: str, directory: Path
) -> tuple[list[Row], list[FloatArray]]:
    """Return rows whose policy sampled the placeholder of images, before a later image, and their log-probs.

    Transformers counts placeholders, so its language model gets embeddings, and positions by what shows an image.
    """
    import_torchvision()
    from tests.helpers.family_parity import load_transformers

    case = VisionCase(directory / "model", family, directory / "images")
    rows, found, hf = list[Row](), list[FloatArray](), load_transformers(case.path)
    for row in case.rows()[5:7]:
        tokens = row.token_ids.copy()
        tokens[row.num_prompt_tokens] = case.reader.processor.image_token_id
        rows.append(replace(row, token_ids=tokens))
        given = case.inputs(rows[-1])
        ids, shown, grids = given["input_ids"], given["mm_token_type_ids"], given["image_grid_thw"]
        with torch.no_grad():
            read = hf.model.get_image_features(given["pixel_values"], grids, return_dict=True)
            features, places = torch.cat([*read.pooler_output]), (shown == 1).nonzero(as_tuple=True)
            embeddings = hf.get_input_embeddings()(ids).index_put(places, features)
            positions, _ = hf.model.get_rope_index(ids, shown, image_grid_thw=grids)
            hidden = hf.model.language_model(
                inputs_embeds=embeddings,
                position_ids=positions,
                visual_pos_masks=shown == 1,
                deepstack_visual_embeds=[torch.cat([*each]) for each in read.deepstack_features],
            ).last_hidden_state
            found.append(case.logprobs(hf.lm_head(hidden)[0], rows[-1]).numpy())
    return rows, found


def make_rows(context: RankContext, family: str, directory: Path) -> list[Row]:
    """Make a model, a store, and rows with images, in a process of its own."""
    import_torchvision()
    return VisionCase(directory / "model", family, directory / "images").rows()


@torch.no_grad()
def score_sequences(
    context: RankContext, family: str, directory: Path, model: Path, rows: Sequence[Row]
) -> list[FloatArray]:
    """Return what transformers' model in `model` makes of all tokens of rows but the first."""
    import_torchvision()
    from tests.helpers.family_parity import load_transformers

    case, hf, found = VisionCase(directory / "model", family, directory / "images"), load_transformers(model), []
    for row in rows:
        ids = torch.from_numpy(row.token_ids).long()
        log_p = hf(**case.inputs(row)).logits[0].float().log_softmax(-1)
        found.append(log_p[:-1].gather(1, ids[1:, None])[:, 0].numpy())
    return found
