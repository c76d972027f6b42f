"""Compute log-probs and entropies from hidden states and an output weight whose vocabulary is sharded over ranks.

logprobs        the entry point; it applies a memory mode (recompute, keep, in_chunk) and kernels
differentiable  the autograd functions of the three memory modes, which differ in what they keep for backward
statistics      three floats per token and one all-gather, so that the vocabulary is never gathered
gradients       the gradient of hidden states, reduced chunk by chunk, and of the weight, summed in place
rows            gathers hidden states that ranks hold in uneven parts, and reduces their gradients back
kernels         the computations on a chunk of logits, in PyTorch or Triton
distill         log-probs, entropies and the divergence from a teacher in the same pass
teachers        what a teacher's logits, or its likeliest tokens (top_teacher), add to statistics and gradients
pairs           the KL divergence between two full distributions over the vocabulary
"""
