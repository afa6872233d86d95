"""The embedded engine: a small continuous-batching sampler on PyTorch, inside Polar's own process.

It exists so that a first run needs no server and no GPU, and so that the reference trainer can hand its
weights to the sampler in memory. What it promises is exactness: the ids it returns are the ids it sampled,
each logprob is the model's own at sampling time, and each token says which weights it came from.
"""

from polar.engines.local.engine import LocalEngine

__all__ = ["LocalEngine"]
