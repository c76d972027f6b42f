"""The driver must stay light: Megatron and vLLM belong to the processes it starts, and matplotlib to its end."""

import subprocess
import sys


def test_driver_modules_import_neither_engines_nor_matplotlib() -> None:
    code = (
        "import sys, megarl.cli, megarl.run.start, megarl.train.wiring, megarl.train.supervised, "
        "megarl.recipes.quickstart, megarl.run.study;"
        "import megarl.run.evaluation.run;"
        "print(sorted(m for m in sys.modules if m in ('megatron', 'megatron.core', 'vllm', 'matplotlib')))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert out.stdout.strip() == "[]"
