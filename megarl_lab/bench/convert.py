"""Time, memory and bytes read of checkpoint conversions, against mbridge with Megatron's own saving and loading.

python -m megarl_lab.bench.convert --out DIR --mbridge DIR --sizes 0.5 2

Each contender is a process of its own that imports first, then says so and waits; memory is what it and the processes
it starts hold beyond that: anonymous memory, shared pages divided among those that share them (Pss_Anon of
/proc/PID/smaps_rollup). mbridge is installed apart (pip install --no-deps --target DIR mbridge==0.15.1). Every result
is compared with the source bit for bit, and removed before the next contender starts.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from megarl.convert.verify import verify
from megarl.record.text_table import align
from megarl.weights.families import read_model_spec
from megarl.weights.safetensors_headers import INDEX_NAME
from megarl.weights.safetensors_map import (
    TensorSpec,
    create_file,
    map_tensors,
    model_index,
    plan_files,
    read_specs,
)

_SAMPLE_S = 0.02
_SHARD_BYTES = 256 << 20
_MIB = 1 << 20
# GiB → width and layers of a model of about that size in bfloat16; "deep" is 0.5 with three times the layers.
SIZES = {"0.5": (1024, 15), "deep": (1024, 45), "2": (2048, 18), "8": (4096, 20)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertContender:
    """A way to convert, as arguments of `megarl_lab.bench.convert_contenders`."""

    name: str
    direction: str
    arguments: tuple[str, ...]


CONTENDERS = (
    ConvertContender(name="megarl, 1 process", direction="hf-to-mcore", arguments=("megarl", "1")),
    ConvertContender(name="megarl, 2 processes", direction="hf-to-mcore", arguments=("megarl", "2")),
    ConvertContender(name="mbridge", direction="hf-to-mcore", arguments=("mbridge", "plain")),
    ConvertContender(name="mbridge, memory-efficient", direction="hf-to-mcore", arguments=("mbridge", "efficient")),
    ConvertContender(name="megarl, 1 process", direction="mcore-to-hf", arguments=("megarl", "1")),
    ConvertContender(name="megarl, 2 processes", direction="mcore-to-hf", arguments=("megarl", "2")),
    ConvertContender(name="mbridge", direction="mcore-to-hf", arguments=("mbridge", "plain")),
    ConvertContender(name="mbridge, memory-efficient", direction="mcore-to-hf", arguments=("mbridge", "efficient")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertCost:
    """The costs of a conversion. peak_mib: of all its processes together, beyond what imports take.

    read_ratio: bytes asked of the source's files / bytes of the model's tensors.
    """

    size: str
    model_mib: float
    direction: str
    contender: str
    seconds: float
    cpu_seconds: float
    peak_mib: float
    read_ratio: float


def make_model(path: Path, size: str) -> Path:
    """A Qwen3 model of random bfloat16 weights in files of 256 MiB."""
    hidden, num_layers = SIZES[size]
    path.mkdir(parents=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": hidden // 16,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shapes = read_model_spec(path).expected_tensors()
    specs = {name: TensorSpec(shape=shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    plan = plan_files(specs, _SHARD_BYTES)
    for file, group in plan.items():
        create_file(path / file, group)
        for tensor in map_tensors(path / file, writable=True).values():
            tensor.normal_()
    (path / INDEX_NAME).write_text(json.dumps(model_index(plan)), encoding="utf-8")
    return path


class MemoryWatch:
    """Peak anonymous memory of a process and its descendants, beyond what there was at `start`."""

    def __init__(self, pid: int) -> None:
        self._pid, self._stop = pid, threading.Event()
        self._baseline = _memory_of(_tree(pid))
        self.peak = 0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            self.peak = max(self.peak, _memory_of(_tree(self._pid)) - self._baseline)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


def _tree(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                found += map(int, task.read_text(encoding="utf-8").split())
            except OSError:
                continue
    return found


def _memory_of(pids: list[int]) -> int:
    memory = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        memory += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss_Anon:"))
    return memory


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertRun:
    """The use of one process and those it starts, from the end of its imports on."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    num_bytes_read: int


