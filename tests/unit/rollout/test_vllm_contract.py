"""What megarl calls of vLLM is in its sources, also what only GPUs run; no engine worker takes the default device."""

import ast
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector, AuxRequestOutput

import megarl
from megarl.config.schema import EngineConfig
from megarl.host.device.platform import PLATFORMS
from megarl.rollout.engine import FINISH_REASONS, _completion
from megarl.rollout.engine_spec import EngineSpec, engine_arguments
from megarl.rollout.stepping import ERROR
from megarl.types import FinishReason

PACKAGE = Path(megarl.__file__).parent
(FOUND,) = importlib.util.find_spec("vllm").submodule_search_locations  # type: ignore[union-attr, misc]
VLLM = Path(FOUND)
# By how megarl reaches an object: the files and classes of vLLM of whose methods it has some.
RECEIVERS = {
    "llm": (
        ("entrypoints/llm.py", "LLM"),
        ("entrypoints/rl/offline.py", "RLOfflineMixin"),
        ("entrypoints/common/offline.py", "OfflineInferenceMixin"),
    ),
    "llm_engine": (("v1/engine/llm_engine.py", "LLMEngine"),),
}
# Attributes of vLLM's worker that `WeightReceiver` reads, and where a worker on a GPU gets them.
WORKER = {
    "device": "v1/worker/gpu_worker.py",
    "model_runner": "v1/worker/gpu_worker.py",
    "rank": "v1/worker/worker_base.py",
    "vllm_config": "v1/worker/worker_base.py",
}
# What an engine worker's process executes of megarl.
IN_WORKERS = [
    *(PACKAGE / "rollout" / name for name in ("worker_extension.py", "cpu_patches.py")),
    *sorted((PACKAGE / "sync/transport").glob("*.py")),
]


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


@functools.cache
def methods(receiver: str) -> dict[str, ast.FunctionDef]:
    """The methods of the objects behind a receiver, by name."""
    return {
        function.name: function
        for file, name in RECEIVERS[receiver]
        for owner in ast.walk(tree_of(VLLM / file))
        if isinstance(owner, ast.ClassDef) and owner.name == name
        for function in owner.body
        if isinstance(function, ast.FunctionDef)
    }


def receiver_of(call: ast.Call) -> tuple[str, str] | None:
    """(receiver, method) of a call such as `self.llm.sleep(...)` or `self._llm.llm_engine.abort_request(...)`."""
    *path, method = ast.unparse(call.func).split(".")
    receiver = path[-1].lstrip("_") if path else ""
    return (receiver, method) if receiver in RECEIVERS else None


def test_every_method_and_keyword_exists() -> None:
    seen, missing = set[str](), list[str]()
    for path in sorted((PACKAGE / "rollout").glob("*.py")):
        for call in calls(tree_of(path)):
            if (found := receiver_of(call)) is None:
                continue
            receiver, method = found
            seen.add(method)
            function = methods(receiver).get(method)
            known = [] if function is None else [*function.args.args, *function.args.kwonlyargs]
            missing += [
                f"{receiver}.{method}({keyword.arg})"
                for keyword in call.keywords
                if keyword.arg is not None and keyword.arg not in {argument.arg for argument in known}
            ]
            missing += [f"{receiver}.{method}"] if function is None else []
    assert {"collective_rpc", "sleep", "wake_up", "reset_prefix_cache", "abort_request"} <= seen
    assert missing == []


