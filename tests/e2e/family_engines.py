"""Run in a process of its own (`RankPool`): an engine on a small model that takes weights from one trainer rank."""

import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megarl.config.generation import Sampling, SyncConfig
from megarl.config.schema import DataConfig
from megarl.data.images import DataImages
from megarl.errors import DataError
from megarl.host.store import open_store
from megarl.rollout.engine import Completion, GenerationRequest, VllmEngine
from megarl.rollout.engine_spec import EngineSpec, engine_arguments
from megarl.rollout.images import ImagePrompts
from megarl.rollout.prepare import prepare_vllm
from megarl.sync.plan.build import build_plan
from megarl.sync.plan.engine_shards import engine_needs
from megarl.sync.transport.ends import BridgeSender, holding_of
from megarl.sync.transport.process_plans import process_plans_of
from megarl.sync.transport.rendezvous import Rendezvous
from megarl.sync.transport.routed import RoutedSender
from megarl.types import FloatArray, Message
from megarl.types.images import RowImage
from megarl.types.turns import IMAGE_MARK
from megarl.vision.reader import open_image
from megarl.weights.families import ModelSpec, read_model_spec
from megarl.weights.safetensors_map import map_model, weight_specs
from megarl.weights.slices import Slice
from tests.e2e.engines import running
from tests.helpers.rank_pool import RankContext

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Log-probs of prompts, computed at once, and what was sampled after each, token by token."""

    prompts: list[FloatArray]
    completions: list[Completion]


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """An engine before and after a sync, and the checksums of what each worker was sent and has received."""

    before: Scored
    after: Scored
    sent: list[Mapping[str, int]]
    received: list[Mapping[str, int]]


def follow(
    context: RankContext,
    spec: EngineSpec,
    trained: Path,
    prompts: Sequence[Sequence[int]],
    images: Sequence[tuple[RowImage, ...]] = (),
    *,
    max_tokens: int,
) -> Followed:
    """Start an engine, and let it take the weights of the checkpoint `trained` over the wires of a run."""
    with running(spec) as engine:
        before = _score(engine, prompts, images, max_tokens)
        sent, received = _sync(engine, spec, trained, Path(context.directory))
        after = _score(engine, prompts, images, max_tokens)
        return Followed(before=before, after=after, sent=sent, received=received)


def score(
    context: RankContext, spec: EngineSpec, prompts: Sequence[Sequence[int]], images: Sequence[tuple[RowImage, ...]]
) -> list[FloatArray]:
    """Return an engine's log-probs of all tokens of prompts but the first."""
    with running(spec) as engine:
        return engine.prompt_logprobs(prompts, images)


def _score(
    engine: VllmEngine, prompts: Sequence[Sequence[int]], images: Sequence[tuple[RowImage, ...]], max_tokens: int
) -> Scored:
    sampling, shown = Sampling(temperature=1.0), images or [()] * len(prompts)
    requests = [
        GenerationRequest(token_ids=tuple(prompt), seed=i, sampling=sampling, max_tokens=max_tokens, images=each)
        for i, (prompt, each) in enumerate(zip(prompts, shown, strict=True))
    ]
    return Scored(prompts=engine.prompt_logprobs(prompts, images), completions=engine.generate(requests))


def _sync(
    engine: VllmEngine, spec: EngineSpec, trained: Path, directory: Path
) -> tuple[list[Mapping[str, int]], list[Mapping[str, int]]]:
    """Let a rank that holds the whole model send all that the engine's workers need."""
    model, config = read_model_spec(trained, tower=spec.vision and spec.vision.train), spec.config
    specs = weight_specs(model, "float32", by_expert=True)
    slices = whole_slices(model, map_model(sorted(trained.glob("*.safetensors"))))
    needs = engine_needs(model, config.tp, stages=config.pp, expert_parallel=config.expert_parallel)
    held = holding_of(slices, {name: each.shape for name, each in specs.items()})
    plan = build_plan(specs, {0: held}, dict(enumerate(needs, start=1)))
    store = open_store("127.0.0.1")
    shares = process_plans_of(
        plan,
        SyncConfig(),
        Rendezvous(address=f"tcp://127.0.0.1:{store.port}", rank=0, size=1, timeout_s=60.0, secret=b"the run's"),
        hosts=["here"] * (1 + len(needs)),
        num_ranks=1,
        beside={},
        segments=Path(tempfile.mkdtemp(dir=directory)) / "segment",
    )
    with ThreadPoolExecutor(1) as rank:
        opening = rank.submit(RoutedSender, shares[0], CPU)
        engine.open_bridge(shares[1:])
        wire = opening.result()
        sending = rank.submit(BridgeSender(shares[0], wire).send, slices, 1, with_checksums=True)
        received = engine.receive_over_bridge(1, version=1, with_checksums=True, scales={})
        sums = sending.result()
    wire.close()
    return [sums[1 + worker] for worker in range(len(needs))], [each.checksums for each in received]


def whole_slices(model: ModelSpec, tensors: Mapping[str, torch.Tensor]) -> list[Slice]:
    """All tensors of a model as a sync sends them, those of all experts of a layer one by one."""
    views = dict[str, torch.Tensor]()
    for placed in model.rules():
        rows = Counter[str]()
        for tensor in placed.rule.tensors:
            first, size = rows[tensor.name], model.dims.dim(tensor.shape[0])
            rows[tensor.name] += size
            if (whole := tensors.get(placed.name(tensor.name))) is not None:
                # Of an expert, gate and up have names of their own.
                one = whole[placed.expert] if tensor.of_expert else whole
                one = one.T if tensor.is_transposed else one
                views[placed.name(tensor.sent_name)] = one[first : first + size] if tensor.of_expert else one
    return [Slice(tensor=name, index=(), view=view, owned=True) for name, view in views.items()]


def read_twice(
    context: RankContext, spec: EngineSpec, directory: Path, shown: Sequence[tuple[str, bytes]]
) -> list[str]:
    """Return how rows, each with an image, are refused where the trainer and an engine read it; the last row lacks one
    of its places. Where both read it, they read the same tokens and pixels.
    """
    prepare_vllm(spec)
    from vllm import EngineArgs
    from vllm.multimodal.media import ImageMediaIO
    from vllm.renderers import renderer_from_config

    images = DataImages.of(str(directory / "model"), DataConfig(image_key="images"), str(directory / "images"))
    assert images is not None
    images.keeps, refused = True, list[str]()
    renderer = renderer_from_config(EngineArgs(**engine_arguments(spec)).create_engine_config())
    prompts, mark = ImagePrompts(renderer, images.reader.store.directory), images.reader.processor.image_token_id
    for i, (row, image) in enumerate(shown):
        try:
            message = Message(role="user", content=IMAGE_MARK, images=(digest := images.add(image, row),))
            ids, _, (found,) = images.expand([5, mark, 7], [message], row)
            missing = 1 if i == len(shown) - 1 else 0
            prompts.prompt(ids, [replace(found, places=found.places[: len(found.places) - missing])], row)
        except DataError as error:
            refused.append(str(error))
            continue
        (item,) = prompts._read(digest)["mm_kwargs"]["image"]
        for name, tensor in images.reader.read(digest).tensors.items():
            if name in item:
                assert torch.equal(item[name].data.flatten(), tensor.flatten()), (row, name)
        assert "pixel_values" in item
        # A server of vLLM that is sent the file decodes it so.
        assert open_image(image).tobytes() == ImageMediaIO().load_bytes(image).media.tobytes(), row
    return refused
