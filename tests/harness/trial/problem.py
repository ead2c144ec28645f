"""The arguments of a call of a kernel, what the call returns, and both as a record of a call that was made."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kernels.contract import GRADIENTS, OUTPUTS
from reference.alternatives import Given
from reference.mask_pattern import NO_PATTERN, MaskPattern
from reference.score_rule import PLAIN, ScoreRule
from strategies.layouts import are_first_columns, bits, changed_together, span
from tests.harness.device.transfer import Copies, on_cpu


@dataclass(frozen=True)
class Problem:
    """The arguments of one kernel call, with shapes and meaning as in ``kernels.contract``; dout is like out."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    causal: bool
    sm_scale: float
    key_padding_mask: Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: int = 0
    pattern: MaskPattern = NO_PATTERN
    rule: ScoreRule = PLAIN
    first_head: int = 0
    """The number of the first head, batch * heads_q + head, if this is a piece of a larger problem."""
    units: Tensor | None = None
    """The scales of the 8-bit numbers that q and k stand for, (2, batch, heads_kv); None if they stand for none."""
    diagonals: Tensor | None = None
    """The last keys on the diagonals of its rows, (seqlen_q,), if these are some rows of a larger problem."""
    dlse: Tensor | None = None
    """The gradient of lse, float32 like lse as the kernel returns it; None in calls in which none flows through lse."""

    @property
    def options(self) -> dict[str, Any]:
        """Return the keywords of the call, without those of masks, dropout and changes of scores that are not used."""
        options: dict[str, Any] = {"causal": self.causal, "sm_scale": self.sm_scale}
        if self.key_padding_mask is not None:
            options["key_padding_mask"] = self.key_padding_mask
        if self.dropout_p:
            options |= {"dropout_p": self.dropout_p, "dropout_seed": self.dropout_seed}
        return options | self.pattern.options | self.rule.options

    def is_like(self, other: "Problem") -> bool:
        """Whether every tensor has the same strides and bits, and every option the same value."""
        mine, others = ({**vars(p), "rule": None, **p.options} for p in (self, other))
        return mine.keys() == others.keys() and all(
            is_same_argument(mine[name], others[name]) for name in mine
        )

    def copied(self, copies: Copies) -> "Problem":
        """Return the problem with copies of its tensors."""
        names = ("q", "k", "v", "dout", *(("key_padding_mask",) if self.key_padding_mask is not None else ()))
        names = (*names, *(("dlse",) if self.dlse is not None else ()))
        found: dict[str, Any] = {name: copies.of(getattr(self, name)) for name in names}
        return replace(self, **found, rule=self.rule.mapped(copies.of))

    def with_keys(self, keys: Any) -> "Problem":
        """Return the problem with only these keys of every sequence."""
        mask = self.key_padding_mask
        return replace(
            self.with_both(lambda x: x[:, :, keys]),
            key_padding_mask=None if mask is None else mask[:, keys].contiguous(),
            rule=self.rule.part(keys=keys),
        )

    def with_rows(self, rows: slice) -> "Problem":
        """Return the problem with only these queries of every sequence."""
        rule = self.rule.part(rows=rows)
        return replace(self, q=self.q[:, :, rows], dout=self.dout[:, :, rows], rule=rule)

    def at_rows(self, rows: Tensor, alignment: str) -> "Problem":
        """Return the problem of some queries alone, (rows,) int64, each of which sees what it sees among all."""
        first = self.k.shape[2] - self.q.shape[2] if alignment == "bottom_right" else 0
        some: dict[str, Any] = {name: getattr(self, name)[:, :, rows] for name in ("q", "dout")}
        return replace(self, **some, diagonals=rows + first)

    @property
    def scores(self) -> int:
        """Return the number of scores, over all heads."""
        return self.q.shape[0] * self.heads_q * self.q.shape[2] * self.k.shape[2]

    def with_batch(self, batch: slice) -> "Problem":
        """Return the problem with only these sequences of the batch."""
        mask = self.key_padding_mask
        return replace(
            self,
            **{name: getattr(self, name)[batch] for name in ("q", "k", "v", "dout")},
            key_padding_mask=None if mask is None else mask[batch],
            rule=self.rule.part(batch),
            units=None if self.units is None else self.units[:, batch],
        )

    @property
    def heads_q(self) -> int:
        """Return the number of query heads."""
        return self.q.shape[1]

    @property
    def heads_kv(self) -> int:
        """Return the number of key heads."""
        return self.k.shape[1]

    @property
    def v_in_k(self) -> bool:
        """Whether v is the first columns of k, in the same memory."""
        return are_first_columns(self.v, self.k)

    def with_both(self, change: Callable[[Tensor], Tensor]) -> "Problem":
        """Return the problem with k and v changed alike; v stays the first columns of k if it is."""
        k, v = changed_together(self.k, self.v, change, change)
        return replace(self, k=k, v=v)

    def with_values(self, v: Tensor) -> "Problem":
        """Return the problem with other values, written into a copy of k if v is the first columns of k."""
        if not self.v_in_k:
            return replace(self, v=v)
        p = self.with_both(torch.clone)
        p.v.copy_(v)
        return p


