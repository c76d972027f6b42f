"""`megarl convert`, and the same as scripts in tools/."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.host.exit_codes import EXIT_FAILED, exit_on_errors

if TYPE_CHECKING:
    from megarl.convert.engine import Settings

_DTYPES = ("float32", "float16", "bfloat16")


def add_convert(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `convert` to the commands of `megarl`."""
    convert = commands.add_parser("convert", help="convert checkpoints between Hugging Face and Megatron, or compare")
    kinds = convert.add_subparsers(dest="kind", required=True)
    for name, (text, add, run) in COMMANDS.items():
        command = kinds.add_parser(name, help=text, description=text)
        add(command)
        command.set_defaults(run=run)


def script(name: str, argv: Sequence[str] | None = None) -> None:
    """One of the commands as a program of its own."""
    text, add, run = COMMANDS[name]
    parser = argparse.ArgumentParser(description=text)
    add(parser)
    arguments = parser.parse_args(argv)
    with exit_on_errors():
        run(arguments)


def _add_workers(command: argparse.ArgumentParser) -> None:
    command.add_argument("--workers", type=int, metavar="N", help="processes (default: one per core, at most 8)")


def _add_output(command: argparse.ArgumentParser) -> None:
    command.add_argument("--out", type=Path, required=True, help="directory to write; what was begun is continued")
    command.add_argument("--dtype", choices=_DTYPES, help="of the weights (default: as they are)")
    command.add_argument("--dry-run", action="store_true", help="check, print sizes; write nothing")
    command.add_argument("--overwrite", action="store_true", help="replace --out")
    _add_workers(command)


def _add_hf_to_mcore(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", type=Path, help="a Hugging Face directory")
    command.add_argument("--vocab-multiple", type=int, default=128, metavar="N", help="pad the vocabulary to (128)")
    _add_output(command)


def _add_mcore_to_hf(command: argparse.ArgumentParser) -> None:
    command.add_argument("checkpoint", type=Path, help="a torch_dist checkpoint, such as RUN/checkpoints/step_N/actor")
    command.add_argument("--model", type=Path, help="directory of config.json and tokenizer, if it cannot be told")
    _add_output(command)


def _add_verify(command: argparse.ArgumentParser) -> None:
    command.add_argument("first", type=Path, help="a Hugging Face directory or a torch_dist checkpoint")
    command.add_argument("second", type=Path, help="the same, to compare with it")
    command.add_argument("--model", type=Path, help="directory of config.json, for torch_dist without one")
    _add_workers(command)


# Heavy imports wait until the command is known.


def _num_workers(arguments: argparse.Namespace) -> int:
    from megarl.convert.engine import default_workers

    return default_workers() if arguments.workers is None else int(arguments.workers)


def _settings(arguments: argparse.Namespace) -> "Settings":
    from megarl.convert.engine import Settings

    return Settings(out=arguments.out, num_workers=_num_workers(arguments), overwrite=arguments.overwrite)


def _hf_to_mcore(arguments: argparse.Namespace) -> None:
    from megarl.convert.commands import hf_to_mcore

    hf_to_mcore(
        arguments.model,
        _settings(arguments),
        dtype=arguments.dtype,
        vocab_multiple=arguments.vocab_multiple,
        dry_run=arguments.dry_run,
    )


def _mcore_to_hf(arguments: argparse.Namespace) -> None:
    from megarl.convert.commands import mcore_to_hf

    mcore_to_hf(
        arguments.checkpoint,
        _settings(arguments),
        model=arguments.model,
        dtype=arguments.dtype,
        dry_run=arguments.dry_run,
    )


def _verify(arguments: argparse.Namespace) -> None:
    from megarl.convert.verify import verify

    verdict = verify(arguments.first, arguments.second, model=arguments.model, num_workers=_num_workers(arguments))
    size = f"{verdict.num_tensors} tensors, {verdict.num_bytes / 2**20:,.2f} MiB"
    if verdict.is_equal:
        print(f"equal, bit for bit, and finite: {size}")
        return
    print("\n".join(verdict.problems))
    print(f"not equal: {len(verdict.problems)} problems; compared {size}")
    raise SystemExit(EXIT_FAILED)


# Name → what it does, its arguments, its function.
COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], None]]] = {
    "hf-to-mcore": ("Hugging Face directory → Megatron torch_dist checkpoint", _add_hf_to_mcore, _hf_to_mcore),
    "mcore-to-hf": ("Megatron torch_dist checkpoint → Hugging Face directory", _add_mcore_to_hf, _mcore_to_hf),
    "verify": ("compare two checkpoints bit for bit; exit code 1 if they differ", _add_verify, _verify),
}
