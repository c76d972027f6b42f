"""Check a configuration against the config.json of a role's model: what must divide, and what experts need."""

from collections.abc import Mapping

from megarl.config.batches import longest_row
from megarl.config.lora import sent_alone
from megarl.config.schema import ActorConfig, Config, LayoutConfig, MoeConfig, role_settings
from megarl.errors import ConfigError
from megarl.host.device.platform import platform

# Names that config.json files use for the number of experts and for the width of one; the first that is present counts.
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_WIDTHS = ("moe_intermediate_size", "intermediate_size")


def check_model(
    config: Config,
    hf_config: Mapping[str, object],
    role: str = "actor",
    *,
    for_sft: bool = False,
    biased_experts: bool = False,
) -> None:
    """Check a configuration against the config.json of a role's model, given as a mapping. Raises ConfigError.

    biased_experts: whether the model's experts have biases.
    """
    layout = role_settings(config)[role].layout
    check_tp(layout, hf_config, role)
    check_delta_nets(layout, hf_config, role)
    check_stages(layout, hf_config, f"{role}.layout")
    check_experts(layout, hf_config, role)
    if biased_experts and layout.etp > 1:
        raise ConfigError(
            f"{role}.layout.etp: got {layout.etp}, expected 1, since Megatron does not split experts with biases; "
            f"raise {role}.layout.ep instead"
        )
    if role in ("actor", "critic"):
        check_recompute(role_settings(config)[role], hf_config, role)
    if role == "actor":
        check_moe_settings(config, hf_config)
        check_engine_tp(config, hf_config)
        check_engine_model(config, hf_config, on_cpu=platform().name == "cpu")
        if not for_sft:
            check_engine_windows(hf_config)
        check_expert_width(config, hf_config, platform().expert_width_multiple)
    (longest, terms), limit = longest_row(config, sft=for_sft), _dimension(hf_config, "max_position_embeddings", role)
    if limit < longest:
        whose = "the model" if role == "actor" else f"the {role}"
        total, remedy = (f"{terms} = {longest}", "shorten one of the two") if " + " in terms else (terms, "lower it")
        raise ConfigError(f"{total}, but {whose} has max_position_embeddings={limit}; {remedy}")


def check_tp(layout: LayoutConfig, hf_config: Mapping[str, object], role: str) -> None:
    """Raise ConfigError unless tp splits the attention and the MLPs of a role's model evenly, as Megatron does.

    With more ranks than key-value heads, Megatron splits the rows of each group of heads, and gathers the products.
    """
    sizes = {name: _dimension(hf_config, name, role) for name in _split_sizes(hf_config)}
    heads, kv_heads = sizes["num_attention_heads"], _num_kv_heads(hf_config, role)

    def unfit(tp: int) -> list[str]:
        undivided = [f"{name}={size}" for name, size in sizes.items() if size % tp]
        found = [f"does not divide the model's {' and '.join(undivided)}"] if undivided else []
        if kv_heads % tp and tp % kv_heads:
            found.append(f"neither divides num_key_value_heads={kv_heads} nor is a multiple of it")
        elif tp > kv_heads and hf_config.get("qk_norm_type") == "per_layer":
            found.append(
                f"exceeds num_key_value_heads={kv_heads}, though a norm over all heads needs whole ones on a rank"
            )
        elif tp > kv_heads and not undivided:
            head_dim = hf_config.get("head_dim") or _dimension(hf_config, "hidden_size", role) // heads
            if (rows := 2 * kv_heads * int(str(head_dim))) % tp:
                found.append(f"does not divide the {rows} rows of the model's key and value heads")
        return found

    if reasons := unfit(layout.tp):
        valid = ", ".join(str(n) for n in range(1, heads + 1) if not unfit(n))
        raise ConfigError(f"{role}.layout.tp: got {layout.tp}, which {' and '.join(reasons)}; valid values: {valid}")


