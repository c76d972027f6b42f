"""Check the settings of distillation across sections: who teaches which rows, and what each mode needs of teachers."""

from collections.abc import Collection, Mapping

from megarl.config.schema import Config, TeacherConfig, role_settings, teacher_sections
from megarl.errors import ConfigError


def teachers_of(config: Config) -> dict[str, TeacherConfig]:
    """Return the sections of the teachers that a run asks, by the names of their roles; none if nobody teaches, or the
    policy itself.
    """
    if config.algo.distill.teacher == "none":
        return {}
    own = config.algo.distill.averages or config.teacher != TeacherConfig()
    return {key: each for key, each in teacher_sections(config).items() if key != "teacher" or own}


def teacher_of(config: Config, data_source: str, environment: str = "") -> str:
    """Return the name of the role that teaches a sample: that of its environment, of its data source, or of all others.

    Raises ConfigError if there is none.
    """
    if config.algo.distill.teacher == "hint":
        return "teacher"
    by_source = {
        source: key
        for key, each in teachers_of(config).items()
        if key != "teacher"
        for source in each.sources or (key.removeprefix("teachers."),)
    }
    for name in (environment, data_source):
        if name in by_source:
            return by_source[name]
    if "teacher" not in teachers_of(config):
        raise ConfigError(
            f"teachers: none is for the data source {data_source!r} (environment {environment or 'none'}); add it to "
            "teachers.NAME.sources, or set teacher.model_path to a teacher of all other samples"
        )
    return "teacher"


def check_distill(config: Config) -> None:
    """Raise ConfigError for teachers that nothing asks or that are not there, and for modes that they cannot serve."""
    distill, asked = config.algo.distill, teachers_of(config)
    if distill.teacher == "none":
        for key, each in teacher_sections(config).items():
            if each != TeacherConfig():
                raise ConfigError(
                    f"{key}: is set, but algo.distill.teacher=none asks no teacher; set algo.distill.teacher=model, or "
                    f"remove {key}"
                )
        return
    if distill.averages:
        _check_average(config)
    if distill.teacher == "hint":
        _check_hint(config)
    elif not asked:
        raise ConfigError(
            "teacher.model_path: is not set, but algo.distill.teacher=model; set it to the directory or hub id of the "
            "teacher, or list teachers by data source under teachers"
        )
    _check_sources(config, asked)
    for key, each in asked.items():
        if each.model_path is None and not distill.averages:
            raise ConfigError(
                f"{key}.model_path: is not set, but algo.distill.teacher={distill.teacher} asks {key}; set it to its "
                "directory or hub id, of which servers need the tokenizer alone"
            )
        if each.servers and distill.mode == "exact":
            raise ConfigError(
                f"algo.distill.mode: got exact with {key}.servers, which send log-probs of few tokens; set "
                "algo.distill.mode=topk, or run the teacher on Megatron"
            )
        if each.servers and config.rollout.temperature != 1:
            raise ConfigError(
                f"rollout.temperature: got {config.rollout.temperature} with {key}.servers, which answer log-probs at "
                "temperature 1; set it to 1, or run the teacher on Megatron"
            )
    truncates = config.rollout.top_k != -1 or config.rollout.top_p != 1
    if truncates and (distill.is_dense or any(each.servers for each in asked.values())):
        raise ConfigError(
            f"rollout.top_k and rollout.top_p: got {config.rollout.top_k} and {config.rollout.top_p}, but the "
            f"teacher's distribution is over the whole vocabulary (algo.distill.mode={distill.mode}); set "
            "rollout.top_k=-1 and rollout.top_p=1.0"
        )
    if distill.mode == "exact":
        _check_same_shards(config, asked)


def _check_hint(config: Config) -> None:
    """Raise ConfigError for what a teacher that reads hints cannot do, or would not notice."""
    distill, rollout, method = config.algo.distill, config.rollout, config.algo.cpo.method
    if config.teachers:
        raise ConfigError(
            f"teachers: got {', '.join(config.teachers)} with algo.distill.teacher=hint, where the policy teaches "
            "itself, or the one model of the section teacher; remove them, or set algo.distill.teacher=model"
        )
    if method != "none":
        raise ConfigError(
            f"algo.cpo.method: got {method} with algo.distill.teacher=hint, which both learn from one hint; set one of "
            "them to none"
        )
    if rollout.top_k != -1 or rollout.top_p != 1:
        raise ConfigError(
            f"rollout.top_k and rollout.top_p: got {rollout.top_k} and {rollout.top_p} with algo.distill.teacher=hint, "
            "which compares log-probs over the whole vocabulary; set rollout.top_k=-1 and rollout.top_p=1.0"
        )
    if distill.shuffled_baseline and config.trainer.prompts_per_step == 1:
        raise ConfigError(
            "algo.distill.shuffled_baseline: got true with trainer.prompts_per_step=1, where no other prompt lends its "
            "hint; raise prompts_per_step, or set it to false"
        )


