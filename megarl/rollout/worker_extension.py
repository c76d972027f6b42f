"""Load new weights inside vLLM's workers (one per tensor-parallel rank), through vLLM's layerwise reload.

vLLM imports this module by name in each worker process, so it imports vLLM at the top.
"""

import functools
import math
import os
import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload, meta
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel

from megarl.config.vision import TowerPart
from megarl.errors import WeightSyncError
from megarl.host.device.gloo import close_gloo
from megarl.rollout.cpu_patches import repack_cpu_weights
from megarl.rollout.engine import ADAPTERS_ID, NUM_BEFORE, SEED
from megarl.rollout.prepare import lend_torchvision
from megarl.sync.transport.ends import BridgeReceiver
from megarl.sync.transport.routed import RoutedReceiver
from megarl.sync.transport.transports import ProcessPlan
from megarl.types.seeds import span_seed
from megarl.weights.families import read_model_spec
from megarl.weights.peft_files import PREFIX
from megarl.weights.slices import checksum
from megarl.weights.towers import is_trained

# This process makes its groups later, and imports its model.
close_gloo()
lend_torchvision()
# Parameters that vLLM's models write themselves, without a loader of which a reload knows: it must leave them in place.
WRITTEN_IN_PLACE = frozenset({"sinks"})
meta.SKIP_LOAD_TENSORS.update(WRITTEN_IN_PLACE)
meta.SKIP_TENSORS.update(WRITTEN_IN_PLACE)