def check_delta_nets(layout: LayoutConfig, hf_config: Mapping[str, object], role: str) -> None:
    """Raise ConfigError unless a layout keeps rows and heads of a model with gated delta nets whole."""
    if hf_config.get("linear_num_key_heads") is None:
        return
    if layout.cp > 1:
        raise ConfigError(
            f"{role}.layout.cp: got {layout.cp}, but gated delta nets pass a state from token to token of a row, and "
            f"no context-parallel form of them is implemented; set {role}.layout.cp=1, and more tp or recompute"
        )
    if (size := _dimension(hf_config, "num_key_value_heads", role)) % layout.tp:
        valid = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
        raise ConfigError(
            f"{role}.layout.tp: got {layout.tp}, which does not divide num_key_value_heads={size}, and heads of gated "
            f"attention cannot be split; valid values: {valid}"
        )


def check_stages(layout: LayoutConfig, hf_config: Mapping[str, object], where: str) -> None:
    """Raise ConfigError unless the layers divide evenly over the pipeline stages (and virtual chunks) without a set
    number.
    """
    if layout.pp == 1:
        return
    num_layers = int(str(hf_config["num_hidden_layers"]))
    if layout.pipeline_layout is not None:
        if (found := sum(map(sum, layout.chunk_layers(num_layers)))) != num_layers:
            raise ConfigError(
                f"{where}.pipeline_layout: got {layout.pipeline_layout} with {found} layers, expected the model's "
                f"num_hidden_layers={num_layers}; change it"
            )
        return
    named = [n for n in (layout.first_stage_layers, layout.last_stage_layers) if n is not None]
    rest, stages = num_layers - sum(named), layout.pp - len(named)
    if rest < stages or (stages == 0 and rest) or (stages and rest % (stages * layout.virtual_pp)):
        raise ConfigError(
            f"{where}: {num_layers} layers do not split over pp={layout.pp} stages"
            f"{f' of {layout.virtual_pp} chunks' if layout.virtual_pp > 1 else ''} "
            f"(first_stage_layers={layout.first_stage_layers}, last_stage_layers={layout.last_stage_layers}); "
            f"choose another pp, or set {where}.first_stage_layers or last_stage_layers so that the rest divides evenly"
        )


def check_experts(layout: LayoutConfig, hf_config: Mapping[str, object], role: str) -> None:
    """Raise ConfigError unless ep and etp suit the experts and Megatron can train them; dense models need both 1."""
    where, key = f"{role}.layout", _first(NUM_EXPERTS, hf_config)
    if key is None:
        for name in ("ep", "etp"):
            if (size := getattr(layout, name)) > 1:
                raise ConfigError(
                    f"{where}.{name}: got {size}, but the model has no experts to split; set {where}.{name}=1"
                )
        return
    _require_divisor(layout.ep, f"{where}.ep", key, _dimension(hf_config, key, role))
    width = _first(_WIDTHS, hf_config) or _WIDTHS[0]
    _require_divisor(layout.etp, f"{where}.etp", width, _dimension(hf_config, width, role))
    if layout.tp > 1 and not layout.sequence_parallel:
        raise ConfigError(
            f"{where}.sequence_parallel: got false with tp={layout.tp}, but Megatron trains models with experts only "
            f"with it; set {where}.sequence_parallel=true or {where}.tp=1"
        )


