"""What megatron-core calls of Transformer Engine is there, in the versions that GPU environments pin.

Their Python wheels are small files, which this test downloads and reads as text.
"""

import ast
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.test_install import read_requirements

MEGATRON = "megatron/core"
# Where megatron-core adapts Transformer Engine for the layers, recipes and fusions that megarl turns on.
ADAPTERS = (
    "extensions/transformer_engine.py",
    "fp8_utils.py",
    "models/common/embeddings/rope_utils.py",
    "transformer/moe/moe_utils.py",
    "tensor_parallel/layers.py",
)
# megatron-core does without these: the last two are for older versions, and torch has what takes the place of the first
# two, a split and the matrix product of routers.
MISSED = [
    "transformer_engine.pytorch.attention._SplitAlongDim",
    "transformer_engine.pytorch.module.base.get_workspace",
    "transformer_engine.pytorch.attention.apply_rotary_pos_emb",
    "transformer_engine.pytorch.cpp_extensions.cast_to_fp8",
]
# megatron-core's classes → those of Transformer Engine that they derive from, and where these are.
LAYERS = {
    "TELinear": ("module/linear.py", "Linear"),
    "TELayerNormColumnParallelLinear": ("module/layernorm_linear.py", "LayerNormLinear"),
    "TEDotProductAttention": ("attention/dot_product_attention/dot_product_attention.py", "DotProductAttention"),
    "TEGroupedLinear": ("module/grouped_linear.py", "GroupedLinear"),
}
# What megatron-core makes by the settings actor.fp8: recipe, and the keywords that it passes.
RECIPES = {"Float8BlockScaling": ("fp8_format",), "MXFP8BlockScaling": ("fp8_format",)}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources of the pinned Transformer Engine and megatron-core."""
    pinned = [str(one) for one in read_requirements("cuda.txt") if one.name in ("transformer-engine", "megatron-core")]
    folder = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--python-version", "3.12", "--dest", str(folder), *pinned]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    one, other = folder.glob("*.whl")
    for wheel in (one, other):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    return folder


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def defined(sources: Path, module: str) -> set[str]:
    """The names at the top of a module, or in an `if` or `try` there; what it takes from others with * included."""
    path = sources.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    names = {child.stem for child in path.iterdir()} if path.is_dir() else set[str]()
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
                package = module if path.is_dir() else module.rpartition(".")[0]
                base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
                # The compiled extension's names cannot be read.
                if node.module != "transformer_engine_torch":
                    names |= defined(sources, ".".join(filter(None, (base, node.module))))
    return names


def imported_names(sources: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of everything that the adapters import from Transformer Engine or take from it by `te.`"""
    for adapter in ADAPTERS:
        for node in ast.walk(tree_of(sources / MEGATRON / adapter)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformer_engine"):
                yield from ((node.module or "", alias.name) for alias in node.names)
            elif isinstance(node, ast.Attribute):
                *module, name = ast.unparse(node).split(".")
                if module[:1] in (["te"], ["transformer_engine"]) and module[1:] in (
                    ["pytorch"],
                    ["common", "recipe"],
                    ["pytorch", "distributed"],
                ):
                    yield ".".join(["transformer_engine", *module[1:]]), name


def keywords_of_init(sources: Path, file: str, name: str) -> set[str]:
    """The parameters with which a class of Transformer Engine is made."""
    classes = (node for node in ast.walk(tree_of(sources / file)) if isinstance(node, ast.ClassDef))
    (found,) = (node for node in classes if node.name == name)
    for node in found.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            return {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
    return {
        node.target.id for node in found.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


@pytest.mark.long
def test_every_name_exists(sources: Path) -> None:
    wanted = set(imported_names(sources))
    assert len(wanted) > 30
    known = {module: defined(sources, module) for module, _ in wanted}
    missing = {f"{module}.{name}" for module, name in wanted if name not in known[module]}
    assert missing == set(MISSED)


@pytest.mark.long
@pytest.mark.parametrize("layer", LAYERS)
def test_every_keyword_of_layers_exists(sources: Path, layer: str) -> None:
    file, name = LAYERS[layer]
    (adapter,) = (
        node
        for node in ast.walk(tree_of(sources / MEGATRON / ADAPTERS[0]))
        if isinstance(node, ast.ClassDef) and node.name == layer
    )
    calls = [node for node in ast.walk(adapter) if isinstance(node, ast.Call)]
    (made,) = (node for node in calls if ast.unparse(node.func) == "super().__init__")
    passed = {keyword.arg for keyword in made.keywords if keyword.arg is not None}
    # Further ones, which depend on settings, go by way of `extra_kwargs`.
    passed |= {
        ast.literal_eval(target.slice)
        for node in ast.walk(adapter)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Subscript) and ast.unparse(target.value) == "extra_kwargs"
        if isinstance(target.slice, ast.Constant)
    }
    # Those of user buffers are for a communication that megarl does not turn on (tp_comm_overlap).
    passed = {keyword for keyword in passed if not keyword.startswith("ub_")}
    assert len(passed) > 5
    assert passed - keywords_of_init(sources, f"transformer_engine/pytorch/{file}", name) <= set()


@pytest.mark.long
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_takes_what_it_is_made_from(sources: Path, recipe: str) -> None:
    made = keywords_of_init(sources, "transformer_engine/common/recipe/__init__.py", recipe)
    assert set(RECIPES[recipe]) <= made
    assert f".{recipe}(" in (sources / MEGATRON / "fp8_utils.py").read_text(encoding="utf-8")


@pytest.mark.long
def test_adam_keeps_moments_as_it_is_told(sources: Path) -> None:
    """The keywords that megatron-core passes it, and the two arguments by which a state begins."""
    file = "transformer_engine/pytorch/optimizers/fused_adam.py"
    wanted = {"exp_avg_dtype", "exp_avg_sq_dtype", "master_weights", "master_weight_dtype", "use_decoupled_grad"}
    assert wanted | {"store_param_remainders"} <= keywords_of_init(sources, file, "FusedAdam")
    (begins,) = (
        node
        for node in ast.walk(tree_of(sources / file))
        if isinstance(node, ast.FunctionDef) and node.name == "initialize_state"
    )
    assert [argument.arg for argument in begins.args.args] == ["self", "param", "store_param_remainders"]
