"""Translate the values of single options of verl, LUFFY and OpenRLHF, by rules as `rules` defines them."""

from collections.abc import Sequence
from functools import partial

from megarl.errors import ConfigError
from megarl.migrate.rules import RULES, UNSET, Options, listed

_ACTOR = "actor_rollout_ref.actor"


@RULES.register("every_steps")
def every_steps(value: float | None, _: Options) -> float:
    """Return a number of steps between validations; −1, which means never, has no counterpart."""
    if value is None or value < 1:
        raise ConfigError("there is validation wherever data.val is set; leave data.val out to have none")
    return value


@RULES.register("truncation")
def truncation(value: object, options: Options) -> object:
    """Return what happens to prompts that are too long. Megarl never cuts prompts, so verl's cuts become dropped
    prompts.
    """
    return UNSET if options.get("data.filter_overlong_prompts") else ("error" if value == "error" else "drop")


@RULES.register("weighted_files")
def weighted_files(value: object, options: Options) -> object:
    """Return OpenRLHF's comma-separated prompt files with their sampling probabilities as entries of data.train."""
    given = options.get("prompt_data")
    if value is None or given is None:
        return UNSET
    files = listed(given)
    weights = [float(part) for part in str(value).split(",")]
    if len(weights) != len(files):
        raise ConfigError(f"{len(weights)} probabilities do not fit the {len(files)} files of prompt_data")
    return [{"path": path, "weight": weight} for path, weight in zip(files, weights, strict=True)]


@RULES.register("reward_url")
def reward_url(value: object, _: Options) -> object:
    """Return rewards.manager, rewards.remote.urls and rewards.custom.path for OpenRLHF's remote_rm_url."""
    if value is None:
        return UNSET
    urls = [part for part in str(value).split(",") if part]
    files = [url for url in urls if url.endswith(".py")]
    return ("rule", UNSET, files[0]) if files else ("remote", urls, UNSET)


@RULES.register("loggers")
def loggers(value: Sequence[str] | None, _: Options) -> bool:
    """Return whether to log to TensorBoard, from verl's list of loggers. `wandb_project` reads Weights & Biases from
    it.
    """
    return "tensorboard" in (value or [])


@RULES.register("wandb_project")
def wandb_project(value: object, options: Options) -> object:
    """Return verl's project name if its list of loggers includes Weights & Biases."""
    return value if "wandb" in (options.get("trainer.logger") or []) else UNSET


@RULES.register("kl_place")
def kl_place(_: object, options: Options) -> object:
    """Return where the KL penalty acts: in the reward, in the loss, or in both, as verl's two switches say.

    A switch that is on counts only if the coefficient of its penalty is not 0.
    """
    switches = {
        "reward": ("algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef"),
        "loss": (f"{_ACTOR}.use_kl_loss", f"{_ACTOR}.kl_loss_coef"),
    }
    places = [place for place, names in switches.items() if all(options.get(name) for name in names)]
    return "both" if len(places) == 2 else places[0] if places else UNSET


@RULES.register("kl_in_reward")
def kl_in_reward(value: object, options: Options) -> object:
    """Return the value of an option of verl's penalty in the reward if there is one."""
    return value if kl_place(None, options) in ("reward", "both") else UNSET


@RULES.register("kl_in_loss")
def kl_in_loss(value: object, options: Options) -> object:
    """Return the value of an option of verl's penalty in the loss, if there is one.

    It is for the first of two keys if this is the only penalty, or for the second key beside a penalty in the reward.
    """
    place = kl_place(None, options)
    value = kl_estimator(value, {"use_kl_loss": place in ("loss", "both")})
    names: dict[object, str] = {"k3+": "k3_straight_through", "low_var_kl+": "k3_straight_through"}
    value = names.get(value, value)
    return {"loss": (value, UNSET), "both": (UNSET, value)}.get(str(place), UNSET)


@RULES.register("kl_estimator")
def kl_estimator(value: object, options: Options) -> object:
    """Return the name of the KL estimator; those without a useful gradient are refused for a penalty in the loss."""
    if options.get("use_kl_loss") and value in ("k1", "kl", "abs"):
        raise ConfigError(f"{value} has no useful gradient in the loss, so it is refused there; use k2 or k3")
    return value


@RULES.register("init_kl_coef")
def init_kl_coef(value: object, options: Options) -> tuple[object, str]:
    """Return algo.kl.coef and algo.kl.where for OpenRLHF's init_kl_coef; 0 switches the penalty off."""
    return (value, "loss" if options.get("use_kl_loss") else "reward") if value else (UNSET, "none")


