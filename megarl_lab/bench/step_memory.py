"""Peak memory of a whole training step with a large vocabulary: a small model on two tensor-parallel ranks, for each
regime of the log-prob head and for the head of whole logits that other trainers use:

    python -m megarl_lab.bench.step_memory --out DIR

A step is what a rank of a run does in an update: forward, backward, optimizer. Its peak is over what is resident before
it: weights, gradients, optimizer state. Every head runs in fresh processes. Prints a table and writes DIR/records.json.
"""

import argparse
import json
import math
import multiprocessing
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megarl.host.device.platform import apply_environment
from megarl.record.text_table import align

WHOLE_LOGITS = "megatron_verl"
HEADS = (WHOLE_LOGITS, "keep", "in_chunk", "recompute")
NUM_RANKS = 2
NUM_ROWS, PROMPT_TOKENS = 8, 16
# A rank that waits for one that failed.
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """Sizes of the model and of the step; its tokens are those that are trained."""

    vocab: int
    hidden: int
    layers: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPeak:
    """One head's step: the larger rank's peak, and the loss, by which heads are seen to do the same."""

    head: str
    peak_bytes: int
    loss: float
    grad_norm: float


def make_model(step: StepSizes, directory: Path) -> None:
    """A Qwen3 model directory with random weights, the same every time."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    heads = step.hidden // 64
    config = Qwen3Config(
        vocab_size=step.vocab,
        hidden_size=step.hidden,
        intermediate_size=3 * step.hidden,
        num_hidden_layers=step.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=64,
        max_position_embeddings=PROMPT_TOKENS + step.tokens,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)


def measure(head: str, step: StepSizes, model: Path) -> StepPeak:
    """One head in fresh processes."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory, spawn.Pool(NUM_RANKS) as pool:
        ranks = [(head, step, str(model), rank, f"{directory}/rendezvous") for rank in range(NUM_RANKS)]
        records = pool.starmap_async(_rank, ranks, chunksize=1).get(2 * TIMEOUT_S)
    peak_bytes = max(record.peak_bytes for record in records)
    return replace(records[0], peak_bytes=peak_bytes)


def _rank(head: str, step: StepSizes, model: str, rank: int, rendezvous: str) -> StepPeak:
    """A rank's life: load, one small step that makes the optimizer's state, the step that counts."""
    apply_environment()
    from megarl.config.schema import ActorConfig, HeadConfig, LayoutConfig, ModelConfig, OptimizerConfig
    from megarl.parallel.worker import RankWorker
    from megarl.types.messages import LoadRequest, Role, RoleSpec

    worker = RankWorker(rank)
    worker.prepare()
    from megarl_lab.bench.logprobs.memory import ResidentMemory

    whole = head == WHOLE_LOGITS
    settings = ActorConfig(
        layout=LayoutConfig(tp=NUM_RANKS),
        optimizer=OptimizerConfig(distributed=False),
        recompute="full",
        head=HeadConfig(regime="recompute" if whole else head),  # type: ignore[arg-type]
    )
    worker.join(settings.layout, f"file://{rendezvous}", TIMEOUT_S)
    spec = RoleSpec(role=Role.ACTOR, model=ModelConfig(path=model, dtype="float32"), settings=settings)
    worker.load(LoadRequest(roles=(spec,), seed=0))
    if whole:
        _use_whole_logits(worker)
    _update(worker, step, NUM_ROWS)
    memory = ResidentMemory()
    memory.begin()
    result = _update(worker, step, step.tokens)
    # The first rank reports for both.
    metrics = {} if result is None else result.metrics
    return StepPeak(
        head=head,
        peak_bytes=memory.peak_bytes(),
        loss=metrics.get("actor/loss", math.nan),
        grad_norm=metrics.get("actor/grad_norm", math.nan),
    )


def _update(worker: Any, step: StepSizes, num_tokens: int) -> Any:
    """A step on rows with that many response tokens in all: GRPO with an entropy bonus."""
    from megarl.algos.build import build_algorithm
    from megarl.config.algo import AlgoConfig
    from megarl.types import Row
    from megarl.types.messages import UpdateRequest

    rng, length = np.random.default_rng(num_tokens), num_tokens // NUM_ROWS
    rows = [
        Row(
            uid=str(i),
            sample_index=0,
            token_ids=rng.integers(0, step.vocab, PROMPT_TOKENS + length, dtype=np.int32),
            num_prompt_tokens=PROMPT_TOKENS,
            loss_mask=np.ones(length, bool),
        ).with_quantities(advantages=rng.standard_normal(length).astype(np.float32))
        for i in range(NUM_ROWS)
    ]
    objective = build_algorithm(AlgoConfig(entropy_coef=0.01), max_response_tokens=length)
    request = UpdateRequest(
        step=0,
        objective=objective,
        state=objective.initial_state(),
        denominators=objective.denominators(rows),
        temperature=1.0,
        lr=1e-6,
    )
    return worker.update(rows, [list(range(NUM_ROWS))], request)


def _use_whole_logits(worker: Any) -> None:
    """Give the worker's model the peer's head."""
    import torch

    from megarl.parallel.head.logprobs import TokenLogprobs
    from megarl.types.messages import Role
    from megarl_lab.bench.logprobs.eager_peer import load
    from megarl_lab.bench.logprobs.problem import HeadProblem

    (chunk,) = worker.roles[Role.ACTOR].chunks
    solve: Callable[[HeadProblem], Any] = load(chunk.layout.tp_group)

    def forward(pack: Any, request: Any, loss_gradients: Any = None) -> TokenLogprobs:
        nothing = torch.empty(0)
        hidden = chunk.hidden_states(pack)[pack.positions, 0]
        out = solve(
            HeadProblem(
                hidden=hidden,
                weight=chunk.output_weight,
                labels=pack.labels,
                grad_logprobs=nothing,
                grad_entropy=nothing,
            )
        )
        return TokenLogprobs(logprobs=out.logprobs, entropy=out.entropy)

    chunk.forward = forward


def main() -> None:
    parser = argparse.ArgumentParser(description="Peak memory of a training step, by the log-prob head.")
    parser.add_argument("--out", type=Path, required=True, help="directory for records.json")
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=HEADS)
    for name, size in (("vocab", 151936), ("hidden", 512), ("layers", 2), ("tokens", 4096)):
        parser.add_argument(f"--{name}", type=int, default=size)
    args = parser.parse_args()
    step = StepSizes(vocab=args.vocab, hidden=args.hidden, layers=args.layers, tokens=args.tokens)
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as model:
        make_model(step, Path(model))
        records = []
        for head in args.heads:
            print(f"{head} ...", flush=True)
            records.append(measure(head, step, Path(model)))
    first = records[0].peak_bytes
    lines = [
        [r.head, f"{r.peak_bytes / 2**20:,.0f}", f"{r.peak_bytes / first:.3f}", f"{r.loss:.6f}", f"{r.grad_norm:.6f}"]
        for r in records
    ]
    print("\n".join(align([["head", "peak MiB", f"of {records[0].head}", "loss", "gradient norm"], *lines])))
    (args.out / "records.json").write_text(
        json.dumps({"step": asdict(step), "records": [asdict(r) for r in records]}, indent=1), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
