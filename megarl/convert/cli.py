"""Define the command `megarl convert`, and run the same conversions for the scripts in tools/."""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.host.exit_codes import EXIT_FAILED, exit_on_errors
from megarl.host.streams import print_lines

# One process per core, up to a number that keeps most storage busy.
_NUM_WORKERS = min(8, len(os.sched_getaffinity(0)))
_WORKERS: Mapping[str, Mapping[str, Any]] = {
    "--workers": {
        "type": int,
        "default": _NUM_WORKERS,
        "metavar": "N",
        "help": "processes (default: one per core, at most 8)",
    }
}
_OUTPUT: Mapping[str, Mapping[str, Any]] = {
    "--out": {"type": Path, "required": True, "help": "directory to write; what was begun is continued"},
    "--dtype": {"choices": ("float32", "float16", "bfloat16"), "help": "of the weights (default: as they are)"},
    "--dry-run": {"action": "store_true", "help": "check, print sizes; write nothing"},
    "--overwrite": {"action": "store_true", "help": "replace --out"},
    **_WORKERS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertCommand:
    """One conversion command: its help text, its arguments as `add_argument` takes them, and the function it runs."""

    text: str
    arguments: Mapping[str, Mapping[str, Any]]
    run: Callable[[argparse.Namespace], None]


def add_convert(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command `convert` to `megarl`: between Hugging Face and Megatron, `dequantize`, `merge`, and `verify`."""
    convert = commands.add_parser("convert", help="convert checkpoints between Hugging Face and Megatron, or compare")
    kinds = convert.add_subparsers(dest="kind", required=True)
    for name, command in COMMANDS.items():
        parser = kinds.add_parser(name, help=command.text, description=command.text)
        for argument, options in command.arguments.items():
            parser.add_argument(argument, **options)
        parser.set_defaults(run=command.run)


def script(name: str, argv: Sequence[str] | None = None) -> None:
    """Run the conversion command `name` as a script, such as tools/convert_hf_to_mcore.py, without `megarl convert`."""
    command = COMMANDS[name]
    parser = argparse.ArgumentParser(description=command.text)
    for argument, options in command.arguments.items():
        parser.add_argument(argument, **options)
    arguments = parser.parse_args(argv)
    with exit_on_errors():
        command.run(arguments)


# The functions below import heavy modules only when their command runs.


def _hf_to_mcore(arguments: argparse.Namespace) -> None:
    from megarl.convert.commands import hf_to_mcore
    from megarl.convert.engine import ConvertSettings

    hf_to_mcore(
        arguments.model,
        ConvertSettings(out=arguments.out, num_workers=arguments.workers, overwrite=arguments.overwrite),
        dtype=arguments.dtype,
        vocab_multiple=arguments.vocab_multiple,
        dry_run=arguments.dry_run,
    )


def _mcore_to_hf(arguments: argparse.Namespace) -> None:
    from megarl.convert.commands import mcore_to_hf
    from megarl.convert.engine import ConvertSettings

    mcore_to_hf(
        arguments.checkpoint,
        ConvertSettings(out=arguments.out, num_workers=arguments.workers, overwrite=arguments.overwrite),
        model=arguments.model,
        dtype=arguments.dtype,
        dry_run=arguments.dry_run,
    )


def _dequantize(arguments: argparse.Namespace) -> None:
    from megarl.convert.commands import dequantize
    from megarl.convert.engine import ConvertSettings

    dequantize(
        arguments.model,
        ConvertSettings(out=arguments.out, num_workers=arguments.workers, overwrite=arguments.overwrite),
        dry_run=arguments.dry_run,
    )


def _merge(arguments: argparse.Namespace) -> None:
    from megarl.convert.engine import ConvertSettings
    from megarl.convert.merge import merge

    merge(
        arguments.model,
        arguments.adapter,
        ConvertSettings(out=arguments.out, num_workers=arguments.workers, overwrite=arguments.overwrite),
        dtype=arguments.dtype,
        dry_run=arguments.dry_run,
    )


def _verify(arguments: argparse.Namespace) -> None:
    from megarl.convert.verify import verify

    found = verify(arguments.first, arguments.second, model=arguments.model, num_workers=arguments.workers)
    size = f"{found.num_tensors} tensors, {found.num_bytes / 2**20:,.2f} MiB"
    if not found.problems:
        print_lines(f"equal, bit for bit, and finite: {size}")
        return
    print_lines(*found.problems, f"not equal: {len(found.problems)} problems; compared {size}")
    raise SystemExit(EXIT_FAILED)


COMMANDS: Mapping[str, ConvertCommand] = {
    "hf-to-mcore": ConvertCommand(
        text="Hugging Face directory → Megatron torch_dist checkpoint",
        arguments={
            "model": {"type": Path, "help": "a Hugging Face directory"},
            "--vocab-multiple": {"type": int, "default": 128, "metavar": "N", "help": "pad the vocabulary to (128)"},
            **_OUTPUT,
        },
        run=_hf_to_mcore,
    ),
    "mcore-to-hf": ConvertCommand(
        text="Megatron torch_dist checkpoint → Hugging Face directory",
        arguments={
            "checkpoint": {"type": Path, "help": "a torch_dist checkpoint, such as RUN/checkpoints/step_N/actor"},
            "--model": {"type": Path, "help": "directory of config.json and tokenizer, if it cannot be told"},
            **_OUTPUT,
        },
        run=_mcore_to_hf,
    ),
    "dequantize": ConvertCommand(
        text="Hugging Face directory with experts in MXFP4 → the same in bfloat16",
        arguments={
            "model": {"type": Path, "help": "a Hugging Face directory, such as openai/gpt-oss-20b"},
            **{name: options for name, options in _OUTPUT.items() if name != "--dtype"},
        },
        run=_dequantize,
    ),
    "merge": ConvertCommand(
        text="Hugging Face directory + PEFT's adapters → the same with the adapters merged into its weights",
        arguments={
            "model": {"type": Path, "help": "a Hugging Face directory, which the adapters were trained on"},
            "--adapter": {"type": Path, "required": True, "metavar": "DIR", "help": "as PEFT writes it"},
            **_OUTPUT,
        },
        run=_merge,
    ),
    "verify": ConvertCommand(
        text="compare two checkpoints bit for bit; exit code 1 if they differ",
        arguments={
            "first": {"type": Path, "help": "a Hugging Face directory or a torch_dist checkpoint"},
            "second": {"type": Path, "help": "the same, to compare with it"},
            "--model": {"type": Path, "help": "directory of config.json, for torch_dist without one"},
            **_WORKERS,
        },
        run=_verify,
    ),
}
