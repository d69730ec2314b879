"""What the parts of a model that tensor ranks share send of one microbatch. No torch.

Each function lists the calls of one place in the modules, forward and backward, which are pairs of
autograd (comm/collectives.py): what is gathered forward is reduce-scattered backward, and so on.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torchdistpackage.predict.calls import CallCount, Microbatch


@dataclass(frozen=True, slots=True)
class CallPlace:
    """Where in a forward: calls of the forward come again with a recomputed block.

    forward: how often the forward is computed in a step, 2 of what is computed again. Of a tensor
    without gradient (`has_grad`) nothing is sent backward.
    """

    of: Microbatch
    sequence_parallel: bool
    forward: int = 1

    def column(self, width: int, dtype: str, has_grad: bool = True) -> Iterator[CallCount]:
        """Around the input, `width` wide, of a layer cut by outputs, or of several that share it.

        dtype: in which it is brought together.
        """
        backward = int(has_grad and self.of.trains)
        if self.sequence_parallel:
            yield self._gather(width, dtype, self.forward)
            yield self._scatter(width, dtype, backward)
        else:
            yield self._sum(width, dtype, backward)

    def row(
        self, width: int, dtype: str, again: bool = True, has_grad: bool = True
    ) -> Iterator[CallCount]:
        """Around the result, `width` wide, of a layer cut by inputs. again: it is needed where its
        block is computed again."""
        number = self.forward if again else 1
        if self.sequence_parallel:
            yield self._scatter(width, dtype, number)
            yield self._gather(width, dtype, int(has_grad and self.of.trains))
        else:
            yield self._sum(width, dtype, number)

    def joined(self, width: int, dtype: str) -> Iterator[CallCount]:
        """Of outputs of which this rank has `width`, and all need all."""
        yield self._call("all_gather", self.of.rows * width, dtype, "outputs", self.forward)

    def experts(
        self, width: int, top_k: int, dtypes: tuple[str, str, str], again: bool = False
    ) -> Iterator[CallCount]:
        """Of experts that tensor ranks share inside, which get all tokens of the ranks' parts of
        the sequence. dtypes: of tokens, of their results, and of the weights of a token's experts.
        """
        (tokens, results, weights), backward = dtypes, int(self.of.trains)
        if self.sequence_parallel:
            yield self._gather(width, tokens, self.forward)
            yield self._scatter(width, results, self.forward if again else 1)
            yield self._gather(width, results, backward)
        else:
            yield self._sum(width, results, self.forward if again else 1)
        yield self._sum(width, tokens, backward)
        what = "gradients of weights of experts"
        yield self._call("all_reduce", self.of.rows * top_k, weights, what, backward)

    def joined_sequence(self, width: int, dtype: str) -> CallCount:
        """Where parts of a sequence become a whole one."""
        return self._gather(width, dtype)

    def shared_sequence(self, width: int, dtype: str, has_grad: bool = True) -> CallCount:
        """Where a whole sequence becomes parts, whose gradients are joined."""
        return self._gather(width, dtype, int(has_grad and self.of.trains))

    def loss(self) -> Iterator[CallCount]:
        """Of logits cut by columns: the largest of each token, then two sums of it."""
        of, what = self.of, "of the softmax of the loss"
        tokens, number = (of.tokens, of.samples) if of.by_row else (of.rows, 1)
        yield self._call("all_reduce", tokens, of.losses, what, number)
        yield self._call("all_reduce", 2 * tokens, of.losses, what, number)

    def _sum(self, width: int, dtype: str, number: int = 1) -> CallCount:
        return self._call("all_reduce", self.of.rows * width, dtype, "activations", number)

    def _gather(self, width: int, dtype: str, number: int = 1) -> CallCount:
        part = self.of.rows * width // self.of.tensor
        return self._call("all_gather", part, dtype, "activations", number)

    def _scatter(self, width: int, dtype: str, number: int = 1) -> CallCount:
        return self._call("reduce_scatter", self.of.rows * width, dtype, "activations", number)

    def _call(self, operation: str, num: int, dtype: str, what: str, number: int = 1) -> CallCount:
        return CallCount("tensor", operation, num, dtype, what, number)


def dispatch(
    of: Microbatch, num_experts: int, top_k: int, width: int, dtypes: tuple[str, str], forward: int
) -> Iterator[CallCount]:
    """Of a block's experts that ranks share: numbers of tokens, the tokens and their results.

    Half of the rows are those that came here, which the router decides: on a mean rank as many as
    go. dtypes: of tokens and of results. forward: as of `CallPlace`.
    """
    rows, (tokens, results) = of.rows * top_k * width, dtypes
    both = forward + int(of.trains)
    for operation, num, dtype, what, number in (
        ("all_gather", num_experts + 1, "int64", "how many tokens go where", forward),
        ("all_to_all", rows, tokens, "tokens to their experts and their gradients", both),
        ("all_to_all", rows, results, "results of experts and their gradients", both),
    ):
        yield CallCount("expert", operation, num, dtype, what, number)
