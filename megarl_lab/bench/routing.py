"""Compare what engines that share long-tailed samples are idle, and the time of a step, by `rollout.schedule.routing`:

    python -m megarl_lab.bench.routing --out DIR

Two real engines on a CPU core each generate the samples of a step, dealt `in_turns` and `by_load` by turns, for as many
steps as `--steps`; the lengths of samples are those of `routing_model.Mix`, which routers do not know. All
tokens are greedy, so that a sample is the same wherever it is generated; this is checked. Then the same steps are
simulated with the cost of an engine's step as it was measured, and so are other mixes and numbers of engines, which
needs no quiet machine. `--simulate` does only that, with the cost `COST`. How much time can be won depends on the mix:
where engines are idle for a fifth of a step, no more than a fifth.

Prints tables, checks the limits, writes DIR/records.json, and exits with 1 if a limit is exceeded.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megarl.cluster.cluster import Cluster
from megarl.cluster.engines import EngineGroup
from megarl.config import Config, from_dict
from megarl.config.generation import Sampling
from megarl.host import loop
from megarl.record.text_table import align
from megarl.rollout.engine import GenerationRequest
from megarl.rollout.routing import ByLoad, InTurns, Router, router_of
from megarl.rollout.stepping import EngineLoad, EngineStepCost
from megarl.types import FinishReason
from megarl_lab.bench.routing_model import Mix, Sharing, SimulatedEngines
from megarl_lab.recipes.tiny_model import TinyModelConfig, make_tiny_model

ROUTINGS = ("in_turns", "by_load")
NUM_SLOTS = 8
MIX = Mix()
# Ratios of `by_load` to `in_turns`.
LIMITS = {"idle": 0.5, "step_s": 0.8}
# About what a step of the tiny model costs on a core, and the seconds from the driver to an engine.
COST = EngineStepCost(base_s=0.0025, sequence_s=0.00012, prompt_token_s=0.00002)
DELAY_S = 0.01
TIMEOUT_S = 300.0
# Also simulated: the number of engines and the mix.
OTHERS: Sequence[tuple[int, Mix]] = (
    (2, replace(MIX, sigma_prompts=1.0)),
    (2, replace(MIX, sigma_prompts=0.8, sigma_samples=0.8)),
    (2, replace(MIX, num_prompts=16, num_samples=16)),
    (2, replace(MIX, num_prompts=32, num_samples=8)),
    (8, replace(MIX, num_prompts=32)),
    (8, replace(MIX, num_prompts=64, num_samples=16)),
)


class Unknowing(ByLoad):
    """Routes by load as a run does: it knows the limit of samples, and not their lengths. cost: as last reported."""

    cost: EngineStepCost | None = None

    def place(self, requests: Sequence[GenerationRequest], living: Sequence[int]) -> Mapping[int, int]:
        return super().place([replace(request, max_tokens=MIX.most) for request in requests], living)

    def sent(self, engine: int, requests: Mapping[int, GenerationRequest]) -> None:
        super().sent(engine, {key: replace(request, max_tokens=MIX.most) for key, request in requests.items()})

    def heard(self, engine: int, load: EngineLoad) -> None:
        super().heard(engine, load)
        self.cost = load.cost or self.cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A step of real engines, and the tokens of its samples."""

    sharing: Sharing
    tokens: Sequence[Sequence[int]]


def config_of(model: Path, routing: str, *, num_engines: int) -> Config:
    """Return the settings of engines without a trainer."""
    engine = {"num_engines": num_engines, "max_num_seqs": NUM_SLOTS, "kv_cache_mib": 128, "prefix_caching": False}
    tree: dict[str, Any] = {
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"max_prompt_tokens": MIX.prompt_tokens},
        "placement": {"mode": "split"},
        "rollout": {"max_response_tokens": MIX.most, "engine": engine, "schedule": {"routing": routing}},
    }
    return from_dict(Config, tree)


