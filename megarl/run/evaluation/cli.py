"""Define the commands `megarl eval` and `megarl inspect-hints`."""

import argparse
from pathlib import Path

from megarl.host.activity import shown


def add_evaluation(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the subcommands `eval` and `inspect-hints` to those of `megarl`."""
    command = commands.add_parser("eval", help="measure pass@k, avg@n and greedy accuracy of a model")
    command.add_argument(
        "model", type=Path, help="a Hugging Face directory or hub id, a run, or RUN/checkpoints/step_N"
    )
    command.add_argument("overrides", nargs="*", help="settings such as rollout.engine.tp=2")
    command.add_argument("--adapter", type=Path, metavar="DIR", help="PEFT's adapters to merge into the model")
    command.add_argument("--data", type=Path, nargs="+", required=True, metavar="FILE", help="parquet or JSONL prompts")
    command.add_argument("--out", type=Path, required=True, help="directory to write")
    command.add_argument("--num-samples", type=int, default=8, metavar="N", help="sampled answers per prompt")
    command.add_argument("--k", type=int, nargs="+", default=[1], help="of pass@k, each from 1 to N")
    command.add_argument("--temperature", type=float, default=1.0, help="of sampled answers")
    command.add_argument("--max-response-tokens", type=int, help="default: the configuration's")
    command.add_argument("--seed", type=int, default=0, help="of sampling")
    command.add_argument("--config", type=Path, help="a run file for engine and layout; default: the run's own")
    command.add_argument(
        "--trust-config", action="store_true", help="use the run's own functions, environments, services, …"
    )
    command.add_argument("--overwrite", action="store_true", help="replace an evaluation in --out")
    command.set_defaults(run=_eval)
    command = commands.add_parser("inspect-hints", help="show CPO's hints in prompts, and what they tell a model")
    command.add_argument("config", type=Path, help="a run file, such as configs/run/sums-rl.yaml")
    command.add_argument("overrides", nargs="*", help="settings such as algo.cpo.hint.place=system")
    command.add_argument("--model", type=Path, help="a Hugging Face directory: measure what the hints tell this model")
    command.add_argument("--out", type=Path, metavar="FILE", help="HTML page to write; with --model hints.html")
    command.add_argument("--num-prompts", type=int, default=8, metavar="N", help="prompts that the model answers")
    command.add_argument("--answers", choices=("sampled", "solutions"), default="sampled", help="what is scored")
    command.set_defaults(run=_inspect_hints)


def _eval(arguments: argparse.Namespace) -> None:
    with shown():
        from megarl.run.evaluation.inputs import EvalRequest
        from megarl.run.evaluation.run import evaluate

        request = EvalRequest(
            model=arguments.model,
            data=tuple(arguments.data),
            out=arguments.out,
            adapter=arguments.adapter,
            ks=tuple(arguments.k),
            num_samples=arguments.num_samples,
            temperature=arguments.temperature,
            max_response_tokens=arguments.max_response_tokens,
            seed=arguments.seed,
            run_file=arguments.config,
            overrides=tuple(arguments.overrides),
            overwrite=arguments.overwrite,
            trust_config=arguments.trust_config,
        )
        evaluate(request)


def _inspect_hints(arguments: argparse.Namespace) -> None:
    with shown():
        from megarl.run.evaluation.inspect_hints import InspectRequest, inspect_hints

        request = InspectRequest(
            run_file=arguments.config,
            overrides=tuple(arguments.overrides),
            model=arguments.model,
            out=arguments.out,
            num_prompts=arguments.num_prompts,
            answers=arguments.answers,
        )
        inspect_hints(request)