class WeightReceiver:
    """A mixin of vLLM's worker class (its `model_runner`, `vllm_config`) that receives weights."""

    def process_id(self) -> int:
        """Return the id of this worker's process."""
        return os.getpid()

    def open_bridge(self, shares: Sequence[bytes]) -> None:
        """Join the weight sync from the trainer's ranks; this worker's part of the plan is one of `shares`."""
        worker: Any = self
        process_plan: ProcessPlan = pickle.loads(shares[worker.rank])
        self.bridge_wire = RoutedReceiver(process_plan, worker.device)
        self.bridge = BridgeReceiver(process_plan, self.bridge_wire, worker.device)

    def load_bridge(
        self, transfer: int, with_checksums: bool, scales: Mapping[str, float], tower: TowerPart | None
    ) -> tuple[dict[str, int], str]:
        """Receive the slices that this worker needs and load them into the model, through tensors of full shape.

        tower: the part of the vision tower that is sent; None: the model has none.

        vLLM's loaders expect full tensors and take this worker's slices. With checksums, all other elements are NaN, so
        that a slice that the plan forgot would spoil every answer.
        """
        checksums = dict[str, int]() if with_checksums else None
        problem = self._load(self._from_bridge(transfer, checksums, scales), tower)
        return checksums or {}, problem

    def load_adapters(
        self, transfer: int, with_checksums: bool, peft: Mapping[str, object]
    ) -> tuple[dict[str, int], str]:
        """Receive the slices of adapters that this worker needs, and put them in the place of those before.

        peft: their adapter_config.json. The result is that of `load_bridge`.
        """
        checksums = dict[str, int]() if with_checksums else None
        try:
            tensors = {f"{PREFIX}{name}": tensor for name, tensor in self._from_bridge(transfer, checksums, {})}
        except WeightSyncError as error:
            return {}, str(error)
        worker: Any = self
        return checksums or {}, replace_adapters(worker.model_runner.lora_manager, tensors, peft, worker.device)

    def _from_bridge(
        self, transfer: int, checksums: dict[str, int] | None, scales: Mapping[str, float]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors as they arrive, without the cast of `sync.dtype`; `checksums` gets those of what was sent."""
        fill = None if checksums is None else math.nan
        try:
            for name, tensor in self.bridge.receive(transfer, fill=fill):
                if checksums is not None:
                    checksums[name] = self.bridge.checksum(name, tensor)
                yield name, self.bridge.restore(name, tensor, scales.get(name), fill=fill)
        except RuntimeError as error:
            # Otherwise the other processes would go on waiting for this worker.
            self.bridge_wire.close()
            raise WeightSyncError(f"the transfer ended early: {error}") from error

    def start_recording(self) -> None:
        """Record what the layers compute from now on; see `megarl bisect`."""
        from megarl.rollout.pass_hooks import ModelHooks

        worker: Any = self
        spec = read_model_spec(worker.vllm_config.model_config.model)
        self.model_hooks = ModelHooks(worker.model_runner.model, spec)

    def stop_recording(self) -> bytes:
        """Return what the layers have computed since `start_recording`, pickled."""
        return pickle.dumps(self.model_hooks.close().values())

    def reseed(self) -> int:
        """Seed the generators of unfinished requests anew (see `span_seed`), and return these requests' tokens so far.

        vLLM's newer runner on CUDA has no generators: its noise is a function of the seed and the position.
        """
        num_tokens = 0
        for request in getattr(self.model_runner, "requests", {}).values():  # type: ignore[attr-defined]
            num_tokens += request.num_tokens
            known = request.sampling_params.extra_args or {}
            if request.generator is not None and request.output_token_ids and SEED in known:
                num_sampled = known[NUM_BEFORE] + len(request.output_token_ids)
                request.generator.manual_seed(span_seed(known[SEED], num_sampled))
        return num_tokens

    def bridge_bytes(self) -> int:
        """Return the number of bytes that came over the wire in the last transfer."""
        return self.bridge.wire_bytes

    @torch.no_grad()
    def held_digests(self) -> dict[str, int]:
        """Return a checksum of each part of the weights that this worker computes with, adapters included, by its name.

        A layer that several tensors of the checkpoint make up has a part for each. CPU kernels have packed copies of
        their weights alone, which come back as what they make of the unit vectors.
        """
        sums = dict[str, int]()
        for name, layer in self.model_runner.model.named_modules():  # type: ignore[attr-defined]
            # Layers with adapters pass questions for others' attributes on to those that they wrap.
            held, own = dict[str, torch.Tensor](layer.named_parameters(recurse=False)), vars(layer)
            if (packed := own.get("cpu_linear")) is not None and not held["weight"].numel():
                num_inputs = own.get("input_size_per_partition") or layer.input_size
                ones = torch.eye(num_inputs, dtype=held["weight"].dtype)
                held["weight"] = packed(ones, held["weight"], None).t()
            for key, adapters in own.items():
                if "_stacked" in key and isinstance(adapters, list | tuple):
                    held |= {f"{key}.{i}": each for i, each in enumerate(adapters)}
            parts = own.get("output_partition_sizes", [])
            for key, tensor in held.items():
                several = len(parts) > 1 and tensor.ndim and len(tensor) == sum(parts)
                cut = {f".{i}": each for i, each in enumerate(tensor.split(parts))} if several else {"": tensor}
                sums |= {f"{name}.{key}{end}": checksum(each, (), tuple(each.shape)) for end, each in cut.items()}
        return sums

    @torch.no_grad()
    def _load(self, source: Iterator[tuple[str, torch.Tensor]], tower: TowerPart | None = None) -> str:
        """Load Hugging Face tensors into the live model, checking that every parameter was filled.

        Returns an error message ("" if all went well). An exception in one of several workers would reach the engine
        without its type, and leave the answers of the others unread.
        """
        model = self.model_runner.model  # type: ignore[attr-defined]
        config = self.vllm_config  # type: ignore[attr-defined]
        problem, unfilled = "", list[str]()
        with set_current_vllm_config(config):
            name_loaders(model)
            initialize_layerwise_reload(model)
            try:
                loaded = model.load_weights(source)
                unfilled = unfilled_layers(model, loaded, tower)
            except (KeyError, ValueError) as error:
                problem = f"the engine does not know a tensor that the trainer sent: {error}"
                # Take part in the rest of the transfer, since the other processes do.
                for _ in source:
                    pass
            except WeightSyncError as error:
                problem = str(error)
            finally:
                # Finalize after an error too, or the engine could never take another sync.
                finalize_layerwise_reload(model, self.model_runner.model_config)  # type: ignore[attr-defined]
                repack_cpu_weights(model)
        if problem or not unfilled:
            return problem
        return (
            f"{len(unfilled)} layers of the engine were not filled by the weights sent: {unfilled[:3]}; "
            f"tensors are missing or named differently"
        )


@torch.no_grad()
def replace_adapters(
    worker_manager: LRUCacheWorkerLoRAManager,
    tensors: dict[str, torch.Tensor],
    peft: Mapping[str, object],
    device: torch.device,
) -> str:
    """Replace a worker's adapters by tensors under PEFT's names, which vLLM scales in place. Return what is wrong.

    peft: their adapter_config.json. vLLM takes what belongs to this worker out of tensors of full shape.
    """
    manager = worker_manager._adapter_manager
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    adapters = LoRAModel.from_lora_tensors(
        ADAPTERS_ID,
        tensors,
        PEFTHelper.from_dict(dict(peft)),
        device=str(device),
        dtype=worker_manager.lora_config.lora_dtype,
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
    )
    manager.remove_adapter(ADAPTERS_ID)
    # Layers that vLLM joins, such as q, k and v, get one entry.
    manager.add_adapter(adapters)
    unknown = sorted(adapters.loras.keys() - manager.modules.keys())
    manager.activate_adapter(ADAPTERS_ID)
    # The layers have copies of their own.
    adapters.loras.clear()
    return f"the engine has no place for adapters of {len(unknown)} layers: {unknown[:3]}" if unknown else ""


def name_loaders(model: torch.nn.Module) -> None:
    """Name the loaders of parameters that are partial functions: vLLM 0.32's reload asks each loader for its name."""
    for parameter in model.parameters():
        loader = getattr(parameter, "weight_loader", None)
        if isinstance(loader, functools.partial):
            loader.__name__ = loader.func.__name__  # type: ignore[attr-defined]


def _storage_of(layer: torch.nn.Module) -> set[int]:
    """Return the addresses of the tensors that a layer computes with; tied layers have one in common."""
    kernel_tensors = get_layerwise_info(layer).kernel_tensors
    parameters = layer.parameters(recurse=False) if kernel_tensors is None else kernel_tensors[0].values()
    return {p.data_ptr() for p in parameters if not p.is_meta} - {0}


def _missing_elements(layer: torch.nn.Module) -> tuple[int, int]:
    """Return (loaded, total) elements of a layer that is only partly loaded, and (0, 0) for a complete layer."""
    info = get_layerwise_info(layer)
    if not info.can_load() or is_deferred_attention_layer(layer):
        return 0, 0
    parameters = layer.named_parameters(recurse=False)
    expected = sum(get_tensor_load_numel(p) for name, p in parameters if name not in WRITTEN_IN_PLACE)
    if isinstance(layer, VocabParallelEmbedding):
        # The rows that pad the vocabulary are never sent.
        padded = layer.shard_indices.num_elements_padded - layer.shard_indices.num_org_elements
        expected -= padded * layer.embedding_dim
    return (0, 0) if info.load_numel >= expected else (info.load_numel, expected)


def unfilled_layers(model: torch.nn.Module, loaded: Collection[str], tower: TowerPart | None = None) -> list[str]:
    """List layers whose loaders consumed fewer elements than their parameters hold, as 'name (got/expected)'.

    loaded: the parameters that vLLM's model says it loaded, by which those are judged that are written in place. tower:
    the part of the vision tower that is sent; the rest keeps what it has.

    A layer that is tied to a filled one counts as filled. Call this after loading and before vLLM finalises the reload,
    which resets the counts of complete layers.
    """
    layers = dict(model.named_modules())
    counts = {name: _missing_elements(layer) for name, layer in layers.items()}
    if tower is not None:
        trained = tuple(model._language_model_names)  # type: ignore[arg-type]
        frozen = {name for name in layers if not (name.startswith(trained) or is_trained(name, tower))}
        counts = {name: each for name, each in counts.items() if name not in frozen or each[0]}
    filled: set[int] = set()
    for name, layer in layers.items():
        if counts.get(name) == (0, 0):
            filled |= _storage_of(layer)
    in_place = [name for name, _ in model.named_parameters() if name.rpartition(".")[2] in WRITTEN_IN_PLACE]
    return [
        f"{name} ({got}/{expected})"
        for name, (got, expected) in counts.items()
        if expected and not (got == 0 and _storage_of(layers[name]) & filled)
    ] + [f"{name} (0/1)" for name in in_place if name not in loaded]