async def sample(group: EngineGroup, prompt: Sequence[int], length: int) -> list[int]:
    """Return the greedy tokens of a sample that may have that many; further requests go on where one moves."""
    tokens: list[int] = []
    engine: int | None = None
    while True:
        request = GenerationRequest(
            token_ids=(*prompt, *tokens),
            seed=0,
            sampling=Sampling(temperature=0.0),
            max_tokens=length - len(tokens),
            num_before=len(tokens),
            engine=engine,
            may_move=True,
        )
        completion = await group.generate(request)
        tokens += completion.token_ids.tolist()
        if completion.finish_reason is not FinishReason.ABORT:
            return tokens
        engine = completion.engine


def measure(group: EngineGroup, router: Router, seed: int) -> Measured:
    """Let idle engines generate the samples of a step."""
    group.router, group.num_moved = router, 0
    group.work()
    draw = random.Random(seed)
    lengths = MIX.lengths(seed)
    prompts = [[draw.randrange(10, 60) for _ in range(MIX.prompt_tokens)] for _ in lengths]
    start, cpu_start = time.time(), time.process_time()
    pairs = [(prompt, length) for prompt, its_lengths in zip(prompts, lengths, strict=True) for length in its_lengths]
    tasks = [loop.spawn(sample(group, prompt, length)) for prompt, length in pairs]

    async def every() -> None:
        await asyncio.gather(*tasks)

    work = loop.spawn(every())
    loop.wait(group.attend(work, timeout_s=TIMEOUT_S))
    assert work.done(), "an engine died"
    end, driver_s = time.time(), time.process_time() - cpu_start
    work_of = list(group.work().values())
    spans = [span for each in work_of for span in each.busy]
    busy_s = sum(max(0.0, min(stop, end) - max(begin, start)) for begin, stop in spans)
    tokens = [task.result() for task in tasks]
    sharing = Sharing(
        step_s=end - start,
        idle=1 - busy_s / (len(group.processes) * (end - start)),
        num_tokens=sum(map(len, tokens)),
        num_moved=group.num_moved,
        num_steps=sum(each.num_steps for each in work_of),
        num_sequences=sum(each.num_sequences for each in work_of),
        prompt_tokens=sum(each.prompt_tokens for each in work_of),
        driver_s=driver_s,
    )
    return Measured(sharing=sharing, tokens=tokens)


def measure_all(out: Path, num_steps: int) -> tuple[dict[str, list[Sharing]], EngineStepCost, int]:
    """Return the steps of real engines by routing, the cost of their steps, and how many samples differed."""
    model = out / "model"
    make_tiny_model(model, TinyModelConfig(max_positions=2 * MIX.most), seed=0)
    router, num_different = Unknowing(config_of(model, "by_load", num_engines=2).rollout.engine), 0
    found: dict[str, list[Sharing]] = {name: [] for name in ROUTINGS}
    with Cluster(config_of(model, "by_load", num_engines=2), with_trainer=False) as cluster:
        # The first step is slower than others.
        measure(cluster.engines, router, num_steps)
        for seed in range(num_steps):
            # Whatever slows the machine down over time slows down both.
            order = ROUTINGS if seed % 2 else ROUTINGS[::-1]
            steps = {name: measure(cluster.engines, router if name == "by_load" else InTurns(), seed) for name in order}
            for name, step in steps.items():
                found[name].append(step.sharing)
                print(f"step {seed} {name}: {step.sharing}", flush=True)
            pairs = zip(*(step.tokens for step in steps.values()), strict=True)
            num_different += sum(a != b for a, b in pairs)
    assert router.cost is not None, "steps differed"
    return found, router.cost, num_different


