"""The command line of the benchmark."""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from megarl.errors import ConfigError
from megarl.host.device.accelerators import nvidia_devices
from megarl_lab.bench.logprobs.campaign import TOLERANCES, CampaignSettings, HeadCampaign
from megarl_lab.bench.logprobs.contenders import CONTENDERS, DEFAULTS, Kind
from megarl_lab.bench.logprobs.figure import write_memory_png
from megarl_lab.bench.logprobs.limits import LimitVerdict, judge
from megarl_lab.bench.logprobs.records import Size
from megarl_lab.bench.logprobs.tables import limits_text, report_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """Sizes of a kind of run. timed_rows: the most rows that are timed."""

    vocab: tuple[int, ...]
    rows: tuple[int, ...]
    hidden: int
    timed_rows: int
    exact_rows: int = 0
    rounds: int = 5


FULL: Mapping[str, Defaults] = MappingProxyType(
    {
        "cpu": Defaults(vocab=(32768, 151936), rows=(1024, 4096, 16384), hidden=512, timed_rows=4096),
        "cuda": Defaults(vocab=(151936,), rows=(8192, 32768), hidden=4096, timed_rows=32768, exact_rows=512),
    }
)
QUICK = Defaults(vocab=(2048,), rows=(256, 1024), hidden=32, timed_rows=256, rounds=2)
DTYPES: Mapping[str, str] = MappingProxyType({"cpu": "float32", "cuda": "bfloat16"})
CPU_RANKS = 2


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m megarl_lab.bench.logprobs",
        description="Compare the log-prob head with its peers: memory, collectives, time.",
    )
    parser.add_argument("--out", type=Path, required=True, help="a directory for records.json and memory.png")
    parser.add_argument("--device", choices=sorted(FULL), default="cpu")
    parser.add_argument("--dtype", choices=sorted(TOLERANCES), help="default: float32 on CPU, bfloat16 on CUDA")
    parser.add_argument("--tp", type=int, help="ranks; default: 2 on CPU, one for each device on CUDA")
    parser.add_argument("--vocab", type=int, nargs="+")
    parser.add_argument("--rows", type=int, nargs="+")
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--timed-rows", type=int, help="the most rows that are timed; 0: only memory")
    parser.add_argument(
        "--exact-rows", type=int, help="rows compared with float64 at the largest vocabulary, on one rank"
    )
    parser.add_argument("--rounds", type=int, help="how often each contender is timed at a size")
    parser.add_argument(
        "--main-grad",
        action="store_true",
        help="weights have float32 main gradients, as in Megatron: the head adds to them, its peers' are added",
    )
    parser.add_argument("--contenders", nargs="+", metavar="NAME", help=f"of: {', '.join(CONTENDERS)}")
    parser.add_argument(
        "--kernels",
        type=Path,
        default=Path(sys.prefix) / "kernels",
        help="a folder with packages that are not installed otherwise, such as triton and liger-kernel",
    )
    parser.add_argument("--quick", action="store_true", help="sizes so small that only counts and values mean anything")
    return parser.parse_args(argv)


def to_settings(arguments: argparse.Namespace) -> CampaignSettings:
    """Options over defaults; ConfigError for an unknown name or a missing device."""
    device, defaults = arguments.device, QUICK if arguments.quick else FULL[arguments.device]
    if device == "cuda" and not nvidia_devices():
        raise ConfigError("--device cuda: no NVIDIA device is here; use --device cpu")
    world_size = arguments.tp or (len(nvidia_devices()) if device == "cuda" else CPU_RANKS)
    contenders = tuple(arguments.contenders or DEFAULTS[device])
    for name in contenders:
        CONTENDERS.get(name)
    hidden = defaults.hidden if arguments.hidden is None else arguments.hidden
    vocabs = arguments.vocab or defaults.vocab
    if uneven := [vocab for vocab in vocabs if vocab % world_size]:
        raise ConfigError(f"--vocab: got {uneven} on {world_size} ranks, expected multiples; choose other sizes")
    return CampaignSettings(
        device=device,
        dtype=arguments.dtype or DTYPES[device],
        world_size=world_size,
        contenders=contenders,
        sizes=tuple(
            Size(vocab=vocab, rows=rows, hidden=hidden) for vocab in vocabs for rows in arguments.rows or defaults.rows
        ),
        timed_rows=defaults.timed_rows if arguments.timed_rows is None else arguments.timed_rows,
        exact_rows=defaults.exact_rows if arguments.exact_rows is None else arguments.exact_rows,
        rounds=defaults.rounds if arguments.rounds is None else arguments.rounds,
        main_grad=arguments.main_grad,
        kernels=str(arguments.kernels),
    )


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    try:
        report = HeadCampaign(settings=to_settings(arguments)).run()
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from error
    arguments.out.mkdir(parents=True, exist_ok=True)
    report.write(arguments.out / "records.json")
    write_memory_png(report, arguments.out / "memory.png")
    judgements = judge(report)
    print(f"\n{report_text(report)}\n\n{limits_text(judgements)}")
    print(f"wrote {arguments.out / 'records.json'}\nwrote {arguments.out / 'memory.png'}")
    is_missing = any(CONTENDERS.get(name).kind is Kind.OURS for name in report.unavailable)
    raise SystemExit(is_missing or any(each.verdict is LimitVerdict.FAIL for each in judgements))
