"""Work of one training step, from a model's shape alone; what MFU divides by. No torch.

One rule: the backward pass is twice the forward, since each product has two gradients. Work
that recomputation repeats is not counted: it does not train.
"""

from torchdistpackage.models.gpt_layout import GPTShape, piece_costs

BACKWARD_PER_FORWARD = 2.0


def flops_per_token(shape: GPTShape) -> float:
    """Floating-point operations of forward and backward for one token of a full sequence."""
    return (1 + BACKWARD_PER_FORWARD) * sum(piece_costs(shape))
