"""Context parallelism: the ranks of a group share each sequence, and each holds a slice of it.

In reading order:

    order        which positions each rank holds: zigzag order evens out a causal mask
    visibility   which keys a query sees, and the rectangles of scores that are not empty
    kernels      torch's kernels that return the log-sum-exp, and one written by hand
    merge        merges rectangles into one softmax, and computes the gradient of each
    exchange     how a rank gets the keys and values of others: ring, all-gather, or not at all
    attention    the public function, its checks, and the exchange of heads for sequence
    sequence     splits a tensor along its sequence, and gathers it again
    choice       bytes of each exchange, and which one `auto` takes
    scan         recurrent states and inputs of convolutions that cross the ranks
    recurrent    recurrent layers of transformers over parts of a sequence

Together they compute `softmax(q k^T) v` of the full sequence exactly. A rank scores its queries
against the keys of one part at a time and merges the results by their log-sum-exp, so no rank holds
all keys or all scores at once (Liu et al., Ring Attention, arXiv:2310.01889). A picture of the hops
and a reference implementation are in docs/context_parallel.md.
"""