def simulate(num_engines: int, mix: Mix, cost: EngineStepCost, num_steps: int) -> dict[str, list[Sharing]]:
    """Return simulated steps by routing."""
    found = {}
    for name in ROUTINGS:
        engines = SimulatedEngines(
            router_of(config_of(Path(), name, num_engines=num_engines).rollout, deterministic=False),
            num_engines=num_engines,
            num_slots=NUM_SLOTS,
            cost=cost,
            delay_s=DELAY_S,
        )
        found[name] = [engines.run(mix, seed) for seed in range(num_steps)]
    return found


def mean_of(steps: Sequence[Sharing], quantity: str) -> float:
    return statistics.fmean(getattr(step, quantity) for step in steps)


def row_of(what: str, num_engines: int, mix: Mix, steps: Mapping[str, Sequence[Sharing]]) -> tuple[str, ...]:
    """Return a line of the table: both routings beside each other."""
    before, after = (steps[name] for name in ROUTINGS)
    num_samples = mix.num_prompts * mix.num_samples
    return (
        *(what, f"{num_engines}", f"{mix.num_prompts} × {mix.num_samples}"),
        *(f"{mix.sigma_prompts:g}, {mix.sigma_samples:g}", f"{mean_of(after, 'num_tokens') / num_samples:.0f}"),
        *(f"{mean_of(steps_, 'step_s'):.2f}" for steps_ in (before, after)),
        f"{mean_of(after, 'step_s') / mean_of(before, 'step_s'):.2f}",
        *(f"{mean_of(steps_, 'idle'):.1%}" for steps_ in (before, after)),
        f"{mean_of(after, 'num_moved'):.1f}",
        *(f"{mean_of(steps_, 'num_steps'):.0f}" for steps_ in (before, after)),
        *(f"{mean_of(steps_, 'driver_s'):.2f}" for steps_ in (before, after)),
    )


HEADER = (
    *("steps", "engines", "prompts", "σ", "tokens/sample", "s in turns", "s by load", "ratio"),
    *("idle in turns", "idle by load", "moved", "steps in turns", "steps by load", "driver s", "driver s by load"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="an empty directory to work in")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--simulated-steps", type=int, default=24)
    parser.add_argument("--simulate", action="store_true", help="do not start engines")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows: list[tuple[str, ...]] = [HEADER]
    cost, num_different, load = COST, 0, os.getloadavg()[0]
    records: dict[str, Any] = {"mix": asdict(MIX), "num_slots": NUM_SLOTS, "load": load}
    checked: dict[str, dict[str, list[Sharing]]] = {}
    if not arguments.simulate:
        checked["measured"], cost, num_different = measure_all(arguments.out, arguments.steps)
        rows.append(row_of("measured", 2, MIX, checked["measured"]))
        same = simulate(2, MIX, cost, arguments.steps)
        rows.append(row_of("the same, simulated", 2, MIX, same))
    checked["simulated"] = simulate(2, MIX, cost, arguments.simulated_steps)
    rows.append(row_of("simulated", 2, MIX, checked["simulated"]))
    for num_engines, mix in OTHERS:
        rows.append(row_of("simulated", num_engines, mix, simulate(num_engines, mix, cost, arguments.simulated_steps)))
    print(f"{cost}, load {load:.1f}")
    print("\n".join(align(rows, left=(0,))))
    failed = num_different > 0
    print(f"{'EXCEEDED' if failed else 'holds'}  samples whose tokens differ: {num_different}, limit 0")
    for what, steps in checked.items():
        for quantity, limit in LIMITS.items():
            ratio = mean_of(steps["by_load"], quantity) / mean_of(steps["in_turns"], quantity)
            failed |= ratio > limit
            verdict = "holds" if ratio <= limit else "EXCEEDED"
            print(f"{verdict}  {what}: {quantity}, by load ÷ in turns: {ratio:.2f}, limit {limit:.2f}")
    records |= {"cost": asdict(cost), "num_different": num_different}
    records |= {w: {n: [asdict(s) for s in each] for n, each in steps.items()} for w, steps in checked.items()}
    (arguments.out / "records.json").write_text(json.dumps(records, indent=1), encoding="utf-8")
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
