"""Merge adapters into the weights of a Hugging Face model, in float32 and a block of rows at a time."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megarl.convert.commands import cast_specs, write_hf
from megarl.convert.engine import ConversionOutcome, ConvertSettings
from megarl.convert.models import file_states, open_model
from megarl.convert.readers import SafetensorsReader
from megarl.errors import ConfigError
from megarl.host.streams import print_lines
from megarl.weights.adapters import matrices_of
from megarl.weights.families import ModelSpec
from megarl.weights.peft_files import ADAPTER_CONFIG, ADAPTER_FILE, LowRankUpdate, PeftAdapters, read_peft
from megarl.weights.rules import Partition, WeightRule
from megarl.weights.safetensors_map import TensorSpec
from megarl.weights.tables import VALUE_HEAD

# Tensors, and rows of each, by which the loss of rounding is estimated.
_SAMPLED_TENSORS, _SAMPLED_ROWS = 8, 256


class MergedReader(SafetensorsReader):
    """A reader of a Hugging Face directory that adds adapters to its tensors, which it then returns in float32."""

    def __init__(self, path: Path, spec: ModelSpec, adapters: PeftAdapters) -> None:
        super().__init__(path)
        self._adapters, self._experts = adapters, updates_of_experts(spec, adapters)
        saved = {n: TensorSpec(shape=tuple(t.shape), dtype=t.dtype) for n, t in adapters.replaced.items()}
        # A tensor that both have keeps the base's shape and dtype.
        self.stored = saved | self.found
        self.merged = (*(name for name in adapters.updates if name in self.stored), *self._experts)
        merged = {name: replace(self.stored[name], dtype=torch.float32) for name in self.merged}
        self.specs = self.stored | saved | merged

    def read_base(self, name: str, row: int, num_rows: int) -> torch.Tensor:
        """Return rows of a tensor without its adapter, in the type in which they are stored."""
        if name in self._adapters.replaced:
            return self._adapters.replaced[name][row : row + num_rows]
        spec = self.found[name]
        rows = torch.empty((num_rows, *spec.shape[1:]), dtype=spec.dtype)
        super().read(name, row, rows)
        return rows

    def update(self, name: str, row: int, num_rows: int) -> torch.Tensor:
        """Compute in float32 what is added to rows of a merged tensor. In a tensor of experts, a row is an expert."""
        if name not in self._experts:
            return self._adapters.updates[name].rows(row, num_rows)
        return torch.stack([each.whole() for each in self._experts[name][row : row + num_rows]])

    def read(self, name: str, row: int, out: torch.Tensor) -> None:
        """Fill `out` [rows, ...] with rows of the tensor `name`, starting at `row`."""
        out.copy_(self.read_base(name, row, len(out)))
        if name in self.merged:
            out += self.update(name, row, len(out))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertUpdate:
    """The updates of the matrices that make up one expert's part of a tensor with all experts."""

    rule: WeightRule
    parts: tuple[LowRankUpdate, ...]

    def whole(self) -> torch.Tensor:
        """Compute the expert's update in float32, in the shape of its part."""
        updates = [part.rows(0, len(part.b)) for part in self.parts]
        if self.rule.partition is Partition.GATE_UP_IN_TURNS:
            return torch.stack([update.T for update in updates], dim=-1).flatten(1)
        is_transposed = self.rule.partition is Partition.TRANSPOSED_COLUMNS or self.rule.tensors[0].is_transposed
        return torch.cat(updates).T if is_transposed else torch.cat(updates)


def updates_of_experts(spec: ModelSpec, adapters: PeftAdapters) -> dict[str, list[ExpertUpdate]]:
    """Return the updates of all experts for each tensor of experts that has adapters, by the tensor's name.

    Raises:
        ConfigError: only some of a tensor's experts, or only some of their matrices, have adapters.
    """
    experts: dict[str, list[tuple[WeightRule, list[str]]]] = {}
    for placed in spec.rules():
        stacked = [placed.name(tensor.name) for tensor in placed.rule.tensors if tensor.of_expert]
        if stacked and len(placed.rule.tensors[0].shape) == 2:
            modules = [f"{placed.name(matrix.name)}.weight" for matrix in matrices_of(placed.rule)]
            experts.setdefault(stacked[0], []).append((placed.rule, modules))
    found = {}
    for name, parts in experts.items():
        needed = [module for _, modules in parts for module in modules]
        missing = [module for module in needed if module not in adapters.updates]
        if missing and len(missing) < len(needed):
            raise ConfigError(
                f"{adapters.path}: has adapters of some parts of {name}, but not of {missing[0]}; export again"
            )
        if not missing:
            found[name] = [
                ExpertUpdate(rule=rule, parts=tuple(adapters.updates[module] for module in modules))
                for rule, modules in parts
            ]
    return found


def merge(
    model: Path, adapter: Path, settings: ConvertSettings, *, dtype: str | None = None, dry_run: bool = False
) -> ConversionOutcome | None:
    """Write a Hugging Face directory with adapters merged into its weights, and warn of updates lost to rounding."""
    base = open_model(model)
    if type(base.reader) is not SafetensorsReader:
        raise ConfigError(
            f"{model}: expected a Hugging Face directory that is not quantised; convert it with megarl convert "
            "mcore-to-hf or dequantize first"
        )
    adapters = read_peft(adapter, base.spec)
    if named := adapters.other_base(base.spec):
        print_lines(f"warning: the adapters were trained on {named}, by {ADAPTER_CONFIG}; is that {model}?")
    if not adapters.replaced and not any(update.b.any() for update in adapters.updates.values()):
        print_lines(f"warning: {adapter}: every B is 0, so that they change nothing; name trained ones")
    reader, scalar_head = MergedReader(model, base.spec, adapters), base.scalar_head or VALUE_HEAD in adapters.replaced
    names = base.spec.expected_tensors(scalar_head=scalar_head)
    reader.specs = {name: reader.specs[name] for name in names}
    state = (*base.state, *file_states([adapter / ADAPTER_CONFIG, adapter / ADAPTER_FILE]))
    source = replace(base, reader=reader, scalar_head=scalar_head, state=state)
    target = {name: reader.stored[name] for name in names} if dtype is None else cast_specs(source, dtype)
    outcome = write_hf(source, target, settings, "merge", dry_run=dry_run)
    rounded = [name for name in reader.merged if target[name].dtype is not torch.float32]
    if outcome is not None and rounded:
        share = _rounding(reader, rounded[:: -(-len(rounded) // _SAMPLED_TENSORS)], settings.out)
        kind = str(target[rounded[0]].dtype).removeprefix("torch.")
        print_lines(
            f"warning: rounding the weights to {kind} has changed the updates by {share:.1%} of their norm; --dtype "
            "float32 keeps them"
        )
    return outcome


def _rounding(reader: MergedReader, names: list[str], out: Path) -> float:
    """Return the norm of the rounding errors in some tensors, as a share of the norm of their updates."""
    written, errors, updates = SafetensorsReader(out), [], []
    for name in names:
        updates.append(reader.update(name, 0, 1 if len(reader.specs[name].shape) > 2 else _SAMPLED_ROWS))
        after = torch.empty(updates[-1].shape, dtype=written.found[name].dtype)
        written.read(name, 0, after)
        errors.append(after.float() - reader.read_base(name, 0, len(after)).float() - updates[-1])
    norms = [torch.stack([each.square().sum() for each in parts]).sum().sqrt() for parts in (errors, updates)]
    return float(norms[0] / norms[1].clamp(min=1e-30))
