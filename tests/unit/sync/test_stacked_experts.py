"""Experts that checkpoints stack reach engines one by one, although gates and ups lie apart in the trainer."""

import math
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from megarl.sync.plan.build import WeightMessage, build_plan
from megarl.sync.plan.engine_shards import engine_needs
from megarl.sync.transport.ends import BridgeSender, holding_of
from megarl.sync.transport.transports import ProcessPlan, pack
from megarl.weights.boxes import slices_of
from megarl.weights.families import ModelSpec, read_model_spec
from megarl.weights.safetensors_map import TensorSpec
from megarl.weights.slices import ShardPosition, Slice, checksum, shard_slices
from tests.helpers.small_model import write_config

EXPERTS, HIDDEN, FFN, EP, ENGINE_TP = 4, 6, 8, 2, 2
HF = "model.layers.0.mlp.experts."


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    sizes = {"num_hidden_layers": 1, "hidden_size": HIDDEN, "intermediate_size": FFN, "num_local_experts": EXPERTS}
    options = {"num_experts_per_tok": 2, "attention_bias": True, "rms_norm_eps": 1e-5}
    return read_model_spec(write_config(tmp_path, architectures=["GptOssForCausalLM"], **sizes, **options))


class _Recorder:
    """A transport that keeps the bytes of each message."""

    def __init__(self) -> None:
        self.sent: dict[WeightMessage, torch.Tensor] = {}

    def send(self, message: WeightMessage, parts: Iterable[torch.Tensor]) -> None:
        pack(parts, self.sent.setdefault(message, torch.zeros(message.num_bytes, dtype=torch.uint8)))

    def start(self, transfer: int) -> None: ...

    def flush(self) -> None: ...


def slices_of_rank(spec: ModelSpec, full: dict[str, torch.Tensor], rank: int) -> list[Slice]:
    """Megatron's parameters of two experts, made from the full tensors by hand."""
    parameters, count = [], EXPERTS // EP
    for i in range(count):
        of = {kind: full[f"{HF}{rank * count + i}.{kind}"] for kind in ("gate_up_proj", "down_proj")}
        biases = {kind: full[f"{HF}{rank * count + i}.{kind}_bias"] for kind in of}
        apart, turns = of["gate_up_proj"].T, biases["gate_up_proj"]
        name = f"decoder.layers.0.mlp.experts.local_experts.{i}."
        parameters += [
            (f"{name}linear_fc1.weight", torch.cat([apart[::2], apart[1::2]])),
            (f"{name}linear_fc1.bias", torch.cat([turns[::2], turns[1::2]])),
            (f"{name}linear_fc2.weight", of["down_proj"].T.contiguous()),
            (f"{name}linear_fc2.bias", biases["down_proj"].clone()),
        ]
    at = ShardPosition(tp_rank=0, tp_size=1, replica=0, num_replicas=1)
    experts_at = ShardPosition(tp_rank=0, tp_size=1, replica=0, num_replicas=1, ep_rank=rank, ep_size=EP)
    return list(shard_slices(parameters, spec, at, experts_at, by_expert=True))


@pytest.mark.parametrize("expert_parallel", [False, True], ids=["engine tp", "engine ep"])
@pytest.mark.parametrize("block_bytes", [64, 1 << 20], ids=["rows", "whole"])
def test_every_worker_gets_its_part_of_each_expert(spec: ModelSpec, expert_parallel: bool, block_bytes: int) -> None:
    shapes = {n: s for n, s in spec.expected_tensors(by_expert=True).items() if n.startswith(HF)}
    full = {name: torch.randn(shape) for name, shape in shapes.items()}
    ranks = [slices_of_rank(spec, full, rank) for rank in range(EP)]
    specs = {name: TensorSpec(shape=shape, dtype=torch.float32) for name, shape in shapes.items()}
    every = engine_needs(spec, ENGINE_TP, expert_parallel=expert_parallel)
    needs = [{n: boxes for n, boxes in each.items() if n in shapes} for each in every]
    assert len(needs[0]) == len(shapes) // (2 if expert_parallel else 1)
    plan = build_plan(
        specs,
        {rank: holding_of(slices, shapes) for rank, slices in enumerate(ranks)},
        {EP + i: each for i, each in enumerate(needs)},
        neighbours={},
        bucket_bytes=4 * block_bytes,
    )
    received = [{name: torch.full(shapes[name], math.nan) for name in each} for each in needs]
    sums = [defaultdict[str, int](int) for _ in needs]
    for rank, slices in enumerate(ranks):
        messages = tuple(message for message in plan.messages if message.source == rank)
        process_plan = ProcessPlan(messages=messages, specs=specs, needs={}, segments="", rendezvous=cast(Any, None))
        transport = _Recorder()
        for receiver, by_name in (
            BridgeSender(process_plan, cast(Any, transport)).send(slices, 1, with_checksums=True).items()
        ):
            for name, value in by_name.items():
                sums[receiver - EP][name] += value
        for message, data in transport.sent.items():
            for part in message.parts:
                target = received[message.receiver - EP][part.tensor][slices_of(part.box)]
                target.copy_(data[part.offset :][: target.nbytes].view(torch.float32).view(target.shape))
    for each, tensors, sent in zip(needs, received, sums, strict=True):
        for name, (box,) in each.items():
            mine = slices_of(box)
            assert torch.equal(tensors[name][mine], full[name][mine]), name
            assert int(tensors[name].isfinite().sum()) == tensors[name][mine].numel()
            assert sent[name] % (1 << 64) == checksum(full[name][mine], mine, shapes[name])
