"""Compute the log-probs that CPO compares, with and without hints, by a Hugging Face model instead of a cluster."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megarl.algos.cpo import CpoInputs
from megarl.algos.cpo.formulas import make_terms
from megarl.config.algo import CpoConfig
from megarl.data.hints import HintedRows
from megarl.types import Row, pad_rows


def hint_inputs(
    model: Any,
    rows: Sequence[Row],
    hinted: HintedRows,
    shuffled: HintedRows | None = None,
    *,
    correct: Sequence[bool],
    temperature: float = 1.0,
    micro_batch_tokens: int = 4096,
) -> CpoInputs:
    """Compute log-probs of responses without a hint, with their own and with another prompt's hint, as CPO's inputs.

    Advantages and difficulty are 0. As in training, a row without a hint repeats the plain log-probs, with KL 0.

    Args:
        model: a causal language model of transformers, on any device.
        hinted: the rows with the hints of their prompts, in the same order.
        shuffled: the rows with the hints of other prompts, or None.
        correct: the verifier's verdict on each row.
        micro_batch_tokens: tokens of one forward pass, padding included; a longer row is a pass of its own.
    """
    variants = [(rows, None), (hinted.rows, hinted.has_hint)]
    if shuffled is not None:
        variants.append((shuffled.rows, shuffled.has_hint))
    names = ("old_logprobs", "hint_logprobs", "shuffled_hint_logprobs")[: len(variants)]
    loss_mask = pad_rows([row.loss_mask for row in rows], dtype=torch.bool)
    quantities = {name: torch.zeros(loss_mask.shape) for name in (*names, "entropy", "hint_kl")}
    # Rows of similar length share a pass.
    order = sorted(range(len(rows)), key=lambda i: max(variant[i].num_tokens for variant, _ in variants))
    while order:
        width = max(variant[order[-1]].num_tokens for variant, _ in variants)
        chosen = [order.pop() for _ in range(min(len(order), max(1, micro_batch_tokens // width)))]
        plain: list[Tensor] = []
        for name, (variant, has_hint) in zip(names, variants, strict=True):
            found = _distributions(model, [variant[i] for i in chosen], temperature)
            for place, (i, logprobs) in enumerate(zip(chosen, found, strict=True)):
                row, n = rows[i], rows[i].num_response_tokens
                labels = torch.from_numpy(row.token_ids[row.num_prompt_tokens :]).to(logprobs.device)
                if has_hint is None:
                    plain.append(logprobs)
                    quantities["entropy"][i, :n] = -(logprobs.exp() * logprobs).sum(dim=-1).cpu()
                elif not has_hint[i]:
                    quantities[name][i] = quantities["old_logprobs"][i]
                    continue
                elif name == "hint_logprobs":
                    quantities["hint_kl"][i, :n] = (logprobs.exp() * (logprobs - plain[place])).sum(dim=-1).cpu()
                quantities[name][i, :n] = logprobs.gather(-1, labels[:, None]).squeeze(-1).cpu()
    return CpoInputs(
        advantages=torch.zeros(loss_mask.shape),
        loss_mask=loss_mask,
        correct=torch.tensor(list(correct), dtype=torch.bool),
        difficulty=torch.zeros(len(rows), dtype=torch.long),
        vocab_size=model.config.get_text_config().vocab_size,
        old_logprobs=quantities["old_logprobs"],
        hint_logprobs=quantities["hint_logprobs"],
        shuffled_hint_logprobs=quantities.get("shuffled_hint_logprobs"),
        hint_kl=quantities["hint_kl"],
        entropy=quantities["entropy"],
    )


def mutual_information(x: CpoInputs, estimator: str, *, shuffled_baseline: bool = False) -> Tensor:
    """Estimate the mutual information of token and hint [B, T] in nats, 0 outside the loss mask."""
    cfg = CpoConfig(mi_estimator=estimator, shuffled_baseline=shuffled_baseline)  # type: ignore[arg-type]
    return make_terms(x, cfg, neg_scope="negative_sample", uses_hint=True, uses_entropy=False).mi


@torch.inference_mode()
def _distributions(model: Any, rows: Sequence[Row], temperature: float) -> list[Tensor]:
    """Return, per row, the log-probs [R, vocabulary] of all possible tokens at its R response positions, in float32."""
    ids = pad_rows([row.token_ids for row in rows], dtype=torch.long).to(model.device)
    mask = pad_rows([row.token_ids >= 0 for row in rows], dtype=torch.long).to(model.device)
    logits = model(input_ids=ids, attention_mask=mask).logits
    # The logits before a token predict it.
    places = [slice(row.num_prompt_tokens - 1, row.num_tokens - 1) for row in rows]
    return [(logits[i, place].float() / temperature).log_softmax(dim=-1) for i, place in enumerate(places)]
