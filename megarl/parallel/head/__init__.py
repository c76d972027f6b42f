"""Compute log-probs and entropies from hidden states × output weight, with the vocabulary in shards.

logprobs        the entry: which regime, which kernels
differentiable  what is kept between forward and backward: nothing, the logits, or the gradient already
statistics      three floats a row and one all-gather: the vocabulary is never gathered
gradients       the hidden gradient, reduced over ranks chunk by chunk, and the weight gradient, summed in place
rows            kept rows of a sequence-parallel pack: one uneven gather, and the reduction back to their owners
kernels         what is done with a chunk of logits, by PyTorch or by Triton
pairs           the KL between two whole distributions, where log-probs do not say enough
"""