@RULES.register("reward_components")
def reward_components(value: Sequence[str], options: Options) -> dict[str, float]:
    """Return the weights of verl's reward components by name, which are 1 if it names none."""
    weights = options.get("algorithm.gdpo_reward_weights") or [1.0] * len(value)
    return {"correct" if key == "acc" else key: weight for key, weight in zip(value, weights, strict=True)}


@RULES.register("clip_ratio")
def clip_ratio(value: object, options: Options) -> object:
    """Return both clip bounds for verl's clip_ratio, except for a bound that is set by an option of its own."""
    own = (f"{_ACTOR}.clip_ratio_low", f"{_ACTOR}.clip_ratio_high")
    return tuple(UNSET if options.get(name) is not None else value for name in own)


@RULES.register("dual_clip")
def dual_clip(value: object, options: Options, *, loss: str) -> object:
    """Return the bound of the dual clip, or `UNSET` for losses other than PPO's, which have no dual clip."""
    return value if options.get(loss) in (None, "vanilla", "ppo") else None


@RULES.register("of_loss")
def of_loss(value: object, options: Options, *, loss: str) -> object:
    """Return an option's value if verl's run has the loss that reads it."""
    return value if options.get(f"{_ACTOR}.policy_loss.loss_mode") == loss else UNSET


@RULES.register("filter_groups")
def filter_groups(value: object, options: Options) -> object:
    """Return the filter bounds for verl's dynamic sampling, which keeps groups whose samples are not all equal."""
    if not value:
        return UNSET
    if options.get("algorithm.filter_groups.metric") not in (None, "acc"):
        raise ConfigError("groups are kept by bounds of their mean; choose those for the range of your rewards")
    return [0.0, 1.0]


@RULES.register("refills")
def refills(value: int | None, _: Options) -> int:
    """Return how many batches verl's dynamic sampling may draw in addition to the first one."""
    if value and value > 0:
        return value - 1
    raise ConfigError("there is no unlimited number of batches; choose a limit")


@RULES.register("dynamic_filtering")
def dynamic_filtering(value: object, options: Options) -> object:
    """Return the filter's bounds, the number that it filters by, and the refills for OpenRLHF's dynamic filtering.

    OpenRLHF refills without limit; here the limit becomes 10 further batches.
    """
    return ([*options.get("dynamic_filtering_reward_range", (0, 1))], "score", 10) if value else UNSET


@RULES.register("overlong")
def overlong(value: float | str | None, options: Options, *, switch: str) -> object:
    """Return the length of the overlong buffer if verl's switch for the overlong penalty is on."""
    return int(value) if value and options.get(switch, True) else UNSET


@RULES.register("is_correction")
def is_correction(value: object, options: Options) -> object:
    """Return name, low and high for OpenRLHF's correction of the mismatch between engine and trainer."""
    if not value:
        return UNSET
    bounds = options.get("vllm_is_truncated_threshold")
    low, high = bounds if isinstance(bounds, list) else (UNSET, bounds)
    kind = options.get("vllm_is_correction_type") or "tis"
    if isinstance(bounds, list):
        return kind, low, high
    return ("tis_upper" if kind == "tis" else kind, UNSET, UNSET if bounds is None else high)


@RULES.register("rows_as_tokens")
def rows_as_tokens(value: float | str | None, options: Options, *, dynamic: str, lengths: tuple[str, str]) -> object:
    """Convert a micro-batch size in rows to tokens (rows × full length), unless the run sizes micro-batches by tokens
    already.
    """
    if value is None or options.get(dynamic):
        return UNSET
    return int(value) * sum(int(options[length]) for length in lengths)


@RULES.register("tokens_of_ranks")
def tokens_of_ranks(value: float | str | None, options: Options, *, dynamic: str, context: str) -> object:
    """Convert tokens per device to tokens per data-parallel rank, of which `context` devices (context parallelism)
    share one.
    """
    return int(value) * int(options.get(context) or 1) if value and options.get(dynamic) else UNSET


