"""Time an update on long rows, replies of an engine and a sync, of layers as wide as Qwen3-8B's:

    python -m megarl_lab.bench.speed --device cuda --out speed.json

A model of random weights with few layers is made in the directory of `--out` and removed. Prints seconds of each round
and a rate: TFLOP/s of a rank and its share of the device's peak (MFU), tokens/s of the engine, GB/s of the sync. The
vocabulary is small: megarl_lab.bench.head times the log-prob head.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

import megarl
from megarl.config import load_config
from megarl.config.schema import Config
from megarl.host.device.platform import PLATFORMS, apply_environment
from megarl.record.performance import PerformanceMeter, peak_of
from megarl.record.text_table import align
from megarl.types import Row
from megarl_lab.recipes.tiny_model import TinyModelConfig, make_tiny_model

_RUN_FILE = Path(__file__).parents[2] / "configs/run/sums-rl.yaml"
_PROMPT_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRounds:
    """Seconds of each round of one kind of work, and its rate by the median."""

    name: str
    seconds: list[float]
    rate: str

    @property
    def row(self) -> tuple[str, ...]:
        return self.name, f"{statistics.median(self.seconds):.3f}", self.rate


def timed(rounds: int, work: Callable[[int], object]) -> list[float]:
    """Return the seconds of each round after the first."""
    seconds = []
    for i in range(rounds + 1):
        began = time.perf_counter()
        work(i)
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


def run_config(arguments: argparse.Namespace, shape: TinyModelConfig, model: Path) -> Config:
    """Return the settings of a session with one rank and one engine, which share a device."""
    return load_config(
        _RUN_FILE,
        [
            f"run.dir={model.parent}",
            f"model.path={model}",
            f"model.dtype={shape.dtype}",
            "data={train: [], val: []}",
            f"data.max_prompt_tokens={_PROMPT_TOKENS}",
            f"rollout.max_response_tokens={arguments.row_tokens - _PROMPT_TOKENS}",
            "rollout.engine.num_engines=1",
            f"rollout.engine.max_num_seqs={arguments.samples}",
            "actor.layout={tp: 1, dp: 1, sequence_parallel: false}",
            f"actor.micro_batch_tokens={arguments.row_tokens}",
            *arguments.set,
        ],
    )


def random_rows(num_rows: int, num_tokens: int) -> list[Row]:
    rng, response = np.random.default_rng(0), num_tokens - _PROMPT_TOKENS
    return [
        Row(
            uid=f"row{i}",
            sample_index=0,
            token_ids=rng.integers(3, 256, num_tokens, dtype=np.int32),
            num_prompt_tokens=_PROMPT_TOKENS,
            loss_mask=np.ones(response, dtype=np.bool_),
        )
        for i in range(num_rows)
    ]


def measure(arguments: argparse.Namespace, shape: TinyModelConfig, model: Path) -> list[TimedRounds]:
    """Time each kind of work in one session."""
    num_bytes = make_tiny_model(model, shape, seed=0) * (2 if shape.dtype == "bfloat16" else 4)
    config, rows = run_config(arguments, shape, model), random_rows(arguments.rows, arguments.row_tokens)
    prompts = [row.token_ids[:_PROMPT_TOKENS].tolist() for row in random_rows(arguments.samples, 2 * _PROMPT_TOKENS)]
    limit, replied = min(arguments.reply_tokens, config.rollout.max_response_tokens), list[int]()
    with megarl.Session(config) as session:

        def update(_: int) -> None:
            session.accumulate(rows, "cross_entropy")
            session.step(lr=1e-6)

        def sample(_: int) -> None:
            batch = session.sample(prompts, 1, max_tokens=limit, stop_token_ids=())
            replied.append(sum(len(sample.response_token_ids) for sample in batch.samples))

        dims, peak = session.inputs.spec.dims, peak_of(config.logging, shape.dtype)
        update_s = timed(arguments.rounds, update)
        found = PerformanceMeter(dims, num_ranks=1, num_epochs=1, peak_tflops=peak).metrics(
            rows, statistics.median(update_s)
        )
        sync_s = timed(arguments.rounds, lambda _: session.snapshot())
        sample_s = timed(arguments.rounds, sample)
    mfu = f", MFU {found['perf/mfu']:.1%}" if "perf/mfu" in found else ""
    tokens_per_s = statistics.median(count / seconds for count, seconds in zip(replied[1:], sample_s, strict=True))
    return [
        TimedRounds(
            name=f"update of {len(rows)} × {arguments.row_tokens} tokens",
            seconds=update_s,
            rate=f"{found['perf/tflops_per_rank']:.4g} TFLOP/s{mfu}",
        ),
        TimedRounds(name="sync", seconds=sync_s, rate=f"{num_bytes / 1e9 / statistics.median(sync_s):.3g} GB/s"),
        TimedRounds(name=f"replies to {len(prompts)} prompts", seconds=sample_s, rate=f"{tokens_per_s:.4g} tokens/s"),
    ]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m megarl_lab.bench.speed", description="Time a policy's work.")
    parser.add_argument("--device", choices=sorted(PLATFORMS), default="cpu")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--ffn", type=int, default=12288)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--row-tokens", type=int, default=16384)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--samples", type=int, default=256, help="how many replies the engine gives at once")
    parser.add_argument("--reply-tokens", type=int, default=512, help="the most tokens of a reply")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="further settings of the run")
    parser.add_argument("--out", type=Path, required=True, help="a JSON file")
    arguments = parser.parse_args(argv)
    os.environ["MEGARL_DEVICE"] = arguments.device
    apply_environment()
    shape = TinyModelConfig(
        hidden_size=arguments.hidden,
        num_layers=arguments.layers,
        num_heads=arguments.heads,
        num_kv_heads=max(1, arguments.heads // 4),
        head_dim=arguments.hidden // arguments.heads,
        ffn_size=arguments.ffn,
        max_positions=2 * arguments.row_tokens,
        dtype=arguments.dtype,
    )
    with tempfile.TemporaryDirectory(dir=arguments.out.resolve().parent) as made:
        found = measure(arguments, shape, Path(made) / "model")
    print("\n".join(align([("", "median s", "rate"), *(each.row for each in found)])))
    arguments.out.write_text(json.dumps([asdict(each) for each in found], indent=2) + "\n", encoding="utf-8")
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
