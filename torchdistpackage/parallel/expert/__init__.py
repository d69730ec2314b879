"""Mixtures of experts over ranks, in reading order.

reference    what a layer computes, in one process, in thirty lines
shape        a layer as numbers: what fits, what is cut how; no torch
groups       the groups that a layer talks to
router       scores, and the experts that each token goes to
balance      losses and biases that keep experts equally busy, from counts
capacity     which choices find a place where an expert has few
dispatch     tokens to the ranks of their experts and back
products     rows with the matrices of their experts: grouped products, or one expert after another
experts      the experts of one rank, and their names in a state dict
layer        `MoELayer`, all of it
"""
