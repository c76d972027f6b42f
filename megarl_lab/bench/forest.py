"""Measure updates on trees of conversations: shared prefixes computed once, against the same rows one after the other.

python -m megarl_lab.bench.forest
python -m megarl_lab.bench.forest --model DIR --sharing 2 4 --json forest.json
python -m megarl_lab.bench.forest --smollm2

Shapes of trees: `search` is a prompt with branches of 32 tokens, times --scale; `answers` one with four times as many,
shorter ones; `agent` is a conversation whose
template strips the thoughts of earlier turns, so that each turn begins with what the turn before it had, less its
thought. Sharing is the number of tokens on all paths over the number of different ones. Both ways run in one process,
by turns, and the best time of each counts, in seconds of the process's cores, which other programs on the machine
lengthen least. `trunk` is forward and backward of the layers, by its time over that of flattened rows, and over what
the number of tokens and FLOPs allow; `update` is a whole optimizer step, likewise over what FLOPs allow. Tokens at the
ends of long paths attend to more than others, so FLOPs allow less than tokens where rows are long for the model's
width. Exit code 1: a limit is exceeded.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megarl.host.device.platform import apply_environment
from megarl.record.text_table import align
from megarl.types import Row
from megarl.types.messages import MicroBatchPlan, UpdateRequest

# Most that the trunk may take, of what tokens allow or else FLOPs, and the update, of what FLOPs allow.
TRUNK_LIMIT, UPDATE_LIMIT = 1.3, 1.15
# Tokens of what a conversation's turn consists of, and of a branch, each times the scale.
GIVEN, THOUGHT, ANSWER, BRANCH = 24, 24, 8, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ForestResult:
    """Tokens, FLOPs and CPU seconds of an update on a tree, flattened and shared."""

    shape: str
    path_tokens: int
    unique_tokens: int
    flat_trunk_flops: int
    forest_trunk_flops: int
    flat_flops: int
    forest_flops: int
    flat_trunk_s: float
    forest_trunk_s: float
    flat_update_s: float
    forest_update_s: float

    @property
    def sharing(self) -> float:
        return self.path_tokens / self.unique_tokens

    @property
    def trunk(self) -> float:
        return self.forest_trunk_s / self.flat_trunk_s

    @property
    def trunk_of_flops(self) -> float:
        return self.trunk * self.flat_trunk_flops / self.forest_trunk_flops

    @property
    def update(self) -> float:
        return self.forest_update_s / self.flat_update_s

    @property
    def update_of_flops(self) -> float:
        return self.update * self.flat_flops / self.forest_flops

    @property
    def holds(self) -> bool:
        """Whether the limits hold. Where attention alone exceeds what tokens allow, FLOPs say what a trunk may take."""
        trunk = min(self.trunk * self.sharing, self.trunk_of_flops)
        return trunk <= TRUNK_LIMIT and self.update_of_flops <= UPDATE_LIMIT


def row_of(tokens: Sequence[np.ndarray], trained: int, index: int) -> Row:
    """Make the row of a path whose last `trained` tokens are trained."""
    ids = np.concatenate(tokens).astype(np.int32)
    mask = np.arange(len(ids)) >= len(ids) - trained
    row = Row(
        uid="tree",
        sample_index=index,
        token_ids=ids,
        num_prompt_tokens=len(tokens[0]),
        loss_mask=mask[len(tokens[0]) :],
    )
    advantages = np.random.default_rng(index).standard_normal(row.num_response_tokens).astype(np.float32)
    return row.with_quantities(advantages=advantages, rollout_logprobs=np.zeros_like(advantages))


def search(sharing: int, vocab: int, scale: int) -> list[Row]:
    """Make a prompt with 2·s branches, of such a length that sharing is s."""
    rng, branch = np.random.default_rng(0), BRANCH * scale
    prompt = rng.integers(0, vocab, 2 * (sharing - 1) * branch)
    return [row_of([prompt, rng.integers(0, vocab, branch)], branch, i) for i in range(2 * sharing)]


def agent(sharing: int, vocab: int, scale: int) -> list[Row]:
    """Make 2·s turns after a prompt of such a length that sharing is s; histories have answers without thoughts."""
    rng, turns = np.random.default_rng(1), 2 * sharing
    lengths = GIVEN * scale, THOUGHT * scale, ANSWER * scale
    kept, own = (GIVEN + ANSWER) * scale, sum(lengths)
    # turns·(prompt + own) + kept·turns·(turns − 1)/2 tokens on paths, of which prompt + turns·own + (turns − 1)·ANSWER
    # are different.
    different = turns * own + (turns - 1) * ANSWER * scale
    length = (sharing * different - turns * own - kept * turns * (turns - 1) // 2) // (turns - sharing)
    history, rows = [rng.integers(0, vocab, max(length, 1))], []
    for i in range(turns):
        given, thought, answer = (rng.integers(0, vocab, n) for n in lengths)
        rows.append(row_of([*history, given, thought, answer], len(thought) + len(answer), i))
        history += [given, answer]
    return rows


def answers(sharing: int, vocab: int, scale: int) -> list[Row]:
    """Make a prompt with 8·s short answers, of such a length that sharing is s."""
    rng, answer = np.random.default_rng(2), 7 * scale
    prompt = rng.integers(0, vocab, 8 * (sharing - 1) * answer // 7)
    return [row_of([prompt, rng.integers(0, vocab, answer)], answer, i) for i in range(8 * sharing)]


SHAPES: dict[str, Callable[[int, int, int], list[Row]]] = {"search": search, "agent": agent, "answers": answers}


@dataclass(frozen=True, slots=True)
class OneRank:
    """A rank in this process, as the driver sees a group of them."""

    worker: Any

    def update(self, rows: Sequence[Row], plan: MicroBatchPlan, request: UpdateRequest) -> Any:
        return self.worker.update(rows, plan.ranks[0], request)


class ForestTrainer:
    """A policy in this process that is updated with and without sharing."""

    def __init__(self, model: Path, rendezvous: str, micro_batch_tokens: int) -> None:
        apply_environment()
        import torch

        from megarl.config.schema import ActorConfig, ModelConfig, OptimizerConfig
        from megarl.parallel.worker import RankWorker
        from megarl.types.messages import LoadRequest, Role, RoleSpec

        worker = self.worker = RankWorker(0)
        worker.prepare()
        # Threads that wait for one another would count.
        torch.set_num_threads(1)
        settings = ActorConfig(optimizer=OptimizerConfig(distributed=False), micro_batch_tokens=micro_batch_tokens)
        worker.join(settings.layout, f"file://{rendezvous}", 60.0)
        self.role = RoleSpec(role=Role.ACTOR, model=ModelConfig(path=str(model), dtype="float32"), settings=settings)
        worker.load(LoadRequest(roles=(self.role,), seed=0))
        self.loaded = worker.roles[Role.ACTOR]
        (self.chunk,) = self.loaded.chunks
        self.dims = self.loaded.model_spec.dims

    def updater(self, *, shares: bool, longest: int) -> Any:
        """Return what updates the model; the model and the plan share prefixes or do not."""
        from megarl.algos.build import build_algorithm
        from megarl.config.algo import AlgoConfig
        from megarl.train.passes import RoleUpdater

        self.chunk.shares_prefixes = shares
        role = replace(self.role, settings=replace(self.role.settings, share_prefixes=shares))
        objective = build_algorithm(AlgoConfig(), max_response_tokens=longest)
        return RoleUpdater(OneRank(self.worker), role, objective, total_steps=1000, dims=self.dims)  # type: ignore[arg-type]

    def time_trunk(self, updater: Any, rows: Sequence[Row]) -> float:
        """Time forward and backward of the layers over the micro-batches of the plan."""
        import torch

        from megarl.parallel.packing import PackAlignment, pack_rows

        plan, _ = updater._plan(rows, paired=False)
        begun = time.process_time()
        for members in plan.ranks[0]:
            pack = pack_rows(
                [rows[i] for i in members],
                alignment=PackAlignment(),
                device=torch.device("cpu"),
                plans_attention=True,
                shares_prefixes=self.chunk.shares_prefixes,
            )
            hidden = self.chunk.hidden_states(pack)
            hidden.backward(torch.ones_like(hidden))
        return time.process_time() - begun

    def time_update(self, updater: Any, rows: Sequence[Row]) -> float:
        """Time an optimizer step."""
        begun = time.process_time()
        updater.update(rows, updater._objective.initial_state(), step=0, with_outputs=False)
        return time.process_time() - begun

    def measure(self, shape: str, sharing: int, *, scale: int, repeats: int) -> ForestResult:
        """Measure a tree both ways, by turns."""
        from megarl.record.performance import update_flops

        rows = SHAPES[shape](sharing, self.dims.vocab, scale)
        longest = max(row.num_response_tokens for row in rows)
        times: Mapping[tuple[bool, str], list[float]] = {
            (shares, what): [] for shares in (False, True) for what in ("trunk", "update")
        }
        frac = 0.0
        for _ in range(repeats + 1):
            for shares in (False, True):
                updater = self.updater(shares=shares, longest=longest)
                frac = updater._plan(rows, paired=False)[1]["perf/shared_tokens_frac"]
                times[shares, "trunk"].append(self.time_trunk(updater, rows))
                times[shares, "update"].append(self.time_update(updater, rows))
        path_tokens = sum(row.num_tokens for row in rows)
        # The first of each warms up.
        best = {key: min(values[1:]) for key, values in times.items()}
        # Nothing of these reaches the head.
        untrained = [replace(row, loss_mask=np.zeros_like(row.loss_mask)) for row in rows]
        return ForestResult(
            shape=shape,
            path_tokens=path_tokens,
            unique_tokens=round(path_tokens * (1 - frac)),
            flat_trunk_flops=update_flops(self.dims, untrained),
            forest_trunk_flops=update_flops(self.dims, untrained, shares_prefixes=True),
            flat_flops=update_flops(self.dims, rows),
            forest_flops=update_flops(self.dims, rows, shares_prefixes=True),
            flat_trunk_s=best[False, "trunk"],
            forest_trunk_s=best[True, "trunk"],
            flat_update_s=best[False, "update"],
            forest_update_s=best[True, "update"],
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", type=Path, help="a model directory; none: the tiny model of quickstart")
    model.add_argument("--smollm2", action="store_true", help="SmolLM2-135M, from a wheel on PyPI")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["search", "agent"])
    parser.add_argument("--sharing", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--scale", type=int, default=4, help="of the lengths")
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the results there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = options.model or Path(directory) / "model"
        if options.smollm2:
            from megarl_lab.recipes.gguf_model import SMOLLM2, make_gguf_model

            make_gguf_model(SMOLLM2, path)
        elif options.model is None:
            from megarl_lab.recipes.tiny_model import TinyModelConfig, make_tiny_model

            make_tiny_model(path, TinyModelConfig(max_positions=8192), seed=0)
        trainer = ForestTrainer(path, f"{directory}/rendezvous", options.micro_batch_tokens)
        results = [
            trainer.measure(shape, sharing, scale=options.scale, repeats=options.repeats)
            for shape in options.shapes
            for sharing in options.sharing
        ]
    header = ("shape", "paths", "tokens", "sharing", "trunk", "of tokens", "of FLOPs", "update", "of FLOPs", "limits")
    lines = [
        (
            r.shape,
            f"{r.path_tokens:,}",
            f"{r.unique_tokens:,}",
            f"{r.sharing:.2f}",
            *(f"{x:.3f}" for x in (r.trunk, r.trunk * r.sharing, r.trunk_of_flops, r.update, r.update_of_flops)),
            "hold" if r.holds else "FAIL",
        )
        for r in results
    ]
    print("\n".join(align([header, *lines])))
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n", encoding="utf-8")
    sys.exit(0 if all(result.holds for result in results) else 1)


if __name__ == "__main__":
    main()
