"""Comparison of two ways to compute a step: which module is the first that differs.

record    what a step shows: outputs of modules, results, gradients, weights.
match     how far a tensor is from the whole one, element by element or as a part of it.
causes    the kinds of mistakes, each with the sentence of a report.
factor    by what factor ranks' numbers differ from the right ones.
narrow    numbers that code rounds to 16 or 8 bits.
placed    tensors whose place in the full one is known.
stopped   a run that is stopped and resumed.
compare   the first difference of records, with the usual cause.
backward  where a wrong gradient begins.

`tdp prove`, trials of a split, of stages and of a cache, and the first forward of a split module
all ask `compare.first_difference`.
"""
