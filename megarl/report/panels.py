"""List the panels of a report: which plots it has, with their texts, and what each needs to be drawn."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from matplotlib.axes import Axes

from megarl.report.curves import (
    draw_advantage_changes,
    draw_by_layer,
    draw_failures,
    draw_good_and_bad,
    draw_idle,
    draw_lags,
    draw_learning_curves,
    draw_mismatch,
    draw_reward,
    draw_spread,
    draw_time,
    draw_validation,
    draw_with_held_out,
)
from megarl.report.learning_curve import fitted_points
from megarl.report.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A panel of the report: one plot with its texts.

    needs: a metric name or prefix without which there is nothing to draw. enough: whether a run has enough of it. draw:
    None: `needs` as a line. over: what the x axis shows.
    """

    name: str
    title: str
    unit: str
    caption: str
    needs: str
    draw: Callable[[Axes, Sequence[Run]], None] | None = None
    over: str = "step"
    enough: Callable[[Run], bool] | None = None


PANELS = (
    Panel(
        name="reward",
        title="Training reward",
        unit="mean reward",
        caption="Mean over the batch, before shaping. Here and below, faint: every step, solid: moving mean.",
        needs="critic/score/mean",
        draw=draw_reward,
    ),
    Panel(
        name="validation",
        title="Validation score",
        unit="mean score",
        caption="Held-out prompts, sampled (band: ± one standard error) and greedy (dashed).",
        needs="val/test_score",
        draw=draw_validation,
    ),
    Panel(
        name="learning_curve",
        title="Learning curve",
        unit="mean score",
        caption="Sigmoid fitted to the validations, up to twice the samples (band: 90 %); see `megarl learning-curve`.",
        needs="val/test_score",
        draw=draw_learning_curves,
        over="samples",
        enough=lambda run: fitted_points(run) is not None,
    ),
    Panel(
        name="pair_accuracy",
        title="Accuracy on pairs",
        unit="share of pairs in order",
        caption="Of the batch that a reward model trains on, and of held-out pairs (dots).",
        needs="reward_model/accuracy",
        draw=partial(draw_with_held_out, metric="reward_model/accuracy", top=1.02),
    ),
    Panel(
        name="pair_loss",
        title="Loss on pairs",
        unit="nats per pair",
        caption="− log σ of the difference of a pair's scores, less its margin.",
        needs="reward_model/loss",
        draw=partial(draw_with_held_out, metric="reward_model/loss"),
    ),
    Panel(
        name="preference_accuracy",
        title="Preferred responses",
        unit="share of pairs",
        caption="Pairs whose chosen response has the larger implicit reward: of the batch, and held out (dots).",
        needs="preference/accuracy",
        draw=partial(draw_with_held_out, metric="preference/accuracy", top=1.02),
    ),
    Panel(
        name="preference_margin",
        title="Margin of implicit rewards",
        unit="chosen less rejected",
        caption="Mean difference of the implicit rewards of a pair: of the batch, and held out (dots).",
        needs="preference/margin",
        draw=partial(draw_with_held_out, metric="preference/margin"),
    ),
    Panel(
        name="preference_loss",
        title="Loss on preferences",
        unit="mean over pairs",
        caption="Of the objective that the run trains with: of the batch, and of held-out pairs (dots).",
        needs="preference/loss",
        draw=partial(draw_with_held_out, metric="preference/loss"),
    ),
    Panel(
        name="preference_rewards",
        title="Implicit rewards",
        unit="mean over responses",
        caption="Of chosen and of rejected responses. Below 0, responses are less likely than under the reference "
        "model; rewards of ORPO, which has none, are never above 0.",
        needs="preference/reward_chosen",
        draw=partial(draw_good_and_bad, prefix="preference/reward", good="chosen", bad="rejected"),
    ),
    Panel(
        name="sft_nll",
        title="Cross-entropy",
        unit="nats per token",
        caption="Mean −log-prob of the tokens to imitate: of the batch, and of held-out rows (dots).",
        needs="sft/nll",
        draw=partial(draw_with_held_out, metric="sft/nll"),
    ),
    Panel(
        name="cpo_signal",
        title="CPO: what the hint tells",
        unit="nats per token",
        caption="Mean change of log-probs by the hint, d, over the tokens of right and of wrong responses.",
        needs="cpo/delta_mean",
        draw=partial(draw_good_and_bad, prefix="cpo/delta"),
    ),
    Panel(
        name="cpo_change",
        title="CPO: change of advantages",
        unit="mean A′ − A",
        caption="After less before shaping, over the tokens of right and of wrong responses. Methods that only move "
        "credit within a row, such as verifier_sign, keep this mean at 0.",
        needs="cpo/adv_delta_mean",
        draw=partial(draw_good_and_bad, prefix="cpo/adv_delta"),
    ),
    Panel(
        name="cpo_histogram",
        title="CPO: changes of single tokens",
        unit="density, log scale",
        caption="A′ − A of the tokens of the recorded responses, at the first and at the last recorded step.",
        needs="cpo/adv_delta_mean",
        draw=draw_advantage_changes,
        over="A′ − A",
    ),
    Panel(
        name="length",
        title="Response length",
        unit="tokens",
        caption="Mean over the batch; the band spans the shortest to the longest response.",
        needs="response_length/mean",
        draw=partial(draw_spread, prefix="response_length"),
    ),
    Panel(
        name="cut",
        title="Cut responses",
        unit="share of responses",
        caption="Cut at rollout.max_response_tokens, before their end.",
        needs="response_length/clip_ratio",
    ),
    Panel(
        name="turns",
        title="Turns of a conversation",
        unit="turns of the policy",
        caption="Mean over the sampled conversations; the band spans the shortest to the longest.",
        needs="environment/turns/mean",
        draw=partial(draw_spread, prefix="environment/turns"),
    ),
    Panel(
        name="tool_calls",
        title="Tool calls",
        unit="calls in a conversation",
        caption="Mean over the sampled conversations.",
        needs="environment/tool_calls",
    ),
    Panel(
        name="environment_time",
        title="Time of environments",
        unit="seconds in a conversation",
        caption="What environments took for all replies of a conversation, mean; engines work meanwhile.",
        needs="perf/environment_reply_s",
    ),
    Panel(
        name="environment_failures",
        title="Failed conversations",
        unit="conversations",
        caption="Environments that raised, were too late, or ended their process. Their samples do not train.",
        needs="environment/failed_frac",
        draw=draw_failures,
    ),
    Panel(
        name="mismatch",
        title="Trainer–engine mismatch",
        unit="nats per token, log scale",
        caption="Difference of the trainer's and the sampling engine's log-probabilities of the same tokens; "
        "canary: the largest of its answers after a sync.",
        needs="mismatch/abs_mean",
        draw=draw_mismatch,
    ),
    Panel(
        name="grad_norm",
        title="Gradient norm",
        unit="L2 norm before clipping",
        caption="Of the actor's gradient.",
        needs="actor/grad_norm",
    ),
    Panel(
        name="movement",
        title="How far layers move",
        unit="change / norm of weights, log scale",
        caption="Of each layer's trained weights in an optimizer step, in steps whose samples are recorded.",
        needs="actor/update_ratio/",
        draw=partial(draw_by_layer, prefix="actor/update_ratio/"),
    ),
    Panel(
        name="entropy",
        title="Policy entropy",
        unit="nats per token",
        caption="Mean over response tokens. A fall to zero means that samples stop differing.",
        needs="actor/entropy",
    ),
    Panel(
        name="time",
        title="Time per phase",
        unit="seconds per step",
        caption="Stacked; phases below 2 % of the time are summed as other.",
        needs="timing_s/",
        draw=draw_time,
    ),
    Panel(
        name="throughput",
        title="Throughput",
        unit="tokens per second",
        caption="Tokens of a step over its duration.",
        needs="perf/tokens_per_s",
    ),
    Panel(
        name="idle",
        title="Idle time",
        unit="share of a step",
        caption="Of the trainer, which waits for samples and rewards, and of engines without a request, on average.",
        needs="perf/trainer_idle_frac",
        draw=draw_idle,
    ),
    Panel(
        name="lags",
        title="Lag of tokens",
        unit="share of tokens",
        caption="Weight updates between the sampling of a token and the step that trains on it.",
        needs="staleness/frac_lag_",
        draw=draw_lags,
    ),
)
