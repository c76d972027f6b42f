"""A checkpoint laid out as gpt-oss is published: experts in MXFP4 become bfloat16, as transformers reads them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megarl.convert.commands import dequantize, hf_to_mcore
from megarl.convert.engine import ConvertSettings
from megarl.convert.verify import verify
from megarl.errors import ConfigError, DataError
from megarl.weights.families import read_model_spec
from tests.helpers.hf_models import assert_same_bits, make_model, read_tensors

PACKED = ("gate_up_proj", "down_proj")


def settings(out: Path, workers: int = 1) -> ConvertSettings:
    return ConvertSettings(out=out, num_workers=workers)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Blocks of random codes; scales between 2⁻⁸ and 1."""
    path = tmp_path_factory.mktemp("published")
    make_model(path, "gpt_oss", tied=False, dtype="bfloat16", hidden_size=64, intermediate_size=32)
    generator, tensors = torch.Generator().manual_seed(0), load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(PACKED)]:
        num_experts, num_in, num_out = tensors.pop(name).shape
        shape = (num_experts, num_out, num_in // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        tensors[f"{name}_scales"] = torch.randint(119, 128, shape, dtype=torch.uint8, generator=generator)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (path / "config.json").write_text(json.dumps(config))
    return path


def expected_tensors(published: Path) -> dict[str, torch.Tensor]:
    tensors = read_tensors(published)
    for blocks in [name for name in tensors if name.endswith("_blocks")]:
        name = blocks.removesuffix("_blocks")
        tensors[name] = convert_moe_packed_tensors(tensors.pop(blocks), tensors.pop(f"{name}_scales"))
    return tensors


@pytest.mark.parametrize("workers", [2])
def test_experts_are_those_that_transformers_reads(published: Path, tmp_path: Path, workers: int) -> None:
    out = tmp_path / "out"
    dequantize(published, settings(out, workers))
    assert_same_bits(read_tensors(out), expected_tensors(published))
    config = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    assert read_model_spec(out).dims == read_model_spec(published, quantized=("mxfp4",)).dims


def test_megatron_checkpoints_are_made_of_it_at_once(published: Path, tmp_path: Path) -> None:
    hf_to_mcore(published, settings(tmp_path / "dist"))
    dequantize(published, settings(tmp_path / "hf"))
    for first, second in (("dist", "hf"), ("hf", "dist")):
        found = verify(tmp_path / first, tmp_path / second, model=None, num_workers=1)
        assert (found.problems, found.num_tensors) == ((), len(expected_tensors(published)))


def test_a_piece_may_be_one_expert(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that memory does not depend on the number of experts: one's gate and up are 64 × 64 of two bytes."""
    monkeypatch.setattr("megarl.convert.plan.PIECE_BYTES", 64 * 64 * 2)
    outcome = dequantize(published, settings(tmp_path / "out"))
    assert outcome is not None
    # Of five layers with six experts.
    assert outcome.num_pieces > 5 * 6
    assert_same_bits(read_tensors(tmp_path / "out"), expected_tensors(published))


def test_what_is_not_in_mxfp4_is_refused(published: Path, tmp_path: Path) -> None:
    dequantize(published, settings(tmp_path / "out"))
    with pytest.raises(ConfigError, match="names no quant_method 'mxfp4'"):
        dequantize(tmp_path / "out", settings(tmp_path / "again"))


def test_blocks_without_their_scales_are_refused(published: Path, tmp_path: Path) -> None:
    tensors = read_tensors(published)
    name = "model.layers.2.mlp.experts.down_proj"
    tensors[f"{name}_scales"] = tensors[f"{name}_scales"][..., :0]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((published / "config.json").read_text())
    message = rf"{name}_blocks: got shape \(6, 64, 1, 16\), expected .*, got \(6, 64, 0\)"
    with pytest.raises(DataError, match=message):
        dequantize(tmp_path, settings(tmp_path / "out"))
