"""Divergence between the next-token distributions of a student and a teacher. Tensor ranks may
share the vocabulary.

As in the cross entropy (cross_entropy.py) each rank looks at its own columns, a few rows at a time,
and three all-reduces of a few numbers a token join what the ranks see. The gradient is made from
the logits themselves, so no further tensor of their size is kept.

With p the student's and q the teacher's softmax of logits / T, and m = (1 - b) p + b q, the
generalized Jensen-Shannon divergence of GKD (Agarwal et al., arXiv:2306.13649, eq. 1) is

    D = b sum_c q_c log(q_c / m_c) + (1 - b) sum_c p_c log(p_c / m_c)
    dD / dx_c = (1 - b) p_c (log(p_c / m_c) - sum_j p_j log(p_j / m_j)) / T

At b = 0 it is defined as the forward divergence KL(q || p), and at b = 1 as the reverse one, KL(p
|| q), to which D / b and D / (1 - b) converge there.

Of a teacher of which only the k most likely tokens are known, the forward divergence takes as q the
teacher's distribution among these k, and as p that of the student over all tokens, as axolotl's
`kd` integration does. With c over the k tokens

    D = sum_c q_c log(q_c / p_c),   dD / dx_c = (p_c - q_c) / T, where other tokens have q_c = 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchdistpackage.comm.primitives import MAX, Group, all_gather, all_reduce
from torchdistpackage.errors import LayoutError
from torchdistpackage.parallel.tensor.embedding import vocab_range
from torchdistpackage.parallel.tensor.loss_terms import rows_at_once


def vocab_parallel_divergence(
    logits: Tensor,
    teacher_logits: Tensor,
    group: Group | None,
    *,
    beta: float,
    temperature: float = 1.0,
) -> Tensor:
    """Return the divergence of each token, equal on all ranks of the group.

    logits, teacher_logits: (..., my columns of the vocabulary), of the same columns. Only `logits`
    get a gradient. Result (...); float32, or float64 for float64 logits. Half precisions are
    computed in float32. group: ranks that share the vocabulary; None: logits have all of it.
    beta: 0: KL(teacher || student); 1: KL(student || teacher); between: the generalized
    Jensen-Shannon divergence.

    Raises:
        LayoutError: shapes differ, or an option is out of its range.
    """
    if logits.shape != teacher_logits.shape:
        raise LayoutError(
            f"divergence of logits {tuple(logits.shape)} from a teacher's "
            f"{tuple(teacher_logits.shape)}; both need the same tokens and vocabulary"
        )
    if not 0 <= beta <= 1 or not temperature > 0:
        raise LayoutError(
            f"divergence with beta={beta} and temperature={temperature}; use a beta of 0 to 1 and "
            f"a temperature above 0"
        )
    terms = DivergenceTerms(group, beta, temperature)
    return _Divergence.apply(logits, teacher_logits.detach(), terms)


@dataclass(frozen=True, slots=True)
class DivergenceTerms:
    """The options of a divergence, equal for all tokens."""

    group: Group | None
    beta: float
    temperature: float

    def log_softmax(self, x: Tensor, log_sum: Tensor) -> Tensor:
        """Return log-probabilities of rows x (n, C) with log partition functions (n,)."""
        return x.to(log_sum.dtype) / self.temperature - log_sum.unsqueeze(-1)

    def log_sums(self, x: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Return the log partition functions (number of x, N) of logits x, each (N, C)."""
        highest = torch.full((len(x), len(x[0])), -torch.inf, dtype=dtype, device=x[0].device)
        sums = torch.zeros_like(highest)
        if x[0].shape[-1]:
            for side in range(len(x)):
                for at in rows_at_once(x[side]):
                    # in float32: the quotient is subtracted from logits before exp
                    highest[side, at] = x[side][at].amax(-1).to(dtype) / self.temperature
        if self.group is not None:
            all_reduce(highest, self.group, MAX)
        for side in range(len(x)):
            for at in rows_at_once(x[side]):
                sums[side, at] = self.log_softmax(x[side][at], highest[side, at]).exp_().sum(-1)
        if self.group is not None:
            all_reduce(sums, self.group)
        return highest + sums.log_()

    def ratio(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return log(p / m) of log-probabilities; of the reverse divergence log(p / q)."""
        if self.beta == 1:
            return student - teacher
        return student - self.mixture(student, teacher)

    def mixture(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return log m, which stays finite even if p or q is 0 in its precision."""
        weights = torch.log(student.new_tensor([1 - self.beta, self.beta]))
        return torch.logaddexp(student + weights[0], teacher + weights[1])

    def sums(self, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's summands (n,) of the divergence, and of sum_j p_j log(p_j / m_j)."""
        if self.beta == 0:
            forward = (teacher.exp() * (teacher - student)).sum(-1)
            return forward, torch.zeros_like(forward)
        reverse = (student.exp() * self.ratio(student, teacher)).sum(-1)
        if self.beta == 1:
            return reverse, reverse
        forward = (teacher.exp() * (teacher - self.mixture(student, teacher))).sum(-1)
        return self.beta * forward + (1 - self.beta) * reverse, reverse

    def gradient(self, student: Tensor, teacher: Tensor, reverse: Tensor) -> Tensor:
        """Return the gradient of the divergence with respect to logits, rows (n, C)."""
        if self.beta == 0:
            direction = student.exp() - teacher.exp()
        else:
            below = self.ratio(student, teacher) - reverse.unsqueeze(-1)
            direction = student.exp() * below * (1 if self.beta == 1 else 1 - self.beta)
        return direction / self.temperature


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, teacher_logits: Tensor, terms: DivergenceTerms) -> Tensor:
        # exponentials over a whole vocabulary are added, which bf16 would round
        dtype = torch.promote_types(logits.dtype, torch.float32)
        x, y = logits.flatten(0, -2), teacher_logits.flatten(0, -2)
        log_sums = terms.log_sums((x, y), dtype)
        sums = torch.zeros_like(log_sums)
        for at in rows_at_once(x):
            student = terms.log_softmax(x[at], log_sums[0, at])
            teacher = terms.log_softmax(y[at], log_sums[1, at])
            sums[0, at], sums[1, at] = terms.sums(student, teacher)
        if terms.group is not None:
            all_reduce(sums, terms.group)
        ctx.terms = terms
        ctx.save_for_backward(logits, teacher_logits, log_sums, sums[1])
        return sums[0].view(logits.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        logits, teacher_logits, log_sums, reverse = ctx.saved_tensors
        terms, scale = ctx.terms, grad.flatten().unsqueeze(-1)
        x, y = logits.flatten(0, -2), teacher_logits.flatten(0, -2)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        for at in rows_at_once(x):
            student = terms.log_softmax(x[at], log_sums[0, at])
            teacher = terms.log_softmax(y[at], log_sums[1, at])
            out[at] = terms.gradient(student, teacher, reverse[at]) * scale[at]
        return out.view(logits.shape), None, None


def vocab_parallel_top_k(
    logits: Tensor, group: Group | None, k: int, vocab: int
) -> tuple[Tensor, Tensor]:
    """Return (log-probabilities, ids) of the k most likely tokens, (..., k) each, largest first.

    They are equal on all ranks of the group and have no gradient. logits: (..., my columns of the
    vocabulary). group: as in `vocab_parallel_divergence`. vocab: number of all tokens, k or more.
    Log-probabilities are of the softmax over all tokens, in float32, or float64 for float64
    logits; ids are int64.
    """
    x = logits.detach().flatten(0, -2)
    # as in the divergence: sums over a vocabulary are not for bf16
    dtype, first = torch.promote_types(x.dtype, torch.float32), 0
    log_sums = DivergenceTerms(group, 0.0, 1.0).log_sums((x,), dtype)[0]
    values, ids = x.topk(min(k, x.shape[-1]))
    # log-probabilities are differences of near numbers, which bf16 would round away
    values = values.to(dtype)
    if group is not None and group.size() > 1:
        first, _ = vocab_range(vocab, group)
        missing = (0, k - values.shape[-1])
        values = torch.nn.functional.pad(values, missing, value=-torch.inf)
        ids = torch.nn.functional.pad(ids + first, missing)
        # gathered along dim 0: the candidates of each rank, one rank after the other
        values, ids = (
            torch.cat(all_gather(t.contiguous(), group).chunk(group.size()), -1)
            for t in (values, ids)
        )
        values, at = values.topk(k)
        ids = ids.gather(-1, at)
    shape = (*logits.shape[:-1], k)
    return (values - log_sums.unsqueeze(-1)).view(shape), ids.view(shape)


def vocab_parallel_top_k_divergence(
    logits: Tensor,
    teacher_log_probs: Tensor,
    ids: Tensor,
    group: Group | None,
    *,
    vocab: int,
    temperature: float = 1.0,
) -> Tensor:
    """Return the forward divergence of each token from a teacher's k most likely tokens.

    It is equal on all ranks of the group. logits: (..., my columns of the vocabulary), which alone
    get a gradient. teacher_log_probs, ids: (..., k), equal on all ranks; of each row different ids.
    vocab: number of all tokens. group, result: as in `vocab_parallel_divergence`, which it equals
    for k = vocab.

    Raises:
        LayoutError: the shapes do not belong to the same tokens, or the temperature is not above 0.
    """
    if logits.shape[:-1] != ids.shape[:-1] or ids.shape != teacher_log_probs.shape:
        raise LayoutError(
            f"divergence of logits {tuple(logits.shape)} from a teacher's log-probabilities "
            f"{tuple(teacher_log_probs.shape)} of tokens {tuple(ids.shape)}; all need the same rows"
        )
    if not temperature > 0:
        raise LayoutError(f"divergence with temperature={temperature}; use one above 0")
    first = 0 if group is None else vocab_range(vocab, group)[0]
    terms = DivergenceTerms(group, 0.0, temperature)
    return _TopKDivergence.apply(logits, teacher_log_probs.detach(), ids.long() - first, terms)


class _TopKDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, logits: Tensor, log_probs: Tensor, columns: Tensor, terms: DivergenceTerms
    ) -> Tensor:
        # as in the divergence over all tokens: sums over a vocabulary are not for bf16
        dtype = torch.promote_types(logits.dtype, torch.float32)
        x, columns = logits.flatten(0, -2), columns.flatten(0, -2)
        log_sums = terms.log_sums((x,), dtype)[0]
        # log-probabilities are differences of near numbers, which bf16 would round away
        scaled = log_probs.flatten(0, -2).to(dtype) / terms.temperature
        teacher = scaled.log_softmax(-1)
        width = x.shape[-1]
        is_own = (columns >= 0) & (columns < width)
        columns = torch.where(is_own, columns, 0)
        divergence = torch.zeros_like(log_sums)
        if width:
            student = terms.log_softmax(x.gather(-1, columns), log_sums)
            divergence = torch.where(is_own, teacher.exp() * (teacher - student), 0).sum(-1)
        if terms.group is not None:
            all_reduce(divergence, terms.group)
        ctx.terms = terms
        ctx.save_for_backward(logits, log_sums, teacher.exp() * is_own, columns)
        return divergence.view(logits.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        logits, log_sums, own_teacher, columns = ctx.saved_tensors
        terms, scale = ctx.terms, grad.flatten().unsqueeze(-1) / ctx.terms.temperature
        x = logits.flatten(0, -2)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        for at in rows_at_once(x) if x.shape[-1] else ():
            direction = terms.log_softmax(x[at], log_sums[at]).exp_()
            direction.scatter_add_(-1, columns[at], -own_teacher[at])
            out[at] = direction * scale[at]
        return out.view(logits.shape), None, None, None
