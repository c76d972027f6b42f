"""Drive a cluster from a user's own loop: `Session` samples, accumulates gradients and takes optimizer steps.

It calls what `Trainer` calls, under the same requests: a loop that does as `megarl train` does gets the same bits.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from megarl.algos.objectives import ALGORITHM
from megarl.cluster import offloading
from megarl.cluster.supervisor import EngineSupervisor
from megarl.config.load import load_config, with_overrides
from megarl.config.schema import Config
from megarl.data.answers import response_decoder
from megarl.errors import ConfigError, RunError
from megarl.host.activity import LiveStatus, doing
from megarl.host.streams import print_lines
from megarl.rollout.source import Group, begin, collect
from megarl.rollout.vllm_source import VllmSource
from megarl.run.session_inputs import PromptLike, open_session_inputs, require_computable, weighted_rows
from megarl.run.session_parts import open_parts
from megarl.train.export import export_adapters, export_model
from megarl.train.passes import CountedObjective, RoleUpdater
from megarl.types import PAIRS, Denominators, FloatArray, Prompt, RolloutBatch, Row, row_from_sample
from megarl.types.messages import Role, StepRequest


class Session:
    """A policy, its optimizer and its engines, which a user's own loop drives; see docs/tutorials/own-loop.md.

    config: a run file's path, or a `Config`; overrides: `key=value` each. with_engines: start engines to sample with.
    with_reference: load the frozen reference model, also where the run's algorithm does without. Everything is checked
    before anything starts. `close`, or the end of a `with` block, ends all processes; so does the next session of this
    process, as where a cell of a notebook is run again.

    **Gradients.** `accumulate` adds the gradient of Σ sums / denominators over its rows to what the next `step` takes.
    The denominators are fixed by each call, so that a call's gradient never depends on later ones, and objectives with
    different denominators can share a step. By default they are the counts over the call's own rows: several calls then
    add up means. For several calls that equal one, pass each the counts over all rows, `denominators(all_rows)`; or, if
    these are not known before the end, `{"tokens": 1.0}` and `step(scale=1 / num_tokens)`. With an auxiliary loss of
    experts, each call balances its own rows.

    **Failures.** A call that is refused before anything is sent leaves accumulated gradients as they are. If a pass
    fails on the ranks, all accumulated gradients of the role are discarded, and the weights are those of the last step:
    accumulate again. If ranks do not answer any more, the session is lost. A note on the error says which it is.
    """

    # The one that is open: Ray has one cluster in a process.
    _latest: "ClassVar[Session | None]" = None

    def __init__(
        self,
        config: Config | str | Path,
        overrides: Sequence[str] = (),
        *,
        with_engines: bool = True,
        with_reference: bool = False,
    ) -> None:
        given = with_overrides(config, overrides) if isinstance(config, Config) else None
        given = given or load_config(Path(str(config)), overrides)
        if Session._latest is not None:
            print_lines("the session that was open is closed: a process has one at a time")
            # A cell that failed or was interrupted may have left its processes in the middle of something.
            Session._latest.__exit__(RunError, RunError("another session is opened; it closes this one"), None)
        # By role, how many calls of `accumulate` have been added up since the last step.
        self.num_accumulated: dict[Role, int] = {}
        self._num_draws, self._version = 0, 0
        with contextlib.ExitStack() as stack:
            stack.enter_context(LiveStatus())
            with doing("reading the model"):
                self.inputs = open_session_inputs(given, with_engines=with_engines, with_reference=with_reference)
            self._parts = open_parts(stack, self.inputs, with_engines=with_engines)
            # The algorithm's state, such as the KL coefficient; it changes only if the loop sets it.
            self.state = self.inputs.algorithm.initial_state()
            if with_engines:
                self.snapshot()
            self._stack = stack.pop_all()
            Session._latest = self

    # --- sampling

    @property
    def config(self) -> Config:
        return self.inputs.config

    @property
    def tokenizer(self) -> Any:
        """Return the policy's tokenizer, one of transformers'."""
        return self.inputs.tokenizer

    def prompts(self, count: int | None = None) -> list[Prompt]:
        """Return the next prompts of `data.train`, in the order of `megarl train`; None: trainer.prompts_per_step."""
        if self._parts.queue is None or self.inputs.prompts is None:
            raise ConfigError(
                "data.train: is empty, so there are no prompts; set it, or give `sample` your own prompts"
            )
        count = self.config.trainer.prompts_per_step if count is None else count
        return [self.inputs.prompts[i] for i in self._parts.queue.take(count, except_for=set())]

    def sample(
        self,
        prompts: Sequence[PromptLike],
        n: int | None = None,
        *,
        max_tokens: int | None = None,
        draw: int | None = None,
        **changed: Any,
    ) -> RolloutBatch:
        """Sample `n` responses to each prompt with the weights of the last `snapshot`.

        n, max_tokens: None for rollout.num_samples and rollout.max_response_tokens. changed: other values of
        `Sampling`, such as top_p=0.9; the trainer's log-probs are those at rollout.temperature. draw: seeds the
        samples; None: counts the calls, so that the k-th samples as step k of `megarl train` does. The samples of a
        prompt follow each other, in the order of the prompts.
        """
        supervisor, inputs, canary = self._require_engines("sample"), self.inputs, self._parts.canary
        assert canary is not None, "engines have a canary"
        draw = self._num_draws + 1 if draw is None else draw
        plan = inputs.sampling_plan(n, max_tokens, draw, changed)
        groups = [Group(prompt=prompt, plan=plan) for prompt in inputs.encoded(prompts, draw=draw)]
        self._num_draws, source = draw, VllmSource(supervisor)
        self._parts.memory.enter(offloading.GENERATE)
        canary.ask(self._version - 1)
        begin(source, groups)
        total = len(groups) * plan.num_samples
        with doing(lambda: f"generating: {sum(len(group.samples) for group in groups)} of {total} samples finished"):
            try:
                batch = collect(supervisor.wait, groups, timeout_s=self.config.rollout.timeout_s)
            except KeyError as error:
                # The wait for them ended early; see `EngineSupervisor.outdate`.
                raise RunError(
                    "sample: an engine died after the policy had moved on from the last snapshot, whose weights are "
                    "gone; call snapshot, and sample again"
                ) from error
        canary.prime(self._version, batch.prompts.values())
        return batch

    def texts(self, batch: RolloutBatch) -> list[str]:
        """Return the response of each sample as the text that scorers of runs read, without special tokens."""
        decode = response_decoder(self.tokenizer, keeps_channels=False)
        return [decode(sample.response_token_ids.tolist()) for sample in batch.samples]

    def rows(self, batch: RolloutBatch, **quantities: Sequence[Any]) -> list[Row]:
        """Return a row for each sample, with quantities such as advantages=…: a number of each sample for all of its
        loss tokens, or an array for its response.
        """
        rows = [row_from_sample(sample) for sample in batch.samples]
        for name, values in quantities.items():
            rows = [
                row.with_quantities(**{name: np.where(row.loss_mask, value, 0).astype(np.float32)})
                for row, value in zip(rows, values, strict=True)
            ]
        return rows

    def snapshot(self) -> int:
        """Send the policy's weights to the engines, which sample with them until the next snapshot; return its number.

        Accumulated gradients stay.
        """
        supervisor = self._require_engines("snapshot")
        with doing("sending weights to the engines"):
            supervisor.push(self._version)
        self._version += 1
        return self._version - 1

    # --- passes and steps

    def forward(self, rows: Sequence[Row], role: str = "actor") -> dict[str, list[FloatArray]]:
        """Return all outputs of a role's model for rows, by name: `logprobs` and `entropy`, or a critic's `values`.

        Each has an array [R] for the response of each row, 0 outside the loss mask.
        """
        passes = self._parts.passes[self._parts.role(role)]
        self.inputs.check_rows(rows)
        self._parts.memory.enter(passes.phase)
        with doing(f"running a forward pass of the {role}"):
            return passes.forward(rows, step=self.num_steps + 1)

    def logprobs(self, rows: Sequence[Row], role: str = "actor") -> list[FloatArray]:
        """Return the log-probs of rows' responses by the actor or the reference, with the present weights."""
        return self.forward(rows, role)["logprobs"]

    def denominators(self, rows: Sequence[Row], objective: str | CountedObjective = ALGORITHM) -> Denominators:
        """Return an objective's counts over rows: what makes several calls of `accumulate` equal one on all rows."""
        return self.inputs.objective(objective, Role.ACTOR).denominators(rows)

    def accumulate(
        self,
        rows: Sequence[Row],
        objective: str | CountedObjective = ALGORITHM,
        *,
        denominators: Denominators | None = None,
        weights: Sequence[FloatArray] | None = None,
        role: str = "actor",
    ) -> dict[str, float]:
        """Add the gradient of an objective on rows to those that the next `step` takes; return the call's metrics.

        objective: `cross_entropy`, `importance_sampling`, a policy loss such as `ppo_clip`, also of a file in
        algo.plugins, `algorithm` for the run's own; or an object like `OwnObjective`, or of `preference_objective`, for
        which rows are all chosen ones, then all rejected ones in the same order. For a critic, its own is taken.
        denominators: see the class; None: counts over these rows. weights: a factor of each token's loss, [R] each.
        """
        chosen, updater = self.inputs.objective(objective, self._parts.role(role)), self._updater(role)
        if weights is not None:
            rows = weighted_rows(rows, weights, chosen)
        self.inputs.check_rows(rows)
        if PAIRS in (own := chosen.denominators(rows)):
            self.inputs.check_pairs(rows)
        counts = own if denominators is None else denominators
        require_computable(chosen, rows, counts, self.state, is_critic=role == Role.CRITIC)
        self._parts.memory.enter(offloading.accumulating(Role(role), updater.spec.memory))
        try:
            with doing(f"accumulating gradients of the {role}"):
                result = updater.accumulate(rows, self.state, chosen, step=self.num_steps + 1, denominators=counts)
        except BaseException as error:
            self._failed(Role(role), error, "those after the last step")
            raise
        self.num_accumulated[Role(role)] = self.num_accumulated.get(Role(role), 0) + 1
        return dict(result.metrics)

    def step(
        self,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        clip: float | None = None,
        *,
        scale: float = 1.0,
        role: str = "actor",
    ) -> dict[str, float]:
        """Take one optimizer step with the accumulated gradients; return the gradient norm before clipping, and lr.

        lr, betas, clip (maximum gradient norm): by default those of `optimizer` in the role's settings; there is no
        schedule. scale: multiplies all gradients before clipping.
        """
        updater = self._updater(role)
        optimizer = updater.spec.settings.optimizer
        if not self.num_accumulated.get(Role(role)):
            raise RunError(f"step: the {role} has no accumulated gradients; call accumulate first")
        rate = optimizer.lr if lr is None else lr
        for name, value in (
            ("lr", rate),
            ("scale", scale),
            ("clip", optimizer.clip_grad_norm if clip is None else clip),
        ):
            if not value > 0:
                raise ConfigError(f"step: got {name}={value}, expected a number > 0; correct it")
        if betas is not None and not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(f"step: got betas={betas}, expected two numbers from 0 to below 1; correct them")
        request = StepRequest(role=Role(role), step=self.num_steps + 1, lr=rate, scale=scale, betas=betas, clip=clip)
        found = self._parts.before_update(Role(role), self._version - 1, step=self.num_steps + 1)
        self._parts.memory.enter(updater.updating(self.inputs.roles))
        try:
            with doing(f"updating the {role}"):
                metrics = updater.apply(request)
        except BaseException as error:
            self._failed(Role(role), error, "unknown: load a directory that was saved")
            raise
        self.num_accumulated.pop(Role(role))
        return metrics | found

    @property
    def num_steps(self) -> int:
        """Return how many optimizer steps the actor has taken."""
        return self._updater(Role.ACTOR).num_optimizer_steps

    def discard(self) -> None:
        """Forget all accumulated gradients."""
        for role in list(self.num_accumulated):
            del self.num_accumulated[self._parts.role(role)]
            self._parts.forget(role)
        self._parts.role(Role.ACTOR)

    # --- files

    def save(self, path: str | Path) -> None:
        """Write weights, optimizers and the loop's counters to a new directory, a checkpoint of any layout.

        Accumulated gradients are not part of it: with some, it is refused.
        """
        self._parts.role(Role.ACTOR)
        if self.num_accumulated:
            raise RunError("save: accumulated gradients wait for a step, and no file keeps them; call step or discard")
        self._parts.save(Path(path), num_draws=self._num_draws, algo=self.state)

    def load(self, path: str | Path, *, weights_only: bool = False) -> None:
        """Read what `save` wrote, or the checkpoint of a run with the same models; engines need a `snapshot` after it.

        weights_only: leave optimizers and counters as they are. Accumulated gradients are discarded.
        """
        self.discard()
        state = self._parts.load(Path(path), weights_only=weights_only)
        if not weights_only:
            self._num_draws, self.state = state.step, state.algo

    def export(self, path: str | Path) -> None:
        """Write the policy as a Hugging Face model directory; with adapters, these too, as PEFT does, in `adapter`."""
        role = self._updater(Role.ACTOR).spec
        self._parts.memory.enter(offloading.exporting(Role.ACTOR, role.memory))
        with doing("exporting the model"):
            export_model(self._parts.workers, role, Path(path))
            if role.settings.lora is not None:
                export_adapters(self._parts.workers, role, Path(path) / "adapter")

    # --- states

    def _updater(self, name: str) -> RoleUpdater:
        updater = self._parts.passes[self._parts.role(name)]
        if not isinstance(updater, RoleUpdater):
            raise ConfigError(f"role: got {name!r}, which is frozen; train the actor or a critic")
        return updater

    def _require_engines(self, call: str) -> EngineSupervisor:
        self._parts.role(Role.ACTOR)
        if self._parts.supervisor is None:
            raise ConfigError(f"{call}: the session was opened with with_engines=False; open one with engines")
        return self._parts.supervisor

    def _failed(self, role: Role, error: BaseException, weights: str) -> None:
        """Discard a role's gradients after an error, and note on it what state the session is in."""
        count = self.num_accumulated.pop(role, 0)
        self._parts.forget(role)
        gone = f"the gradients of {count} earlier calls are discarded, and the weights of the {role} are {weights}"
        error.add_note(f"session: {self._parts.lost or gone}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        if Session._latest is self:
            Session._latest = None
        self._parts.lost = "the session is closed; open another one, and load the last directory that was saved"
        self._stack.__exit__(*error)

    def close(self) -> None:
        """End all processes of the session."""
        self.__exit__(None, None, None)
