"""Wrong input to torchshard's names is refused on all ranks, with what is wrong and the numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchdistpackage.compat.torchshard as ts
from torchdistpackage.errors import DataError, LayoutError, TopologyError

X = torch.ones(4, 8)


def split_model() -> nn.Module:
    return nn.Sequential(ts.nn.ParallelLinear(4, 4, dim=1), ts.nn.ParallelLinear(4, 6, dim=0))


def lossy(target: torch.Tensor, **options: object) -> object:
    return ts.nn.ParallelCrossEntropyLoss(**options)(ts.distributed.scatter(X), target)


convert, init_ = ts.nn.ParallelLinear.convert_parallel_linear, ts.nn.init.shard_init_helper_
ranges = ts.utils.VocabUtility.vocab_range_from_global_vocab_size
CASES = [
    (
        lambda: ts.nn.ParallelLinear(8.0, -3, dim=1),
        ValueError,
        r"in_features 8\.0, out_features -3",
    ),
    (lambda: ts.nn.ParallelLinear(6, 8, dim=1)(X), LayoutError, r"\(4, 8\).* the 6 inputs"),
    (lambda: ts.nn.ParallelLinear(6, 8, dim=0)(X), LayoutError, "with 6 inputs got an input"),
    # of 7 inputs the first rank has four, as it has of 8
    (lambda: ts.nn.ParallelLinear(7, 8, dim=0)(X), LayoutError, "with 7 inputs got an input"),
    (
        lambda: ts.nn.functional.parallel_linear(X, torch.ones(2, 3), dim=0),
        LayoutError,
        r"takes 3 of them on this rank.* shared as \[4, 4\]",
    ),
    (lambda: ts.nn.ParallelEmbedding(-9, 4, dim=0), ValueError, "num_embeddings -9"),
    (lambda: ts.nn.ParallelEmbedding(9, 4, dim=0)(X), ValueError, "pass whole numbers"),
    (lambda: ts.nn.ParallelEmbedding(9, 4, dim=1)(X.long() * 9), DataError, "9, .* is 0 to 8"),
    (lambda: lossy(torch.ones(4, 8)), LayoutError, "use the numbers of classes"),
    (lambda: lossy(torch.ones(3).long()), LayoutError, r"logits must be \(3, 4\)"),
    (lambda: lossy(torch.ones(4).long() * 8), DataError, "0 to 7"),
    (lambda: lossy(torch.ones(4).long(), reduction="avg"), LayoutError, "none, mean or sum"),
    (lambda: ts.distributed.scatter([1, 2]), ValueError, "scatter takes a tensor, not list"),
    (lambda: ts.distributed.reduce(input=3), ValueError, "reduce takes a tensor, not int"),
    (lambda: ts.set_attribute(3, 1), ValueError, "parallel_dim.* takes a tensor, not int"),
    *(
        (lambda value=value: ts.set_attribute(nn.Parameter(X), value), ValueError, text)
        for value, text in ((5, "mark 5 .*-1, 0, 1"), ("1", "mark '1'"), (True, "mark True"))
    ),
    (
        lambda: ts.set_attribute(X.clone(), torch.tensor([1, 2]), 7),
        ValueError,
        r"mark tensor\(\[1, 2\]\) does not fit a tensor of shape \(4, 8\).* order_type 7",
    ),
    (lambda: init_(nn.init.ones_, nn.Linear(2, 2)), ValueError, "takes a tensor, not Linear"),
    (lambda: init_("ones", X), ValueError, "init_method is 'ones'"),
    (lambda: ts.register_ddp_parameters_to_ignore(3), ValueError, "a int is not a torch.nn.Module"),
    (lambda: ts.slice([1, 2], 2), ValueError, "slice takes a tensor, not list"),
    (lambda: ts.slice(X, 2, 2), LayoutError, "no dim 2"),
    (lambda: ts.slice(X, -2), ValueError, "slice into -2 parts"),
    (lambda: ranges(8, 5, 2), AssertionError, "rank 5 is out of range for 2"),
    (lambda: ts.nn.ParallelLinear(4, 4, dim=1.0), ValueError, r"dim is 1\.0"),
    (lambda: ts.nn.ParallelEmbedding(4, 4, 1.5, dim=0), ValueError, r"padding_idx 1\.5"),
    (
        lambda: ts.nn.functional.parallel_linear([1], 2, dim=1),
        ValueError,
        "tensor as input, not list and a tensor as weight, not int",
    ),
    (lambda: lossy([1]), ValueError, "a tensor as target, not list"),
    (
        lambda: convert(split_model(), 1),
        LayoutError,
        "no Linear is left to split along dim 1, and 1 has dim 0; a layer can be converted",
    ),
    (lambda: convert([nn.Linear(2, 2)], 1), ValueError, "a list is not a torch.nn.Module"),
    (lambda: convert(nn.Sequential(nn.LazyLinear(4)), 1), LayoutError, "0 has no shapes yet"),
    (
        lambda: ts.relocate_state_dict(m := split_model(), m.state_dict()),
        LayoutError,
        r"0\.weight is \(2, 4\), not \(4, 4\); 0\.bias is .*; 1\.weight is \(6, 2\), not \(6, 4\)",
    ),
    (
        lambda: ts.collect_state_dict(split_model(), {"module.0.weight": torch.ones(4, 4)}),
        LayoutError,
        r"module\.0\.weight is \(4, 4\), not \(2, 4\)",
    ),
    (lambda: ts.relocate_state_dict(split_model(), None), ValueError, "a state dict, not None"),
    (lambda: ts.slice(torch.ones(4), 0), AssertionError, "4 is not divisible by 0"),
]


def refuses() -> None:
    for size in ("2", 2.0, True):
        with pytest.raises(TopologyError, match="group_size is"):
            ts.distributed.init_process_group(size)
    ts.distributed.init_process_group(2)
    for call, error, text in CASES:
        with pytest.raises(error, match=text):
            call()


def test_wrong_input_is_refused(ranks):
    ranks(2).run(refuses)