def check_recompute(settings: ActorConfig, hf_config: Mapping[str, object], role: str) -> None:
    """Raise ConfigError for parts of layers that a role's model has not, and for units of layers that do not divide."""
    has = {
        "experts": _first(NUM_EXPERTS, hf_config) is not None,
        "shared experts": any(hf_config.get(key) for key in ("n_shared_experts", "shared_expert_intermediate_size")),
        "latent attention": hf_config.get("kv_lora_rank") is not None,
    }
    needs = {
        "moe": "experts",
        "moe_act": "experts",
        "shared_experts": "shared experts",
        "mla_up_proj": "latent attention",
    }
    if settings.recompute == "selective":
        for name in settings.recompute_modules or ():
            if name in needs and not has[needs[name]]:
                raise ConfigError(
                    f"actor.recompute_modules: got {name}, but the model of the {role} has no {needs[name]}; "
                    f"remove {name}"
                )
    if settings.recompute == "full" and (unit := settings.recompute_unit) > 1:
        counts = settings.layout.chunk_layers(int(str(hf_config["num_hidden_layers"])))
        if uneven := sorted({count for chunk in counts for count in chunk if count % unit}):
            raise ConfigError(
                f"actor.recompute_unit: got {unit}, which does not divide the {uneven[0]} layers of a model chunk of "
                f"the {role}; set another, or actor.recompute_layers instead"
            )


def check_moe_settings(config: Config, hf_config: Mapping[str, object]) -> None:
    """Raise ConfigError for settings that a model with experts, or one without, does not allow."""
    if _first(NUM_EXPERTS, hf_config) is None and config.actor.moe != MoeConfig():
        raise ConfigError("actor.moe: is set, but the model has no experts; remove it")
    if _first(NUM_EXPERTS, hf_config) is not None and config.run.batch_invariant:
        raise ConfigError(
            "run.batch_invariant: got true for a model with experts, for whose products Megatron has no kernels that "
            "do not depend on the number of tokens; set run.batch_invariant=false"
        )
    num_groups = 1 if hf_config.get("topk_method") == "greedy" else int(str(hf_config.get("n_group") or 1))
    if num_groups > 1:
        config.actor.moe.check_fused("actor.moe", num_groups=num_groups)


def check_expert_width(config: Config, hf_config: Mapping[str, object], multiple: int) -> None:
    """Raise ConfigError unless an expert's width per engine worker is a multiple of `multiple`.

    vLLM pads other widths, and a weight sync cannot load weights into padded experts.
    """
    name, tp = _first(_WIDTHS, hf_config), 1 if config.rollout.engine.expert_parallel else config.rollout.engine.tp
    if _first(NUM_EXPERTS, hf_config) is None or name is None:
        return
    width = _dimension(hf_config, name, "actor")
    if width % (tp * multiple):
        valid = [n for n in range(1, width + 1) if width % (n * multiple) == 0]
        remedy = f"set rollout.engine.tp to one of {', '.join(map(str, valid))}" if valid else "use another model"
        raise ConfigError(
            f"rollout.engine.tp: got {tp}, so an engine's worker has {width / tp:g} of {name}={width} of each expert, "
            f"expected a multiple of {multiple}: vLLM pads others on this device, and padded experts cannot take new "
            f"weights; {remedy}, or run on CUDA"
        )


def check_engine_tp(config: Config, hf_config: Mapping[str, object]) -> None:
    """Raise ConfigError unless rollout.engine.tp divides the model, and every one of rollout.engine.pp stages gets a
    layer; vLLM may replicate key-value heads to fit.
    """
    tp, pp = config.rollout.engine.tp, config.rollout.engine.pp
    if pp > 1 and pp > (num_layers := int(str(hf_config["num_hidden_layers"]))):
        raise ConfigError(
            f"rollout.engine.pp: got {pp}, but the model has num_hidden_layers={num_layers}, so that some stages would "
            "be empty; lower it"
        )
    sizes = {name: int(str(hf_config[name])) for name in _split_sizes(hf_config)}
    kv_heads = _num_kv_heads(hf_config, "actor")
    valid = [
        n
        for n in range(1, sizes["num_attention_heads"] + 1)
        if all(size % n == 0 for size in sizes.values()) and (kv_heads % n == 0 or n % kv_heads == 0)
    ]
    if tp not in valid:
        named = ", ".join(f"{name}={size}" for name, size in (sizes | {"num_key_value_heads": kv_heads}).items())
        raise ConfigError(
            f"rollout.engine.tp: got {tp}, which does not divide the model ({named}); "
            f"valid values: {', '.join(map(str, valid))}"
        )