@RULES.register("rows_as_prompts")
def rows_as_prompts(value: int, options: Options) -> int:
    """Return OpenRLHF's train_batch_size, a number of rows, as a number of prompts."""
    samples = int(options["n_samples_per_prompt"])
    if value % samples:
        raise ConfigError(f"{value} rows are not a multiple of {samples} samples per prompt")
    return min(value // samples, int(options["rollout_batch_size"]))


def _optimizer_steps(options: Options, steps: float) -> int:
    """Convert a number of verl's training steps to optimizer steps, as verl's learning-rate schedule counts training
    steps.
    """
    batches = options["data.train_batch_size"] // options[f"{_ACTOR}.ppo_mini_batch_size"]
    return round(steps * max(batches, 1) * options.get(f"{_ACTOR}.ppo_epochs", 1))


@RULES.register("warmup_steps")
def warmup_steps(value: float | None, options: Options) -> object:
    """Convert verl's warm-up, which counts training steps, to optimizer steps."""
    return UNSET if value is None or value < 0 else _optimizer_steps(options, value)


@RULES.register("warmup_share")
def warmup_share(value: float | None, options: Options, *, steps: str = "", given: str = "") -> object:
    """Convert a warm-up that is given as a share of the run to optimizer steps, if the run's number of steps is known.

    steps: the option for the run's number of steps, if there is one. given: the option that sets the warm-up itself.
    """
    if not value or (options.get(given) or -1) > 0:
        return UNSET
    if not options.get(steps):
        raise ConfigError("a share of a run whose number of steps is not in the file; set a number of optimizer steps")
    return _optimizer_steps(options, value * options[steps])


@RULES.register("off_policy_loss")
def off_policy_loss(value: object, _: Options) -> object:
    """Return the name of the loss on demonstrations if the option that switches LUFFY's loss on is true."""
    return "luffy" if value else UNSET


@RULES.register("sampled_validation")
def sampled_validation(value: object, _: Options) -> object:
    """Return the temperature of validation. 0 means greedy answers, which megarl's validation generates in addition
    anyway.
    """
    return value if value else UNSET


@RULES.register("both_bounds")
def both_bounds(value: object, options: Options) -> object:
    """Return OpenRLHF's eps_clip for both clip bounds, unless it has an option for each."""
    return UNSET if options.get("eps_clip_low_high") else (value, value)


@RULES.register("if_grpo")
def if_grpo(value: object, options: Options) -> object:
    """Return the value with GRPO and its variants, which alone read it in verl."""
    return value if str(options["algorithm.adv_estimator"]).startswith(("grpo", "gdpo", "cpo")) else UNSET


RULES.register("verl_rows")(
    partial(
        rows_as_tokens,
        dynamic=f"{_ACTOR}.use_dynamic_bsz",
        lengths=("data.max_prompt_length", "data.max_response_length"),
    )
)
RULES.register("verl_tokens")(
    partial(tokens_of_ranks, dynamic=f"{_ACTOR}.use_dynamic_bsz", context=f"{_ACTOR}.ulysses_sequence_parallel_size")
)
RULES.register("openrlhf_rows")(
    partial(rows_as_tokens, dynamic="use_dynamic_batch", lengths=("prompt_max_len", "generate_max_len"))
)
RULES.register("openrlhf_tokens")(partial(tokens_of_ranks, dynamic="use_dynamic_batch", context="ring_attn_size"))


@RULES.register("adapter_rank")
def adapter_rank(value: float | str | None, options: Options, *, alpha: str, default: float) -> object:
    """Return the rank and the scale of adapters, the latter from the option `alpha`; without a rank there are none."""
    return (int(value), float(options.get(alpha, default))) if value else (UNSET, UNSET)


# Layers that adapters of `actor.lora.targets` belong to, as names of Hugging Face's modules or of Megatron's.
_ADAPTED = {
    "attention": ({"q_proj", "k_proj", "v_proj", "o_proj"}, {"linear_qkv", "linear_proj"}),
    "mlp": ({"gate_proj", "up_proj", "down_proj"}, {"linear_fc1", "linear_fc2"}),
}


@RULES.register("adapter_targets")
def adapter_targets(value: object, options: Options, *, rank: str) -> object:
    """Return which kinds of layers have adapters, if there are adapters; a part of a kind has no counterpart."""
    if not options.get(rank) or value in (None, "all-linear", ["all-linear"]):
        return UNSET
    names = set(listed(value))
    chosen = {kind: modules for kind, forms in _ADAPTED.items() for modules in forms if modules <= names}
    if not chosen or names - set().union(*chosen.values()):
        raise ConfigError(
            f"{sorted(names)} has no counterpart: all of {', '.join(sorted(_ADAPTED['attention'][0]))} have adapters, "
            f"or none, and so all of {', '.join(sorted(_ADAPTED['mlp'][0]))}, also of experts"
        )
    return [*chosen, *(["experts"] if "mlp" in chosen else [])]
