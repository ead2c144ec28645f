"""The ways of calling a kernel: what users do with it beside one forward, then one backward for q, k and v.

A case names one. ``tests.harness.trial.ways`` carries it out.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kernels.contract import THROUGH_LSE, Capabilities
from strategies.case import SIMPLEST, Case, changed


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way of calling a kernel.

    Attributes:
        told: the way in words, which a report puts after "with" or "only with".
        alone: the one input that requires grad; "" if q, k and v do.
        has_gradients: whether gradients are asked for in this way.
        by_autograd: whether it means something only for a kernel whose gradients come from autograd.
        needs: the claim without which it is not asked, a field of ``Capabilities``; "" for none.
        option: the field of a case that has to say something for this way, such as ``bias``; "" for none.
        layouts: the layouts of which one has to be claimed, as tensors that autograd or PyTorch makes have it; none if
            any will do.
        scales: whether a call is made with another sm_scale too, so that any has to be claimed.
        calls_again: whether a forward or a backward of the kernel is called more than once.
        may_be_refused: whether an error is a refusal of this way. If not, it is one of a call that is claimed.
    """

    told: str
    alone: str = ""
    has_gradients: bool = True
    by_autograd: bool = True
    needs: str = ""
    option: str = ""
    layouts: tuple[str, ...] = ()
    scales: bool = False
    calls_again: bool = False
    may_be_refused: bool = True


WAYS: Mapping[str, Way] = {
    "q_alone": Way(told="q alone requiring grad", alone="q", may_be_refused=False),
    "k_alone": Way(told="k alone requiring grad", alone="k", may_be_refused=False),
    "v_alone": Way(told="v alone requiring grad", alone="v", may_be_refused=False),
    "bias_alone": Way(
        told="the bias alone requiring grad",
        alone="bias",
        needs="bias_gradient",
        option="bias",
        may_be_refused=False,
    ),
    "sinks_too": Way(
        told="sinks requiring grad", needs="sinks_gradient", option="sinks", may_be_refused=False
    ),
    "sinks_alone": Way(
        told="sinks alone requiring grad",
        alone="sinks",
        needs="sinks_gradient",
        option="sinks",
        may_be_refused=False,
    ),
    "two_forwards": Way(told="another forward before the backward", calls_again=True, may_be_refused=False),
    "other_scale": Way(
        told="a forward with another sm_scale before the backward",
        scales=True,
        calls_again=True,
        may_be_refused=False,
    ),
    "second_backward": Way(told="a second backward of one forward", calls_again=True),
    "dout_of_sum": Way(told="the dout of out.sum(), whose strides are 0"),
    "dout_transposed": Way(told="a dout that is transposed"),
    "dout_strided": Way(told="a dout whose last stride is 2"),
    "no_grad": Way(
        told="inputs that require grad under torch.no_grad", has_gradients=False, may_be_refused=False
    ),
    "inference_mode": Way(told="torch.inference_mode", has_gradients=False, by_autograd=False),
    "autocast": Way(told="torch.autocast", by_autograd=False),
    "checkpoint": Way(told="activation checkpointing", calls_again=True),
    "vmap": Way(told="torch.func.vmap", has_gradients=False, by_autograd=False, layouts=("contiguous",)),
    THROUGH_LSE: Way(told="a gradient through lse", needs="lse_gradient", may_be_refused=False),
    "out_overwritten": Way(told="out written to in place before the backward"),
    "another_thread": Way(told="a call on another thread", by_autograd=False),
}
"""Every way by its name; a case of none of them has the plain call."""


def ways_of(claims: Capabilities) -> tuple[str, ...]:
    """Return the names of the ways in which a kernel with these claims is called."""
    return tuple(name for name, way in WAYS.items() if _is_asked(way, claims))


def _is_asked(way: Way, claims: Capabilities) -> bool:
    return (
        (not way.by_autograd or (claims.by_autograd and bool(claims.backward)))
        and (not way.needs or bool(getattr(claims, way.needs)))
        and (not way.option or bool(getattr(claims, way.option)))
        and (not way.scales or claims.sm_scale in ("any", "positive"))
        and (not way.layouts or not {*way.layouts}.isdisjoint(claims.layouts))
    )


def as_its_way_has_it(claims: Capabilities, case: Case) -> Case:
    """Return a case with what its way of calling needs: a bias, sinks, or a mask without which there is no gradient.

    float32 is what autocast casts from, so that a case of this dtype has the plain call instead. A kernel folds the
    dimension of vmap into the batch, which shows in what order only if that has several elements.
    """
    if case.way == SIMPLEST["way"]:
        return case
    way = WAYS[case.way]
    if case.way == "autocast" and case.dtype == "float32":
        return changed(case, way=SIMPLEST["way"])
    if case.way == "vmap" and case.batch == 1:
        case = changed(case, batch=2)
    if way.option == "bias" and case.bias == "none":
        case = changed(case, bias=claims.bias[case.seed % len(claims.bias)])
    if way.option == "sinks":
        case = changed(case, sinks=True)
    if way.by_autograd and way.has_gradients and claims.backward == "causal":
        case = changed(case, causal=True)
    return case
