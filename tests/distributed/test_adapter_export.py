"""Adapters that are exported: PEFT reads them and computes the same, and megarl reads back every bit."""

import math
import re
from collections.abc import Callable
from functools import reduce
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.config.lora import LoraConfig
from megarl.config.schema import ActorConfig, LayoutConfig, ModelConfig
from megarl.train.export import export_adapters
from megarl.types import FloatArray, Row
from megarl.types.messages import Head, Role, RoleSpec, StoreResult
from megarl.weights.dist_index import read_index
from megarl.weights.families import read_model_spec
from megarl.weights.peft_files import ADAPTER_FILE, create_adapter_files
from tests.helpers.adapter_export_ranks import load_and_write
from tests.helpers.checkpoints import load_hf
from tests.helpers.family_parity import make_rows, split_rows
from tests.helpers.hf_models import make_model
from tests.helpers.rank_pool import RankPool

GetPool = Callable[[int], RankPool]
LAYOUTS = {
    "tp2-sp": LayoutConfig(tp=2, sequence_parallel=True),
    "pp2": LayoutConfig(pp=2, first_stage_layers=3),
    "ep2": LayoutConfig(dp=2, ep=2),
    "tp2-sp-ep2": LayoutConfig(tp=2, ep=2, sequence_parallel=True),
}


def write_adapters(path: Path, model: Path, lora: LoraConfig, *, scalar_head: bool = False) -> Path:
    """A directory in which no tensor is 0."""
    file = create_adapter_files(path, read_model_spec(model), lora, "float32", scalar_head=scalar_head)
    generator = torch.Generator().manual_seed(1)
    save_file({n: 0.1 * torch.randn(t.shape, generator=generator) for n, t in load_file(file).items()}, file)
    return path


class PoolWriters:
    """A pool's ranks as `export_adapters` wants them; keeps the outputs that they computed."""

    def __init__(self, pool: RankPool, role: RoleSpec, rows: list[Row], checkpoint: Path) -> None:
        self._pool, self._role, self._rows, self._checkpoint = pool, role, rows, checkpoint
        self.outputs: dict[int, FloatArray] = {}

    def store_adapters(self, file: Path, *, role: Role) -> StoreResult:
        assert role is self._role.role
        batches = split_rows(len(self._rows), self._role.layout.dp)
        self._checkpoint.mkdir()
        found = self._pool.run(load_and_write, self._role, self._rows, batches, str(file), str(self._checkpoint))
        for outputs, _ in found:
            self.outputs |= outputs
        return reduce(StoreResult.merged, (stored for _, stored in found))


def role_of(model: Path, lora: LoraConfig, layout: LayoutConfig, head: Head) -> RoleSpec:
    return RoleSpec(
        role=Role.ACTOR if head is Head.LM else Role.REWARD,
        model=ModelConfig(path=str(model), dtype="float32", vocab_multiple=4),
        settings=ActorConfig(layout=layout, lora=lora),
        head=head,
    )


@torch.no_grad()
def outputs_of_peft(model: Path, adapters: Path, rows: list[Row], head: Head) -> list[FloatArray]:
    peft = pytest.importorskip("peft", reason="peft, which reads the export, is not installed")
    if head is Head.LM:
        base = load_hf(model)
    else:
        from transformers import AutoModelForSequenceClassification

        base = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float32)
    hf = peft.PeftModel.from_pretrained(base, adapters).eval()
    found = []
    for row in rows:
        tokens, before = torch.from_numpy(row.token_ids), slice(row.num_prompt_tokens - 1, -1)
        if head is Head.LM:
            log_p = hf(tokens[None]).logits[0, before].log_softmax(-1)
            output = log_p.gather(1, tokens[row.num_prompt_tokens :, None])[:, 0]
        else:
            inner = hf.base_model.model
            output = inner.score(inner.model(tokens[None]).last_hidden_state[0, before])[:, 0]
        found.append(output.numpy() * row.loss_mask)
    return found


def check_checkpoint(path: Path, num_trained: int) -> None:
    """It holds what is trained, with an optimizer's two moments and float32 copy of each, and nothing of the base."""
    tensors, _ = read_index(path)
    weights = {key: tensor for key, tensor in tensors.items() if not re.match(r"(chained_\d+\.)?optimizer\.", key)}
    assert all(".lora." in key or key == "value_head.weight" for key in weights)
    assert sum(math.prod(tensor.spec.shape) for tensor in weights.values()) == num_trained
    assert sum(math.prod(tensor.spec.shape) for tensor in tensors.values()) <= 4 * num_trained + len(tensors)
    written = sum(file.stat().st_size for file in path.iterdir())
    assert written < 16 * num_trained + 8192 * len(tensors)


# Experts of another rank, and a scalar head, are what most can go wrong in.
QUICK = {("qwen3_moe", "ep2", Head.LM), ("qwen2", "tp2-sp", Head.SCALAR)}
CASES = [(name, layout, Head.LM) for name in ("qwen2", "qwen3", "phi3", "gemma2") for layout in ("tp2-sp", "pp2")]
CASES += [("qwen3_moe", layout, Head.LM) for layout in ("ep2", "tp2-sp-ep2")] + [("qwen2", "tp2-sp", Head.SCALAR)]


@pytest.mark.parametrize(
    ("name", "layout", "head"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.long) for case in CASES],
)
def test_peft_computes_the_same(rank_pool: GetPool, tmp_path: Path, name: str, layout: str, head: Head) -> None:
    model = make_model(tmp_path / "model", name, tied=True)
    lora = LoraConfig(rank=4, alpha=6.0)
    begun = write_adapters(tmp_path / "begun", model, lora, scalar_head=head is Head.SCALAR)
    role = role_of(model, LoraConfig(rank=4, alpha=6.0, path=str(begun)), LAYOUTS[layout], head)
    writers = PoolWriters(rank_pool(role.layout.world_size), role, make_rows(), tmp_path / "checkpoint")
    export_adapters(writers, role, tmp_path / "export")

    written, given = load_file(tmp_path / "export" / ADAPTER_FILE), load_file(begun / ADAPTER_FILE)
    assert written.keys() == given.keys()
    assert all(torch.equal(written[key], given[key]) for key in given)
    check_checkpoint(tmp_path / "checkpoint" / role.role.value, sum(t.numel() for t in given.values()))
    expected = outputs_of_peft(model, tmp_path / "export", make_rows(), head)
    assert sorted(writers.outputs) == list(range(len(expected)))
    error = max(float(np.abs(writers.outputs[i] - each).max()) for i, each in enumerate(expected))
    assert error <= 1e-5, f"max |Δ| is {error:.2e}"
    assert max(float(np.abs(each).max()) for each in expected) > 0.1