def _check_average(config: Config) -> None:
    """Raise ConfigError for a teacher whose weights cannot begin as the policy's, or cannot follow them."""
    teacher, actor = config.teacher, config.actor.layout
    got = f"algo.distill.teacher_update_rate: got {config.algo.distill.teacher_update_rate:g}"
    if config.teachers:
        raise ConfigError(
            f"{got} with teachers {', '.join(config.teachers)}, but only the one teacher of the section teacher can "
            "follow the policy; remove teachers, or set teacher_update_rate=null"
        )
    if teacher.model_path not in (None, config.model.path):
        raise ConfigError(
            f"{got} with teacher.model_path={teacher.model_path}, but a teacher that follows the policy begins as "
            f"model.path={config.model.path}; leave teacher.model_path out, or set teacher_update_rate=null"
        )
    for key in ("servers", "writers"):
        if getattr(teacher, key):
            raise ConfigError(
                f"{got} with teacher.{key}, whose weights stay as they are; remove teacher.{key}, or set "
                "teacher_update_rate=null"
            )
    if teacher.layout not in (None, actor):
        raise ConfigError(
            f"teacher.layout: got {teacher.layout} with algo.distill.teacher_update_rate, expected that of the actor, "
            f"{actor}, as each rank averages the weights that it holds; set teacher.layout=null"
        )


def check_distill_of_sft(config: Config) -> None:
    """Raise ConfigError for what needs samples of the policy, or sources of rows, where rows come from a file."""
    distill, asked = config.algo.distill, teachers_of(config)
    if distill.teacher == "hint" or distill.decay_steps:
        key, got = ("teacher", "hint") if distill.teacher == "hint" else ("decay_steps", distill.decay_steps)
        raise ConfigError(
            f"algo.distill.{key}: got {got}, but sft reads no hints, and its divergence from a teacher is its whole "
            f"loss; leave {key} out, or use megarl train"
        )
    if distill.averages:
        raise ConfigError(
            f"algo.distill.teacher_update_rate: got {distill.teacher_update_rate:g}, but sft learns from the teacher "
            "alone, and one that begins as the policy has nothing to teach; set teacher_update_rate=null and "
            "teacher.model_path"
        )
    if distill.is_sampled:
        raise ConfigError(
            "algo.distill.mode: got sampled, which estimates a divergence from the policy's own samples, but sft "
            "trains on those of a file; set algo.distill.mode=exact or topk, or algo.distill.teacher=none"
        )
    for key, each in asked.items():
        if key != "teacher" or each.servers or each.layout not in (None, config.actor.layout):
            raise ConfigError(
                f"{key}: sft takes one teacher, which runs on Megatron in the actor's layout; set teacher.model_path "
                "alone"
            )


def _check_sources(config: Config, asked: Mapping[str, TeacherConfig]) -> None:
    """Raise ConfigError for two teachers of one data source, and for sources of the teacher that has all others."""
    if config.teacher.sources:
        raise ConfigError(
            f"teacher.sources: got {list(config.teacher.sources)}, but this teacher has all samples that no other one "
            "has; name it under teachers, or remove sources"
        )
    taught: dict[str, str] = {}
    for key, each in asked.items():
        for source in each.sources or (() if key == "teacher" else (key.removeprefix("teachers."),)):
            if source in taught:
                raise ConfigError(
                    f"{key}.sources: {source} has the teacher {taught[source]} already; leave it to one of them"
                )
            taught[source] = key


def _check_same_shards(config: Config, asked: Collection[str]) -> None:
    """Raise ConfigError unless the only teacher, if it is not the actor, is split over ranks as the actor is, whose
    update computes it.
    """
    if len(asked) > 1:
        raise ConfigError(
            f"algo.distill.mode: got exact with the teachers {', '.join(asked)}, expected one, whose hidden states "
            "each micro-batch of the update computes; set algo.distill.mode=topk, or leave one teacher"
        )
    own, actor = {key: role_settings(config)[key].layout for key in asked}, config.actor.layout
    for key, layout in own.items():
        if layout != actor:
            raise ConfigError(
                f"{key}.layout: got {layout}, expected that of the actor, {actor}, as algo.distill.mode=exact compares "
                f"both models' logits where they are computed; set {key}.layout=null, or algo.distill.mode=topk"
            )
    if config.actor.moe.replay_routing and config.algo.distill.teacher != "hint":
        raise ConfigError(
            "actor.moe.replay_routing: got true with algo.distill.mode=exact, in which the teacher reads the same "
            "packs and would follow the policy's routes; set it to false, or algo.distill.mode=topk"
        )
    if actor.virtual_pp > 1:
        raise ConfigError(
            f"actor.layout.virtual_pp: got {actor.virtual_pp} with algo.distill.mode=exact, expected 1, as the "
            "teacher's stages run before the actor's; set it to 1, or algo.distill.mode=topk"
        )
