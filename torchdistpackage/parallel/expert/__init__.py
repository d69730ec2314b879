"""Mixtures of experts over ranks, in reading order.

reference    what a layer computes, in one process, in thirty lines
shape        a layer as numbers: what fits, what is cut how; no torch
groups       who a layer talks to
router       scores, and the experts that each token goes to
balance      losses and biases that keep experts equally busy, from counts
capacity     which choices find a place where an expert has few
dispatch     tokens to the ranks of their experts and back
experts      the experts of one rank, as one grouped product for each matrix
layer        `MoELayer`, all of it
"""