def run(contender: ConvertContender, source: Path, model: Path, out: Path, mbridge: Path) -> ConvertRun:
    """One conversion by one contender."""
    environment = {**os.environ, "PYTHONPATH": str(mbridge), "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    kind, option = contender.arguments
    arguments = [kind, option, contender.direction, str(source), str(model), str(out)]
    command = [sys.executable, "-m", "megarl_lab.bench.convert_contenders", *arguments]
    log = out.with_name(out.name + ".log")
    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            encoding="utf-8",
            errors="replace",
        )
        assert process.stdin is not None
        assert process.stdout is not None
        _wait_for(process.stdout, "ready", log)
        watch, start = MemoryWatch(process.pid), time.monotonic()
        process.stdin.write("go\n")
        process.stdin.flush()
        _, num_bytes, cpu_seconds = _wait_for(process.stdout, "read", log).split()
        seconds = time.monotonic() - start
        watch.close()
        process.communicate()
    return ConvertRun(
        seconds=seconds, cpu_seconds=float(cpu_seconds), peak_bytes=watch.peak, num_bytes_read=int(num_bytes)
    )


def _wait_for(lines: Iterable[str], word: str, log: Path) -> str:
    for line in lines:
        if line.startswith(word):
            return line
    raise SystemExit(f"the contender ended before it said {word!r}; see {log}")


def measure(size: str, directory: Path, mbridge: Path) -> list[ConvertCost]:
    """All contenders on a model of one size."""
    model = make_model(directory / f"model-{size}", size)
    model_bytes = sum(spec.num_bytes for file in model.glob("*.safetensors") for spec in read_specs(file).values())
    measured = []
    dist = directory / f"dist-{size}"
    for contender in CONTENDERS:
        source, out = (model, directory / "out") if contender.direction == "hf-to-mcore" else (dist, directory / "out")
        if contender.direction == "mcore-to-hf" and not dist.exists():
            run(CONTENDERS[0], model, model, dist, mbridge)
        result = run(contender, source, model, out, mbridge)
        verdict = verify(model, out, model=model, num_workers=2)
        if verdict.problems:
            raise SystemExit(f"{contender.name}, {contender.direction}: {verdict.problems[:3]}")
        shutil.rmtree(out)
        measured.append(
            ConvertCost(
                size=size,
                model_mib=model_bytes / _MIB,
                direction=contender.direction,
                contender=contender.name,
                seconds=result.seconds,
                cpu_seconds=result.cpu_seconds,
                peak_mib=result.peak_bytes / _MIB,
                read_ratio=result.num_bytes_read / model_bytes,
            )
        )
        print(measured[-1], flush=True)
    shutil.rmtree(dist)
    shutil.rmtree(model)
    return measured


def table(measured: list[ConvertCost]) -> list[str]:
    header = ("model", "MiB", "direction", "contender", "seconds", "CPU seconds", "peak MiB", "read / owned")
    rows = [
        (
            each.size,
            f"{each.model_mib:.0f}",
            each.direction,
            each.contender,
            f"{each.seconds:.1f}",
            f"{each.cpu_seconds:.1f}",
            f"{each.peak_mib:.0f}",
            f"{each.read_ratio:.3f}",
        )
        for each in measured
    ]
    return align([header, *rows], left=(0, 2, 3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write; models are removed at the end")
    parser.add_argument("--mbridge", type=Path, required=True, help="where mbridge is installed")
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), default=["0.5", "deep", "2"])
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    measured = [each for size in options.sizes for each in measure(size, options.out, options.mbridge)]
    print("\n".join(table(measured)))
    (options.out / "convert.json").write_text(
        json.dumps([asdict(each) for each in measured], indent=1) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
