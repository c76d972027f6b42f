"""Derive the size of Ray's object store from the rows that pass through it in a step."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from megarl.config.batches import longest_row, max_row_tokens, mini_batch_prompts
from megarl.config.derived import Derived
from megarl.config.load import packaged
from megarl.config.schema import Config
from megarl.host.janitor import SHM_DIR
from megarl.host.memory import host_memory
from megarl.weights.families import read_model_spec

# Room for everything but rows: requests to engines, completions, the results of small calls.
LEAST_MIB = 256
# The smallest store with which Ray starts.
_RAY_LEAST_MIB = 75
# Bytes of a token in a row: its id and its place in the loss mask; and of each quantity, of the ids that top-k left,
# and of the number of an expert.
_TOKEN_BYTES, _NUMBER_BYTES, _EXPERT_BYTES = 4 + 1, 4, 2
# Quantities of a token: a scoring pass returns log-probs and entropies; an update reads advantages, log-probs of the
# old policy and of the reference, and the weight of a correction; with CPO three more.
_NUM_SCORED, _NUM_READ, _NUM_READ_BY_CPO = 2, 4, 3
# The shares of the host's memory and of its shared memory that the store may take. Weight syncs use the latter, too.
_MEMORY_SHARE, _SHM_SHARE = 0.3, 0.5
# By supervised command, its section and the rows of each of its examples.
_SUPERVISED: Mapping[str, tuple[str, int]] = {
    "sft": ("sft", 1),
    "train-reward": ("train_reward", 2),
    "train-preference": ("train_preference", 2),
}


def object_store(config: Config, command: str = "train", *, room: int | None = None) -> Derived | None:
    """Derive `cluster.object_store_mib` for a command; None if the run joins a Ray that has a store already.

    The store holds the rows of two passes, since those of one may still be there when the next begins. room: the most
    bytes that it may take; by default a share of this host's memory.
    """
    if config.cluster.address is not None:
        return None
    if room is None:
        memory = host_memory()
        room = int(min(_MEMORY_SHARE * memory, _SHM_SHARE * shutil.disk_usage(SHM_DIR).total))
    rows, num_bytes = pass_bytes(config, command)
    needed = (LEAST_MIB << 20) + 2 * num_bytes
    reason = f"{LEAST_MIB} MiB, and twice the {num_bytes / 1e9:,.2f} GB of a pass over {rows}"
    if needed > room:
        reason += f", but at most {_MEMORY_SHARE:.0%} of the host's memory and {_SHM_SHARE:.0%} of {SHM_DIR}"
    mib = max(_RAY_LEAST_MIB, -(-min(needed, room) // 2**20))
    return Derived(key="cluster.object_store_mib", value=mib, reason=reason)


def pass_bytes(config: Config, command: str = "train") -> tuple[str, int]:
    """Describe the rows of the pass that puts most into the store, and count its bytes if all rows have full length."""
    row = longest_row(config, sft=True)[0] if command == "sft" else max_row_tokens(config)
    distill, num_recorded = config.algo.distill, config.rollout.head_tokens and config.rollout.head_tokens + 1
    # The teacher's likeliest tokens are an id and a log-prob each; log-ratios come beside its log-probs.
    top_k_bytes = 2 * _NUMBER_BYTES * (distill.asked_top_k or 0)
    head_bytes = 2 * _NUMBER_BYTES * num_recorded
    update = _TOKEN_BYTES + _NUMBER_BYTES * (_NUM_READ + 2 * distill.is_sampled) + top_k_bytes
    if command in _SUPERVISED:
        section, per_example = _SUPERVISED[command]
        rows = getattr(config, section).batch_size * per_example
        return f"{rows:,} rows of {row:,} tokens", rows * row * update
    if command != "train":
        return "no rows", 0
    cpo, samples = config.algo.cpo, config.rollout.num_samples
    extra_bytes = _NUMBER_BYTES * max(0, config.rollout.top_k)
    rows, tokens = config.trainer.prompts_per_step * samples, row
    if config.actor.moe.replay_routing:
        extra_bytes += _routing_bytes(config)
    hinted, prompt_bytes = min(row + cpo.hint.max_tokens, config.actor.micro_batch_tokens), 0
    if cpo.method != "none":
        # In one pass with the plain rows come those with a hint, and perhaps those with another prompt's.
        tokens += (1 + cpo.shuffled_baseline) * hinted
        update += _NUMBER_BYTES * _NUM_READ_BY_CPO
    elif distill.teacher == "hint":
        tokens = max(tokens, (1 + distill.shuffled_baseline) * hinted)
        # The share of each token that counts, and the prompt that the teacher reads in the update.
        update += _NUMBER_BYTES
        prompt_bytes = _NUMBER_BYTES * hinted * (distill.mode == "exact")
    scored = rows * tokens * (_TOKEN_BYTES + _NUMBER_BYTES * _NUM_SCORED + extra_bytes + top_k_bytes)
    updated = mini_batch_prompts(config.trainer) * samples * (row * (update + extra_bytes + head_bytes) + prompt_bytes)
    return f"{rows:,} rows of {row:,} tokens", max(scored, updated)


def _routing_bytes(config: Config) -> int:
    """Return the bytes per token of the experts that a row names, in all layers; 0 until config.json is there."""
    places = [config.model.path, packaged(config.model.config_path or "")]
    found = next((path for path in map(Path, places) if (path / "config.json").is_file()), None)
    dims = None if found is None else read_model_spec(found).dims
    return 0 if dims is None or dims.experts is None else _EXPERT_BYTES * dims.num_layers * dims.experts.per_token
