"""The driver must stay light: Megatron and vLLM belong to the processes it starts, and matplotlib to its end."""

import subprocess
import sys

# What each import, after those before it, must not have brought along.
CODE = """
import sys

def found(*names):
    return sorted(sys.modules.keys() & set(names))

import megarl.cli, megarl.config.load, megarl.run.first_checks, megarl.rewards.custom.signatures
import megarl.algos.rehearsal, megarl.forecast.plan_layouts, megarl.run.evaluation.run, megarl.train.supervised_inputs
import megarl.data.images
first = found("torch", "torchvision", "PIL", "transformers", "ray", "scipy", "sympy", "matplotlib")
import megarl.plan.render
plan = found("ray", "sympy", "math_verify")
import megarl.cli, megarl.run.start, megarl.train.wiring, megarl.train.supervised
import megarl_lab.recipes.quickstart, megarl_lab.study.queue
import megarl.run.evaluation.run
print(first, plan, found("megatron", "megatron.core", "vllm", "matplotlib", "math_verify"))
"""


def test_driver_modules_import_nothing_that_only_others_need() -> None:
    """The first checks need no library that takes seconds, a plan needs no Ray, and judging alone needs math-verify, in
    processes of its own.
    """
    out = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True, timeout=120)
    assert out.stdout.strip() == "[] [] []"