def test_every_imported_name_exists() -> None:
    missing, count = [], 0
    for path in sorted(PACKAGE.rglob("*.py")):
        if "from vllm" not in path.read_text(encoding="utf-8"):
            continue
        for node in ast.walk(tree_of(path)):
            if not (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"):
                continue
            place = VLLM.joinpath(*(node.module or "").split(".")[1:])
            text = (place / "__init__.py" if place.is_dir() else place.with_suffix(".py")).read_text(encoding="utf-8")
            words = {part for part in text.replace('"', " ").replace(",", " ").replace("(", " ").split() if part}
            words |= {part.rstrip(":") for part in words}
            count += len(node.names)
            missing += [
                f"{node.module}.{name.name}"
                for name in node.names
                if name.name not in words and not (place / f"{name.name}.py").is_file()
            ]
    assert count > 15
    assert missing == []


def test_a_gpus_worker_has_what_the_receiver_reads() -> None:
    for name, file in WORKER.items():
        targets = [
            ast.unparse(target)
            for node in ast.walk(tree_of(VLLM / file))
            if isinstance(node, ast.Assign | ast.AnnAssign)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        ]
        assert f"self.{name}" in targets
    worker = {
        node.name: node for node in ast.walk(tree_of(VLLM / WORKER["device"])) if isinstance(node, ast.FunctionDef)
    }
    assert "level" in {argument.arg for argument in worker["sleep"].args.args}
    assert "tags" in {argument.arg for argument in worker["wake_up"].args.args}


def test_every_reason_for_which_vllm_ends_a_request_is_known() -> None:
    assigned = {
        ast.unparse(node.targets[0]): node.value
        for node in ast.walk(tree_of(VLLM / "v1/engine/__init__.py"))
        if isinstance(node, ast.Assign)
    }
    assert {*FINISH_REASONS, ERROR} == set(ast.literal_eval(assigned["FINISH_REASON_STRINGS"]))


def output(finish_reason: str) -> Any:
    """One token by version 3 of the weights, with log-prob -1."""
    flat = SimpleNamespace(token_ids=[5], logprobs=[-1.0])
    spans = [SimpleNamespace(version="3", start=0, end=1)]
    sampled = SimpleNamespace(
        token_ids=[5], logprobs=flat, weight_versions=spans, routed_experts=None, finish_reason=finish_reason
    )
    return SimpleNamespace(outputs=[sampled], num_cached_tokens=None)


def test_an_answer_that_repeats_itself_is_finished_and_an_unknown_reason_is_named() -> None:
    completion = _completion(output("repetition"))
    assert completion.finish_reason is FinishReason.REPETITION
    np.testing.assert_array_equal(completion.weight_versions, [3])
    with pytest.raises(RuntimeError, match="'thermal', expected one of stop, length, abort, repetition; install"):
        _completion(output("thermal"))


def test_experts_are_recorded_where_megarl_has_none_and_once_per_token() -> None:
    """Five tokens of a prompt, of which three are known, and two more when weights change: all is computed again."""
    request = SimpleNamespace(
        request_id="a",
        block_hashes=[],
        sampling_params=SimpleNamespace(routed_experts_prompt_start=3),
        num_prompt_tokens=5,
        num_output_tokens=0,
        num_tokens=5,
    )
    connector, step = AuxOutputSchedulerConnector(), SimpleNamespace(num_scheduled_tokens={"a": 5})

    def first_recorded() -> int:
        return connector.build_connector_meta(step, {"a": request}).requests["a"]

    assert first_recorded() == 3
    vars(request).update(num_output_tokens=2, num_tokens=7)
    # No engine has read the last token.
    assert len(connector.take_output(request, {"a": AuxRequestOutput(3, np.zeros((3, 2, 1), np.uint8))})) == 3
    connector.request_finished(request)
    connector.reset()
    assert first_recorded() == 6
    # A prompt of which all experts are known.
    vars(request).update(num_output_tokens=1, num_tokens=6)
    assert len(connector.take_output(request, {"a": AuxRequestOutput(5, np.zeros((1, 2, 1), np.uint8))})) == 0


def test_what_loads_are_derived_from_is_there() -> None:
    """vLLM's state of a request, also where its core is a process of its own, and the capacity of its KV cache."""
    state = {
        ast.unparse(target)
        for node in ast.walk(tree_of(VLLM / "v1/engine/output_processor.py"))
        if isinstance(node, ast.ClassDef) and node.name == "RequestState"
        for each in ast.walk(node)
        if isinstance(each, ast.Assign)
        for target in each.targets
    }
    names = ("request_id", "is_prefilling", "prompt_len", "num_cached_tokens", "detokenizer")
    assert {f"self.{name}" for name in names} <= state
    assert "def num_output_tokens(" in (VLLM / "v1/engine/detokenizer.py").read_text(encoding="utf-8")
    for file in ("config/cache.py", "v1/engine/core_client.py", "v1/core/kv_cache_utils.py"):
        assert "kv_cache_size_tokens" in (VLLM / file).read_text(encoding="utf-8")


def test_a_sync_drops_what_connectors_keep_of_old_weights() -> None:
    """With kv_offloading_size, blocks of keys and values outlive vLLM's own cache in host memory."""
    engine = next(path for path in Path("megarl/rollout").glob("engine.py"))
    (reset,) = (call for call in calls(tree_of(engine)) if ast.unparse(call.func) == "self.llm.reset_prefix_cache")
    assert {"reset_connector": "True"}.items() <= {k.arg: ast.unparse(k.value) for k in reset.keywords}.items()
    files = ("offloading_connector.py", "simple_cpu_offload_connector.py")
    for file in (VLLM / "distributed/kv_transfer/kv_connector/v1" / name for name in files):
        assert "reset_cache" in {node.name for node in ast.walk(tree_of(file)) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("platform", PLATFORMS)
def test_engine_arguments_are_those_of_vllm(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from megarl.rollout import engine_spec

    monkeypatch.setattr(engine_spec, "platform", PLATFORMS[platform])
    spec = EngineSpec(
        model_path="m", dtype="bfloat16", seed=0, max_model_tokens=8, config=EngineConfig(), can_sleep=True
    )
    (fields,) = (node for node in ast.walk(tree_of(VLLM / "engine/arg_utils.py")) if is_engine_args(node))
    known = {ast.unparse(node.target) for node in fields.body if isinstance(node, ast.AnnAssign)}
    assert len(known) > 100
    assert set(engine_arguments(spec)) - {*known, "use_tqdm_on_load"} == set()


def is_engine_args(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef) and node.name == "EngineArgs"


def test_every_environment_variable_is_known() -> None:
    known = (VLLM / "envs.py").read_text(encoding="utf-8")
    names = {name for platform in PLATFORMS.values() for name in platform.environment if name.startswith("VLLM_")}
    assert {name for name in {*names, "VLLM_BATCH_INVARIANT"} if f'"{name}"' not in known} == set()


def test_no_engine_worker_asks_for_the_default_device() -> None:
    """Worker k of an engine computes on cuda:k, and passes its device on; `platform().device()` would say cuda:0."""
    asking = []
    for path in IN_WORKERS:
        tree = tree_of(path)
        asking += [
            f"{path.name}: {ast.unparse(call)}"
            for call in calls(tree)
            if ast.unparse(call.func) in ("platform().device", "torch.cuda.current_device", "torch.cuda.set_device")
            or (ast.unparse(call.func) == "torch.device" and ast.unparse(call) != "torch.device('cpu')")
        ]
        asking += [
            f"{path.name}: {node.value!r}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("cuda")
        ]
    assert len(IN_WORKERS) > 8
    assert asking == []
    opened = [ast.unparse(call) for call in calls(tree_of(IN_WORKERS[0])) if "Receiver" in ast.unparse(call.func)]
    assert len(opened) == 2
    assert all("worker.device" in call for call in opened)


def test_a_loader_that_is_a_partial_function_survives_a_reload() -> None:
    """MiniMax-M2's norms of queries and keys have such loaders."""
    from vllm.model_executor.model_loader.reload.layerwise import _wrap_parameters_weight_loader

    from megarl.rollout.worker_extension import name_loaders

    layer = torch.nn.Linear(2, 1, bias=False)
    layer.weight.weight_loader = functools.partial(default_loader, rank=1)  # type: ignore[assignment]
    with pytest.raises(AttributeError, match="__name__"):
        _wrap_parameters_weight_loader(layer)
    name_loaders(layer)
    _wrap_parameters_weight_loader(layer)
    assert layer.weight.weight_loader.__name__ == "online_process_loader"  # type: ignore[union-attr]


def default_loader(parameter: torch.Tensor, loaded: torch.Tensor, *, rank: int) -> None:
    parameter.data.copy_(loaded * rank)
