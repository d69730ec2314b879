"""Collectives made of messages, for gloo.

pairwise        direct messages between all pairs of ranks
hierarchical    all-reduce over nodes, where each element crosses between nodes once
sharded_flat    in-place reduce-scatter and all-gather of one flat tensor
"""
