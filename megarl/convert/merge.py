"""Merge adapters into the weights of a Hugging Face model, in float32 and a block of rows at a time."""

from dataclasses import replace
from pathlib import Path

import torch

from megarl.convert.commands import cast_specs, write_hf
from megarl.convert.engine import ConversionOutcome, ConvertSettings
from megarl.convert.models import file_states, open_model
from megarl.convert.readers import SafetensorsReader
from megarl.errors import ConfigError
from megarl.host.streams import print_lines
from megarl.weights.peft_files import ADAPTER_CONFIG, ADAPTER_FILE, PeftAdapters, read_peft
from megarl.weights.safetensors_map import TensorSpec
from megarl.weights.tables import VALUE_HEAD

# Tensors, and rows of each, by which the loss of rounding is estimated.
_SAMPLED_TENSORS, _SAMPLED_ROWS = 8, 256


class MergedReader(SafetensorsReader):
    """A reader of a Hugging Face directory that adds adapters to its tensors, which it then returns in float32."""

    def __init__(self, path: Path, adapters: PeftAdapters) -> None:
        super().__init__(path)
        self._adapters = adapters
        saved = {n: TensorSpec(shape=tuple(t.shape), dtype=t.dtype) for n, t in adapters.replaced.items()}
        # As the base has them, if it has them.
        self.stored = saved | self.found
        merged = {name: replace(self.stored[name], dtype=torch.float32) for name in adapters.updates}
        self.specs = self.stored | saved | merged

    def read_base(self, name: str, row: int, num_rows: int) -> torch.Tensor:
        """Return rows of a tensor without its adapter, in the type in which they are stored."""
        if name in self._adapters.replaced:
            return self._adapters.replaced[name][row : row + num_rows]
        spec = self.found[name]
        rows = torch.empty((num_rows, *spec.shape[1:]), dtype=spec.dtype)
        super().read(name, row, rows)
        return rows

    def read(self, name: str, row: int, out: torch.Tensor) -> None:
        """Fill `out` [rows, ...] with rows of the tensor `name`, starting at `row`."""
        out.copy_(self.read_base(name, row, len(out)))
        if name in self._adapters.updates:
            out += self._adapters.updates[name].rows(row, len(out))


def merge(
    model: Path, adapter: Path, settings: ConvertSettings, *, dtype: str | None = None, dry_run: bool = False
) -> ConversionOutcome | None:
    """Write a Hugging Face directory with adapters merged into its weights, and print what rounding these has cost."""
    base = open_model(model)
    if type(base.reader) is not SafetensorsReader:
        raise ConfigError(
            f"{model}: expected a Hugging Face directory that is not quantised; convert it with megarl convert "
            "mcore-to-hf or dequantize first"
        )
    adapters = read_peft(adapter, base.spec)
    if apart := sorted(adapters.updates.keys() - base.reader.found.keys() - adapters.replaced.keys()):
        raise ConfigError(
            f"{adapter}: has adapters of {apart[0]}, which {model} keeps in one tensor with other experts; export the "
            "run that trained them with actor.lora.export=merged"
        )
    reader, scalar_head = MergedReader(model, adapters), base.scalar_head or VALUE_HEAD in adapters.replaced
    names = base.spec.expected_tensors(scalar_head=scalar_head)
    reader.specs = {name: reader.specs[name] for name in names}
    state = (*base.state, *file_states([adapter / ADAPTER_CONFIG, adapter / ADAPTER_FILE]))
    source = replace(base, reader=reader, scalar_head=scalar_head, state=state)
    target = {name: reader.stored[name] for name in names} if dtype is None else cast_specs(source, dtype)
    outcome = write_hf(source, target, settings, "merge", dry_run=dry_run)
    rounded = [name for name in adapters.updates if target[name].dtype is not torch.float32]
    if outcome is not None and rounded:
        share = _rounding(reader, adapters, rounded[:: -(-len(rounded) // _SAMPLED_TENSORS)], settings.out)
        kind = str(target[rounded[0]].dtype).removeprefix("torch.")
        print_lines(
            f"warning: rounding the weights to {kind} has changed the updates by {share:.1%} of their norm; --dtype "
            "float32 keeps them"
        )
    return outcome


def _rounding(reader: MergedReader, adapters: PeftAdapters, names: list[str], out: Path) -> float:
    """Return the norm of what rounding has added to the updates of some tensors, as a share of their own."""
    written, errors, updates = SafetensorsReader(out), [], []
    for name in names:
        updates.append(adapters.updates[name].rows(0, _SAMPLED_ROWS))
        after = torch.empty(updates[-1].shape, dtype=written.found[name].dtype)
        written.read(name, 0, after)
        errors.append(after.float() - reader.read_base(name, 0, len(after)).float() - updates[-1])
    norms = [torch.stack([each.square().sum() for each in parts]).sum().sqrt() for parts in (errors, updates)]
    return float(norms[0] / norms[1].clamp(min=1e-30))
