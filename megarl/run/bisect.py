"""Define the command `megarl bisect`, which names where and why engine and trainer differ."""

import argparse
import math
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.errors import ConfigError
from megarl.host.exit_codes import EXIT_FAILED
from megarl.host.streams import print_lines

if TYPE_CHECKING:
    from megarl.bisect.search import Discrepancy
    from megarl.cluster.cluster import Cluster
    from megarl.config.generation import RolloutConfig
    from megarl.config.schema import Config
    from megarl.record.checkpoints import Checkpoint
    from megarl.record.metrics import RunPaths
    from megarl.types.passes import RecordedPass
    from megarl.weights.families import ModelSpec

# Tokens of a row, and how many of them an engine samples, of which keys and values of the first are cached.
_TOKENS, _SAMPLED = 96, 16


def add_bisect(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command `bisect` to the commands of a parser."""
    command = commands.add_parser("bisect", help="name the tensor and the cause by which engine and trainer differ")
    command.add_argument("run_dir", type=Path, nargs="?", metavar="RUN", help="a run's directory; its last checkpoint")
    command.add_argument("overrides", nargs="*", help="settings such as rollout.engine.tp=2")
    command.add_argument("--model", type=Path, metavar="DIR", help="a Hugging Face directory, in place of a run")
    command.set_defaults(run=_bisect)


def _bisect(arguments: argparse.Namespace) -> None:
    from megarl.host.activity import shown

    if arguments.model is not None and "=" in str(arguments.run_dir):
        arguments.overrides.insert(0, str(arguments.run_dir))
        arguments.run_dir = None
    if (arguments.run_dir is None) == (arguments.model is None):
        raise ConfigError("megarl bisect: name either a run's directory or --model DIR")
    with shown():
        finding = bisect(arguments)
    if finding is not None:
        print_lines(*finding.lines)
        raise SystemExit(EXIT_FAILED)
    print_lines("engine and trainer compute the same, and what config.json and the weights say")


def _inputs(arguments: argparse.Namespace) -> "tuple[Config, Checkpoint | None, list[int]]":
    """Return the settings with which both sides start, the run's checkpoint, and the tokens of its last row."""
    from megarl.config.load import saved_config, with_overrides
    from megarl.config.schema import Config
    from megarl.config.setting import needing_trust
    from megarl.record.checkpoints import last_checkpoint
    from megarl.record.metrics import RunPaths

    config, checkpoint, ids = Config(), None, list[int]()
    overrides = arguments.overrides
    if arguments.run_dir is None:
        overrides = [f"model.path={arguments.model}", "model.dtype=float32", *overrides]
    else:
        paths = RunPaths(arguments.run_dir)
        own, checkpoint = saved_config(paths.saved_tree()), last_checkpoint(paths.checkpoints)
        rollout = replace(config.rollout, engine=own.rollout.engine, temperature=own.rollout.temperature)
        config = replace(config, model=own.model, actor=own.actor, rollout=rollout, sync=own.sync)
        if found := [key for key, _ in needing_trust(config)]:
            raise ConfigError(f"{paths.config}: {', '.join(found)} name what would run here; remove them there")
        ids = _recorded_ids(paths, config.model.path)
    config = with_overrides(config, overrides)
    layout = config.actor.layout
    # One replica, whose ranks have whole rows.
    layout = replace(layout, dp=1, cp=1, etp=1, ep=math.gcd(layout.ep, layout.tp))
    engine = replace(config.rollout.engine, enforce_eager=True, prefix_caching=True, max_model_tokens=_TOKENS + 1)
    config = replace(config, actor=replace(config.actor, layout=layout), rollout=replace(config.rollout, engine=engine))
    return config, checkpoint, ids


def _recorded_ids(paths: "RunPaths", model: str) -> list[int]:
    """Return the first tokens of the last row that a run has recorded; none without one."""
    from megarl.data.chat import load_tokenizer
    from megarl.record.rollouts import read_rollouts

    files = paths.recorded_rollouts()
    if not files:
        return []
    row = read_rollouts(files[-1])[-1]
    ids: list[int] = load_tokenizer(model).encode(row.prompt + row.response, add_special_tokens=False)
    return ids[: _TOKENS - _SAMPLED]


def bisect(arguments: argparse.Namespace) -> "Discrepancy | None":
    """Start both sides, send the weights, let each compute a row, and search the first difference."""
    from megarl.bisect.rules import Weights
    from megarl.bisect.search import ENGINE, TRAINER, search
    from megarl.cluster.cluster import Cluster
    from megarl.cluster.offloading import LOAD, MemoryLedger, built_parts
    from megarl.cluster.roles import actor_role
    from megarl.host.activity import doing
    from megarl.plan.build import derive_run
    from megarl.run.start import starting
    from megarl.train.export import export_model
    from megarl.types.messages import LoadRequest

    config, checkpoint, ids = _inputs(arguments)
    role = actor_role(config)
    derived = derive_run(config, [role], (), command="eval")
    weights, engine = Weights.read(Path(config.model.path)), config.rollout.engine
    dtypes: dict[str, str] = {TRAINER: config.model.dtype, ENGINE: engine.dtype or config.model.dtype}
    if engine.quantization or engine.kv_cache_dtype:
        dtypes[ENGINE] = "float8"
    with (
        tempfile.TemporaryDirectory(prefix="megarl-bisect-") as directory,
        starting(Path(directory)),
        Cluster(config, roles=[role], log_dir=Path(directory), derived=derived) as cluster,
    ):
        ledger = MemoryLedger(cluster.workers, cluster.engines, enabled=False)
        ledger.enter(LOAD)
        cluster.workers.load(LoadRequest.of(config.run, [role]))
        ledger.add(built_parts([role]))
        older = []
        if checkpoint is not None:
            with doing("reading the checkpoint"):
                cluster.workers.load_checkpoint(checkpoint.path, weights_only=True)
                export_model(cluster.workers, role, Path(directory) / "weights")
            older, weights = [weights], Weights.read(Path(directory) / "weights")
        with closing(cluster.supervisor(config, ledger, cluster.weight_sync)) as supervisor:
            supervisor.push(0)
            recorded = _recorded_passes(cluster, config.rollout, weights.spec, ids)
            return search(weights, recorded, dtypes=dtypes, older=older)


def _recorded_passes(
    cluster: "Cluster", rollout: "RolloutConfig", spec: "ModelSpec", ids: list[int]
) -> "dict[str, RecordedPass]":
    """Let an engine sample the end of a row, and return what each side computes in its pass over the whole row."""
    import numpy as np
    import torch

    from megarl.bisect.rules import merged_record
    from megarl.bisect.search import ENGINE, TRAINER
    from megarl.cluster.processes import wait_all
    from megarl.config.generation import Sampling
    from megarl.rollout.engine import GenerationRequest, VllmEngine
    from megarl.rollout.pass_hooks import record_pass
    from megarl.types import Row
    from megarl.types.passes import PassPlace, Probe, RecordedPass

    temperature, timeout_s = rollout.temperature, rollout.timeout_s
    prompt = ids or np.random.default_rng(0).integers(0, spec.dims.vocab, _TOKENS - _SAMPLED).tolist()
    request = GenerationRequest(
        token_ids=tuple(prompt), seed=0, sampling=Sampling(temperature=temperature), max_tokens=_SAMPLED
    )
    (engine, *_) = cluster.engines.processes

    # The second time, keys and values of the prompt are cached.
    calls = [engine.call(VllmEngine.generate, [request]) for _ in range(2)]
    completion = wait_all(calls, timeout_s=timeout_s, doing="sampling")[1][0]
    token_ids = np.concatenate([np.asarray(prompt), completion.token_ids])
    sampled = {PassPlace(Probe.SAMPLED): torch.tensor(completion.logprobs)}
    row = Row(
        uid="bisect",
        sample_index=0,
        token_ids=token_ids,
        num_prompt_tokens=1,
        loss_mask=np.ones(len(token_ids) - 1, dtype=bool),
    )
    call = engine.call(record_pass, token_ids.tolist())
    (by_engine,) = wait_all([call], timeout_s=timeout_s, doing="recording a pass")
    values = merged_record(spec, by_engine, len(token_ids), scales_turned=True) | sampled
    by_ranks = cluster.workers.record_pass(row, temperature)
    return {
        ENGINE: RecordedPass(token_ids=token_ids, values=values, sampled_at=temperature),
        TRAINER: RecordedPass(token_ids=token_ids, values=by_ranks, temperature=temperature),
    }