@dataclass(frozen=True)
class Outputs:
    """What one call returned; lse and the gradients are None if the kernel doesn't give them.

    lse is as the kernel returned it until its shape and dtype are checked, and then in the contract's form: float64 if
    the kernel claims base 2, else float32.
    """

    out: Tensor
    lse: Tensor | None
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dbias: Tensor | None = None
    dsinks: Tensor | None = None
    call: int = 0
    programs: int = 0
    """How many programs the largest launch of a Triton kernel had, if these may run in another order here."""

    def named(self) -> dict[str, Tensor]:
        """Return the tensors that are not None, by name."""
        pairs = {name: getattr(self, name) for name in OUTPUTS}
        return {name: tensor for name, tensor in pairs.items() if tensor is not None}

    @property
    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients that are not None, by name."""
        return {name: x for name, x in self.named().items() if name in GRADIENTS}

    def on_cpu(self) -> "Outputs":
        """Return the same outputs on the CPU."""
        found = self.named()
        moved: dict[str, Any] = dict(zip(found, on_cpu([*found.values()]), strict=True))
        return replace(self, **moved)


ARGUMENTS = (
    *("q", "k", "v", "dout", "causal", "sm_scale", "key_padding_mask"),
    *("dropout_p", "dropout_seed", "pattern", "rule", "diagonals"),
)
"""The fields of a problem that an alternative of ``reference.alternatives`` may change."""


def given_of(p: Problem, o: Outputs, alignment: str) -> Given:
    """Return the arguments of a call and what it returned, as alternatives take them."""
    arguments = {name: getattr(p, name) for name in ARGUMENTS}
    return {**arguments, "alignment": alignment, **o.named()}


def as_changed(p: Problem, o: Outputs, changed: Given) -> tuple[Problem, Outputs]:
    """Return a call and what it returned as alternatives have changed them."""
    arguments: dict[str, Any] = {name: changed[name] for name in ARGUMENTS}
    returned: dict[str, Any] = {name: changed[name] for name in o.named()}
    return replace(p, **arguments), replace(o, **returned)


@dataclass(frozen=True)
class Call:
    """A call with its arguments, the order of the programs that it launches, and the way in which it is made.

    It is kept so that it can be reproduced.
    """

    problem: Problem
    launch: Mapping[str, Any]
    backward: bool
    order: str = ""
    way: str = "none"

    def copied(self) -> "Call":
        """Return the call with copies of its tensors, which have the same strides, in memory of their own."""
        p = self.problem
        k, v = changed_together(p.k, p.v, copied, copied)
        launch = {name: copied(x) if isinstance(x, Tensor) else x for name, x in self.launch.items()}
        return replace(self, problem=replace(p, q=copied(p.q), k=k, v=v, dout=copied(p.dout)), launch=launch)

    def is_like(self, other: "Call") -> bool:
        """Whether the two calls have the same bits in all arguments, and the same order of programs."""
        same_way = (self.backward, self.order, self.way) == (other.backward, other.order, other.way)
        return (
            same_way
            and self.launch.keys() == other.launch.keys()
            and all(is_same_argument(value, other.launch[name]) for name, value in self.launch.items())
            and self.problem.is_like(other.problem)
        )


def copied(x: Tensor) -> Tensor:
    """Return a copy of a tensor with the same strides."""
    return x.as_strided((span(x),), (1,)).clone().as_strided(x.shape, x.stride(), 0)


def is_same_argument(x: Any, y: Any) -> bool:
    """Whether two arguments of a call are the same; for tensors, in shape, strides and bits."""
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        return type(x) is type(y) and x == y
    if x is y:
        return True
    alike = (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
    return alike and torch.equal(*(z if z.dtype == torch.bool else bits(z) for z in (x, y)))
