"""Deep shrinking leaves of a case only what its failure needs."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from kernels.contract import Capabilities
from strategies.case import TENSORS, Case, Spike
from strategies.features import with_value
from strategies.tensors import tensors
from tests.harness.diagnosis.shrink import RUNS, reduced, shrunk_in_few_runs
from tests.unit.support import bugs
from tests.unit.support.bugs import CASE, all_laid_out

CLAIMS = Capabilities(
    head_dims=(16, 64, 72, 128),
    key_padding=True,
    dropout=(0.0, 0.1),
    window=(0, *range(1, 129)),
    launch={"block_m": (64, 128)},
)
LARGE = Case(
    batch=2,
    heads_kv=3,
    group=2,
    seqlen_q=70,
    seqlen_k=131,
    head_dim=72,
    dtype="float16",
    causal=True,
    sm_scale=0.3,
    key_padding="right",
    dropout_p=0.1,
    window=100,
    k_layout="gap",
    dout_values="huge",
    seed=7,
    spikes=(Spike("k", (0, 0, 0, 0), 1e4),),
    launch=(("block_m", 128),),
)


def entry(case: Case, tensor: str) -> float:
    """Return the largest entry of the tensor's last row."""
    x = getattr(tensors(case, "cpu"), tensor).tensor
    return float(x[:, :, -1].abs().max()) if x.numel() else 0.0


def long_keys(case: Case) -> bool:
    return case.seqlen_k > 64


def wide_heads(case: Case) -> bool:
    return case.head_dim > 64 and entry(case, "v") > 0


def a_product(case: Case) -> bool:
    return min(entry(case, "q"), entry(case, "k")) > 0 and case.causal


def grouped(case: Case) -> bool:
    return case.group > 1 and entry(case, "dout") > 0.5


def keys_left_of_a_window(case: Case) -> bool:
    return 0 < case.window < case.seqlen_k


@pytest.mark.parametrize(
    ("fails", "smallest", "entries"),
    [
        (long_keys, {"seqlen_k": 65}, 0),
        (wide_heads, {"head_dim": 72, "seqlen_k": 1}, 1),
        (a_product, {"causal": True, "head_dim": 16}, 2),
        (grouped, {"group": 2, "seqlen_q": 1}, 1),
        (keys_left_of_a_window, {"window": 1, "seqlen_k": 2}, 0),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_is_left_is_what_the_failure_needs(
    fails: Callable[[Case], bool], smallest: dict[str, object], entries: int
) -> None:
    case = reduced(LARGE, fails, CLAIMS)
    assert fails(case)
    assert {name: getattr(case, name) for name in smallest} == smallest
    assert [spike.value for spike in case.spikes] == [1.0] * entries
    assert {getattr(case, f"{tensor}_values") for tensor in TENSORS} == {"zeros"}
    needed = {
        name for name, value in vars(case).items() if value not in (vars(Case(dtype="float16"))[name], 0, 1)
    }
    assert needed <= {*smallest, "spikes", "launch", *(f"{tensor}_values" for tensor in TENSORS)}


def test_values_become_simple_numbers() -> None:
    def fails(case: Case) -> bool:
        return entry(case, "v") > 100

    start = Case(seqlen_k=9, head_dim=64, dtype="float16", v_values="huge")
    (spike,) = reduced(start, fails, CLAIMS).spikes
    assert spike.tensor == "v"
    assert math.log2(abs(float(spike.value))).is_integer() or float(spike.value).is_integer()


@pytest.mark.parametrize(("needed", "is_told"), [(5, True), (100, False)])
def test_a_tensor_of_which_many_entries_are_needed_is_not_written_out(needed: int, *, is_told: bool) -> None:
    def fails(case: Case) -> bool:
        return int(tensors(case, "cpu").v.tensor.count_nonzero()) >= needed

    start = Case(seqlen_k=9, head_dim=16, dtype="float16", v_values="normal")
    case = reduced(start, fails, CLAIMS)
    assert fails(case)
    assert len(case.spikes) == (needed if is_told else 0)
    assert (case.v_values == "zeros") == is_told


def test_only_what_is_claimed_is_tried_and_nothing_twice() -> None:
    claims = Capabilities(head_dims=(72,), causal=(True,), min_seqlen=3, unequal_lengths=False)
    start = Case(seqlen_q=90, seqlen_k=90, head_dim=72, causal=True, sm_scale=0.3)
    asked: list[Case] = []

    def fails(case: Case) -> bool:
        asked.append(case)
        return True

    case = reduced(start, fails, claims)
    assert (case.seqlen_q, case.seqlen_k, case.head_dim, case.causal) == (3, 3, 72, True)
    assert all(claims.admits(x) for x in asked)
    assert len(set(asked)) == len(asked)


def test_a_case_that_fails_only_as_it_is_stays_as_it_is() -> None:
    assert reduced(LARGE, lambda case: case == LARGE, CLAIMS) == LARGE


def test_the_search_ends_with_an_exception_of_the_caller() -> None:
    def fails(case: Case) -> bool:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        reduced(LARGE, fails, CLAIMS)


class TestGently:
    def reduced(self, case: Case, fails: Callable[[Case], bool]) -> tuple[Case, list[str], int]:
        runs: list[Case] = []

        def counted(case: Case) -> bool:
            runs.append(case)
            return fails(case)

        *_, (smallest, needs) = shrunk_in_few_runs(case, counted, bugs.CLAIMS)
        return smallest, [need.name for need in needs], len(runs)

    def test_one_layout_is_found_in_few_runs(self) -> None:
        case = replace(CASE, q_layout="bnhd", v_layout="gap", k_values="wide", head_dim=64)
        smallest, needs, runs = self.reduced(case, lambda c: c.v_layout == "gap")
        assert needs == ["v_layout"]
        assert smallest == replace(case, q_layout="contiguous", k_values="normal", seqlen_q=16, seqlen_k=16,
            heads_kv=1, group=1, causal=False, head_dim=16)  # fmt: skip
        assert runs <= RUNS

    def test_no_keys_and_no_queries_are_needs_and_no_unequal_lengths(self) -> None:
        for name, fails in (
            ("seqlen_k", lambda c: c.seqlen_k == 0 < c.seqlen_q),
            ("seqlen_q", lambda c: c.seqlen_q == 0 < c.seqlen_k),
        ):
            case = with_value(CASE, name, 0)
            smallest, needs, runs = self.reduced(case, fails)
            assert needs == [name]
            assert sorted((smallest.seqlen_q, smallest.seqlen_k)) == [0, 16]
            assert runs <= RUNS

    def test_of_unequal_lengths_one_may_be_0(self) -> None:
        smallest, needs, _ = self.reduced(replace(CASE, seqlen_k=0), lambda c: c.seqlen_q > c.seqlen_k)
        assert needs == ["lengths"]
        assert smallest.seqlen_k == 1

    def test_huge_strides_of_any_tensor_are_one_need(self) -> None:
        case = all_laid_out(CASE, "huge")
        assert self.reduced(case, lambda c: c.k_layout == "huge")[1] == ["huge"]

    def test_a_length_is_narrowed_down(self) -> None:
        case = replace(CASE, seqlen_k=290)
        smallest, needs, runs = self.reduced(case, lambda c: c.seqlen_k > 128)
        assert needs == ["seqlen_k"]
        assert 128 < smallest.seqlen_k < 200
        assert runs <= RUNS + 3
