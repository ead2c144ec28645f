"""Claims that contradict each other, or that no case would meet."""

from typing import Any

from kernels.contract.names import WITH_KEY_PADDING


def check_consistent(claims: Any) -> None:
    """Raise ValueError for ``Capabilities`` that contradict each other."""
    _check_lengths(claims)
    if not claims.dense and not claims.ragged:
        raise ValueError("dense: got false beside ragged=none, expected a kind of calls in ragged")
    if not claims.dense and {*claims.layouts} <= {"expanded", "expanded_rows"}:
        raise ValueError(
            f"dense: got false beside layouts={','.join(claims.layouts)}, expected a layout that holds any numbers"
        )
    if not claims.dense:
        _check_kinds(claims)
    if claims.backward == "causal" and True not in claims.causal:
        raise ValueError("backward: got causal beside causal=false, expected causal=true or causal=both")
    if False in claims.v_in_k:
        return
    if claims.backward:
        raise ValueError("v_in_k: got always beside backward=true, expected backward=false")
    if min(claims.v_head_dim) > min(claims.head_dims):
        wide, narrow = min(claims.v_head_dim), min(claims.head_dims)
        raise ValueError(
            f"v_in_k: got always with head_dim {narrow}, expected a v_head_dim of at most that, not {wide}"
        )


def _check_kinds(claims: Any) -> None:
    """Raise ValueError for what no claimed kind of ``ragged`` has, if there are no other calls."""
    for name, none in (("bias", ()), ("dropout", (0.0,)), ("fp8_inputs", ())):
        if (value := getattr(claims, name)) != none:
            values = ",".join(map(str, value))
            raise ValueError(
                f"{name}: got {values} beside dense=false, expected none: no kind of ragged has it"
            )
    kinds = ",".join(claims.ragged)
    if claims.key_padding and not {*claims.ragged} & {*WITH_KEY_PADDING}:
        one = " or ".join(WITH_KEY_PADDING)
        raise ValueError(f"key_padding: got true beside dense=false and ragged={kinds}, expected {one}")
    if claims.rotary and "append" not in claims.ragged:
        raise ValueError(
            f"rotary: got {','.join(claims.rotary)} beside dense=false and ragged={kinds}, expected append"
        )


def _check_lengths(claims: Any) -> None:
    """Raise ValueError if no length is claimed."""
    if claims.max_seqlen_q is None:
        return
    least = {"min_seqlen": claims.min_seqlen, "seqlen_multiple": claims.seqlen_multiple}
    if not claims.unequal_lengths:
        least["min_seqlen_k"] = claims.min_seqlen_k
    for name, value in least.items():
        if value > claims.max_seqlen_q:
            raise ValueError(
                f"max_seqlen_q: got {claims.max_seqlen_q} beside {name}={value}, expected at least {value}"
            )
