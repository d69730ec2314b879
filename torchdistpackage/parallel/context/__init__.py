"""Context parallelism: the ranks of a group share one sequence, of which each holds a part.

In reading order:

    order        which positions each rank holds: even work under a causal mask by zig-zag
    visibility   which keys a query sees, and the rectangles of scores that are not empty
    kernels      torch's kernels that return the log-sum-exp, and one by hand
    merge        one rectangle after another into one softmax, and back
    exchange     how keys and values of the others come: ring, all-gather, or not at all
    attention    the public function, its checks, and the exchange of heads for sequence
    sequence     tensors into parts and back
    choice       bytes of each way, and which one `auto` takes

All of it computes `softmax(q k^T) v` of the whole sequence exactly. A rank scores its queries
against the keys of one part at a time, and merges what it gets by the log-sum-exp, so that no
rank holds all keys or scores at once (Liu et al., Ring Attention, arXiv:2310.01889).
"""
