"""The operations that a split activation's mark follows, and the split dim of their results.

One rule: the values of a rank must not depend on the number of ranks. An operation that would mix
values along the split dim, of which this rank has a slice, is refused by name; so is every
operation that is in no table here.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchdistpackage.compat.torchshard.cuts import (
    Args,
    Cut,
    Kwargs,
    Rule,
    Touches,
    argument,
    cut_of,
    dims_of,
    first_of,
    tensors,
)


def reshaped(by_sizes: bool) -> Rule:
    """Return the rule of a view by another shape.

    The split dim must be the outermost of the dims it is joined with. by_sizes: sizes are
    arguments; -1 among them shows which one depends on the number of ranks.
    """

    def rule(args: Args, kwargs: Kwargs, out: Any) -> Cut:
        x, cut = args[0], cut_of(args[0])
        if cut is None:
            raise Touches
        num_outer = math.prod(x.shape[: cut.dim])
        shape = tuple(out.shape)
        positions = [j for j in range(len(shape)) if math.prod(shape[:j]) == num_outer]
        likely = _likely_dims(positions, x, cut, args, shape) if by_sizes else []
        for j in [*likely, *reversed(positions)]:
            below = math.prod(shape[j + 1 :])
            length, remainder = divmod(
                cut.length * math.prod(x.shape[cut.dim + 1 :]), max(below, 1)
            )
            if not remainder:
                return Cut(j, length, loose=j + 1 in positions and shape[j] == 1)
        raise Touches

    return rule


def _likely_dims(
    positions: list[int], x: Tensor, cut: Cut, args: Args, shape: tuple[int, ...]
) -> list[int]:
    """Return which of `positions` may be split, the likeliest first; all but the last are 1 long.

    That is the earlier position, then the one of -1, then the last but one: a program that writes
    (N, S, 1, 24) in numbers means one head.
    """
    sizes = args[1:]
    # sizes may be one argument, which for unflatten follows a dim
    if sizes and isinstance(sizes[-1], list | tuple):
        sizes = [*[0] * (args[1] % x.dim() if len(args) == 3 else 0), *sizes[-1]]
    likely = [j for j, size in enumerate(sizes) if type(size) is int and size == -1]
    if cut.dim in positions and shape[: cut.dim + 1] == tuple(x.shape[: cut.dim + 1]):
        likely.insert(0, cut.dim)
    if len(positions) > 1 and cut.dim:
        likely.append(positions[-2])
    return [j for j in likely if j in positions]


def moved(order: Callable[[Tensor, Args, Kwargs], Sequence[int]]) -> Rule:
    def rule(args: Args, kwargs: Kwargs, out: Any) -> Cut:
        x, cut = first_of(args, kwargs)
        new_order = [d % x.dim() for d in order(x, args, kwargs)]
        return Cut(new_order.index(cut.dim), cut.length)

    return rule


def swapped(x: Tensor, first: int, second: int) -> list[int]:
    order = list(range(x.dim()))
    order[first], order[second] = order[second], order[first]
    return order


def swapped_arguments(x: Tensor, args: Args, kwargs: Kwargs) -> list[int]:
    first = argument(args, kwargs, 1, "dim0")
    second = argument(args, kwargs, 2, "dim1")
    return swapped(x, first, second)


def permutation(x: Tensor, args: Args, kwargs: Kwargs) -> Sequence[int]:
    dims = args[1:] or (kwargs["dims"],)
    return dims[0] if isinstance(dims[0], list | tuple) else dims


def unsqueeze(args: Args, kwargs: Kwargs, out: Any) -> Cut:
    _, cut = first_of(args, kwargs)
    dim = argument(args, kwargs, 1, "dim") % out.dim()
    return Cut(cut.dim + (dim <= cut.dim), cut.length)


def squeeze(args: Args, kwargs: Kwargs, out: Any) -> Cut:
    x, cut = first_of(args, kwargs)
    dim = argument(args, kwargs, 1, "dim")
    gone = {d for d in (range(x.dim()) if dim is None else dims_of(x, dim)) if x.shape[d] == 1}
    if cut.dim in gone:
        raise Touches
    return Cut(cut.dim - sum(d < cut.dim for d in gone), cut.length)


def expand(args: Args, kwargs: Kwargs, out: Any) -> Cut:
    x, cut = args[0], cut_of(args[0])
    if cut is None or out.shape[(dim := cut.dim - x.dim())] != x.shape[dim]:
        raise Touches
    return Cut(dim + out.dim(), cut.length)


def one_less(args: Args, kwargs: Kwargs, out: Any) -> Cut:
    """Return the cut after `select` or `unbind`, which remove a dim."""
    x, cut = first_of(args, kwargs)
    (dim,) = dims_of(x, argument(args, kwargs, 1, "dim", 0))
    if dim == cut.dim:
        raise Touches
    return Cut(cut.dim - (dim < cut.dim), cut.length)


def indexed(args: Args, kwargs: Kwargs, out: Any) -> Cut:
    """Return the cut of `x[...]` by integers, slices, None and ..., or by one leading tensor."""
    cut = cut_of(args[0])
    if cut is None:
        raise Touches
    return kept_at(args[0].dim(), cut, args[1])


def kept_at(num_dims: int, cut: Cut, index: Any) -> Cut:
    """Return the cut after indexing a tensor of `num_dims`; the index must leave it alone."""
    if isinstance(index, Tensor):
        covered = index.dim() if index.dtype in (torch.bool, torch.uint8) else 1
        if cut.dim < covered or cut_of(index) is not None:
            raise Touches
        num_new = 1 if index.dtype in (torch.bool, torch.uint8) else index.dim()
        return Cut(cut.dim - covered + num_new, cut.length)
    items = list(index) if isinstance(index, tuple) else [index]
    if not all(i is None or i is Ellipsis or type(i) in (int, slice) for i in items):
        raise Touches
    used = sum(i is not None and i is not Ellipsis for i in items)
    if Ellipsis not in items:
        items.append(Ellipsis)
    at = num_new = 0
    for item in items:
        if item is None:
            num_new += 1
            continue
        for _ in range(num_dims - used if item is Ellipsis else 1):
            is_full = item is Ellipsis or item == slice(None)
            if at == cut.dim:
                if not is_full:
                    raise Touches
                return Cut(num_new, cut.length)
            num_new += is_full or isinstance(item, slice)
            at += 1
    raise Touches


def elementwise(args: Args, kwargs: Kwargs, out: Any) -> Cut | None:
    """Return the cut of an element-wise result: the same dim, counted from the end.

    An operand that is not split must have length 1 or the slice's along it. A value that meets a
    parameter of its shape is a weight, and not followed.
    """
    values = tensors([*args, *kwargs.values()])
    if any(isinstance(x, nn.Parameter) and x.shape == values[0].shape for x in values[:2]):
        return None
    cuts = [cut_of(x) for x in values]
    behind = [
        cut.behind(x) if cut and cut.loose else cut for x, cut in zip(values, cuts, strict=True)
    ]
    common = _alike(values, cuts) or _alike(values, behind)
    if common is None:
        raise Touches
    return common


def _alike(values: list[Tensor], cuts: list[Cut | None]) -> Cut | None:
    """Return the cut of an element-wise result, None if the operands do not fit together."""
    split = [(x, cut) for x, cut in zip(values, cuts, strict=True) if cut is not None]
    ends_and_lengths = {(cut.dim - x.dim(), cut.length) for x, cut in split}
    if len(ends_and_lengths) != 1:
        return None
    dim, length = ends_and_lengths.pop()
    local = {x.shape[dim] for x, _ in split}
    unsplit = {x.shape[dim] for x, c in zip(values, cuts, strict=True) if not c and x.dim() >= -dim}
    if len(local) != 1 or not unsplit <= {1, *local}:
        return None
    loose = all(cut.loose for _, cut in split)
    return Cut(dim + max(x.dim() for x in values), length, loose)


def along(at: int, default: int | None = None, name: str = "dim") -> Rule:
    """Return the rule of an operation along the dims of argument `at` that keeps all dims."""

    def rule(args: Args, kwargs: Kwargs, out: Any) -> Cut:
        x, cut = first_of(args, kwargs)
        if cut.dim in dims_of(x, argument(args, kwargs, at, name, default)):
            raise Touches
        return cut

    return rule


def reduces(at: int = 1, default: int | None = None) -> Rule:
    """Return the rule of a reduction over the dims of argument `at`, by default over all dims."""

    def rule(args: Args, kwargs: Kwargs, out: Any) -> Cut | None:
        if len(args) > 1 and isinstance(args[1], Tensor):  # max(x, y) is torch.maximum
            return elementwise(args, kwargs, out)
        x, cut = first_of(args, kwargs)
        dims = dims_of(x, argument(args, kwargs, at, "dim", default))
        if cut.dim in dims:
            raise Touches
        if tensors([out] if isinstance(out, Tensor) else out)[0].dim() == x.dim():
            return cut
        return Cut(cut.dim - sum(d < cut.dim for d in dims), cut.length)

    return rule


def cat(args: Args, kwargs: Kwargs, out: Any) -> Cut:
    values = argument(args, kwargs, 0, "tensors")
    cuts = {cut_of(x) for x in values}
    (cut,) = cuts if len(cuts) == 1 else (None,)
    if cut is None or cut.dim in dims_of(out, argument(args, kwargs, 1, "dim", 0)):
        raise Touches
    return cut


def stack(args: Args, kwargs: Kwargs, out: Any) -> Cut:
    values = argument(args, kwargs, 0, "tensors")
    cuts = {cut_of(x) for x in values}
    (cut,) = cuts if len(cuts) == 1 else (None,)
    if cut is None:
        raise Touches
    (dim,) = dims_of(out, argument(args, kwargs, 1, "dim", 0))
    return Cut(cut.dim + (dim <= cut.dim), cut.length)


def product(args: Args, kwargs: Kwargs, out: Any) -> Cut:
    """Return the cut of a matmul of operands split along the same batch dim.

    The first may instead be split by rows, or the second by columns.
    """
    a, b = tensors([*args, *kwargs.values()])[:2]
    if a.dim() < 2 or b.dim() < 2:
        raise Touches
    splits = {
        (which, cut.dim - x.dim(), cut.length)
        for which, x in (("a", a), ("b", b))
        if (cut := cut_of(x)) is not None
    }
    dims = {dim for _, dim, _ in splits}
    if len({length for *_, length in splits}) != 1 or len(dims) != 1:
        raise Touches
    (dim,) = dims
    (length,) = {length for *_, length in splits}
    if dim >= -2:
        if {which for which, *_ in splits} != {"a" if dim == -2 else "b"}:
            raise Touches
        return Cut(out.dim() + dim, length)
    sizes = [x.shape[dim] for x in (a, b) if cut_of(x) is not None]
    unsplit = [x.shape[dim] for x in (a, b) if cut_of(x) is None and x.dim() >= -dim]
    if len(set(sizes)) != 1 or not set(unsplit) <= {1, *sizes}:
        raise Touches
    return Cut(out.dim() + dim, length)


def linear(args: Args, kwargs: Kwargs, out: Any) -> Cut:
    x, cut = first_of(args, kwargs)
    if cut.dim == x.dim() - 1:
        raise Touches
    return cut


def layer_norm(args: Args, kwargs: Kwargs, out: Any) -> Cut:
    x, cut = first_of(args, kwargs)
    if cut.dim >= x.dim() - len(argument(args, kwargs, 1, "normalized_shape")):
        raise Touches
    return cut


def attention(args: Args, kwargs: Kwargs, out: Any) -> Cut:
    cuts = {cut_of(x) for x in args[:3]}
    (cut,) = cuts if len(cuts) == 1 else (None,)
    if cut is None or cut.dim >= args[0].dim() - 2:
        raise Touches
    return cut


def _named(rule: Rule, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


RULES: dict[str, Rule] = {
    **_named(
        elementwise,
        "abs add sub subtract rsub mul multiply div divide true_divide truediv floor_divide "
        "floordiv remainder mod fmod neg negative pos positive pow float_power square sqrt "
        "rsqrt reciprocal "
        "exp exp2 expm1 log log2 log10 log1p sigmoid logsigmoid tanh relu relu6 gelu silu mish elu "
        "selu celu leaky_relu prelu rrelu hardswish hardtanh hardsigmoid hardshrink softshrink "
        "tanhshrink softplus softsign threshold clamp clip clamp_min clamp_max maximum minimum "
        "where masked_fill eq ne lt le gt ge logical_and logical_or logical_not logical_xor "
        "bitwise_and bitwise_or bitwise_not bitwise_xor and or xor invert isnan isinf isfinite "
        "isclose sign sgn round floor ceil trunc frac sin cos tan asin acos atan atan2 sinh cosh "
        "erf erfc erfinv lerp addcmul addcdiv nan_to_num xlogy "
        "to type type_as float double half bfloat16 int long bool cpu cuda clone contiguous detach "
        "data zeros_like ones_like full_like empty_like fill zero copy "
        "dropout alpha_dropout feature_alpha_dropout",
    ),
    **_named(along(1), "softmax log_softmax softmin cumsum cumprod logcumsumexp"),
    **_named(along(1, 0), "index_select narrow gather"),
    **_named(along(1, name="dims"), "flip"),
    **_named(along(2, 0), "split chunk tensor_split split_with_sizes"),
    **_named(along(2, 1), "normalize"),
    **_named(along(2, -1), "topk kthvalue"),
    **_named(along(1, -1), "sort argsort"),
    **_named(reduces(), "sum mean amax amin argmax argmin max min prod all any std var logsumexp"),
    **_named(reduces(1, -1), "median mode"),
    **_named(reduces(2), "norm"),
    **_named(reshaped(by_sizes=True), "view reshape unflatten"),
    **_named(reshaped(by_sizes=False), "flatten view_as reshape_as"),
    **_named(moved(swapped_arguments), "transpose swapaxes swapdims"),
    **_named(moved(permutation), "permute"),
    **_named(moved(lambda x, *_: range(x.dim())[::-1]), "t T"),
    **_named(moved(lambda x, *_: swapped(x, -1, -2)), "mT"),
    **_named(product, "matmul rmatmul mm bmm"),
    "unsqueeze": unsqueeze,
    "squeeze": squeeze,
    "expand": expand,
    "expand_as": expand,
    "cat": cat,
    "concat": cat,
    "stack": stack,
    "select": one_less,
    "unbind": one_less,
    "linear": linear,
    "layer_norm": layer_norm,
    "rms_norm": layer_norm,
    "scaled_dot_product_attention": attention,
    "getitem": indexed,
}
"""The rule of each operation, by its name without underscores or the r of a reflected one."""

RANDOM = frozenset({"dropout", "alpha_dropout", "feature_alpha_dropout"})
"""Operations with random values: each rank draws its own."""

_FREE = (
    "size dim ndim ndimension shape dtype device layout numel nelement stride storage_offset "
    "element_size itemsize nbytes is_contiguous is_floating_point is_complex is_signed is_cuda "
    "is_cpu is_meta is_sparse is_quantized is_nested is_leaf is_pinned is_inference is_same_size "
    "is_shared is_set_to is_xla is_mps is_xpu is_mkldnn is_mtia is_vulkan is_ipu is_maia "
    "data_ptr untyped_storage storage storage_type get_device name names grad grad_fn grad_dtype "
    "output_nr requires_grad requires_grad_ retains_grad retain_grad backward register_hook "
    "register_post_accumulate_grad_hook len repr str format hash "
    "deepcopy reduce_ex setstate "
    "new_zeros new_ones new_empty new_full new_tensor _version _base _is_view "
    "result_type can_cast volatile has_names is_conj is_neg _backward_hooks"
)
FREE = frozenset(_FREE.split())
"""Operations that do not use the values, or only show them to a person."""
NUMBERS = ("__float__", "__int__", "__bool__", "__complex__", "__index__")
"""Methods that return a number, while the name without underscores returns a tensor."""


def name_of(func: Callable[..., Any]) -> str:
    """Return the name of a torch function in RULES and FREE: `__radd__` is `add`."""
    name = getattr(func, "__name__", repr(func))
    if name in ("__get__", "__set__", "__delete__"):  # of an attribute, such as `x.T`
        return getattr(getattr(func, "__self__", None), "__name__", name)
    if name in FREE:
        return name
    bare = name.strip("_")
    if name.startswith("__") and bare not in RULES and bare[1:] in RULES:
        return bare[1:]  # reflected and in place: radd, iadd
    return bare