def check_engine_model(config: Config, hf_config: Mapping[str, object], *, on_cpu: bool) -> None:
    """Raise ConfigError for drafts without a layer for them, and for what engines cannot do with experts or without."""
    engine, has_experts = config.rollout.engine, any(hf_config.get(name) for name in NUM_EXPERTS)
    if engine.speculation.method == "mtp" and not hf_config.get("num_nextn_predict_layers"):
        raise ConfigError(
            "rollout.engine.speculation.method: got mtp, but config.json has no num_nextn_predict_layers, so no layer "
            "predicts further tokens; set it to ngram or none"
        )
    if on_cpu and engine.quantization is not None and has_experts:
        raise ConfigError(
            f"rollout.engine.quantization: got {engine.quantization} for a model with experts, whose weights are not "
            "rounded on CPUs; set it to null"
        )
    if on_cpu and has_experts and sent_alone(config.actor.lora) is not None:
        raise ConfigError(
            "actor.lora.sync: got adapter for a model with experts, which vLLM's CPU build computes by kernels in "
            "Triton as soon as there are adapters; set it to merged"
        )
    if engine.expert_parallel and (on_cpu or not has_experts or engine.tp == 1):
        why = (
            "vLLM's CPU build ends by a segmentation fault with it"
            if on_cpu
            else "the model has no experts"
            if not has_experts
            else "rollout.engine.tp=1 leaves a single worker to hold them"
        )
        raise ConfigError(f"rollout.engine.expert_parallel: got true, but {why}; set it to false")


def check_engine_windows(hf_config: Mapping[str, object]) -> None:
    """Raise ConfigError if only some layers of a model have windows that engines would give to all."""
    first, types = hf_config.get("max_window_layers"), hf_config.get("layer_types")
    if hf_config.get("use_sliding_window") and (first or (isinstance(types, list) and len({*types}) > 1)):
        raise ConfigError(
            f"model.path: config.json has use_sliding_window=true and max_window_layers={first}, so not all layers "
            "have windows, but vLLM builds such models with windows in all or none; use another model, or train this "
            "one by megarl sft"
        )


def _split_sizes(hf_config: Mapping[str, object]) -> list[str]:
    """Return the names of sizes that tensor parallelism divides; models whose layers all have experts may lack one."""
    no_dense = hf_config.get("intermediate_size") == 0 and _first(NUM_EXPERTS, hf_config) is not None
    # Those of gated delta nets, each with its value heads.
    key_heads = [name for name in ("linear_num_key_heads",) if hf_config.get(name) is not None]
    return ["num_attention_heads", *([] if no_dense else ["intermediate_size"]), *key_heads]


def _num_kv_heads(hf_config: Mapping[str, object], role: str) -> int:
    """Return the number of key-value heads, which is that of query heads if config.json has none."""
    name = "num_key_value_heads"
    return _dimension(hf_config, "num_attention_heads" if hf_config.get(name) is None else name, role)


def _first(names: tuple[str, ...], hf_config: Mapping[str, object]) -> str | None:
    return next((name for name in names if hf_config.get(name) is not None), None)


def _require_divisor(divisor: int, where: str, name: str, size: int) -> None:
    if size % divisor:
        valid = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
        raise ConfigError(
            f"{where}: got {divisor}, which does not divide the model's {name}={size}; valid values: {valid}"
        )


def _dimension(hf_config: Mapping[str, object], name: str, role: str) -> int:
    """Return the size `name` from the config.json of a role's model. Raises ConfigError unless it is a positive int."""
    value = hf_config.get(name)
    if type(value) is not int or value < 1:
        key = "model.path" if role == "actor" else f"{role}.model_path"
        raise ConfigError(f"{key}: config.json has {name}={value!r}, expected a positive int; is it a causal LM?")
    return value
