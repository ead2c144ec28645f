"""The law ``scale``: some rows stand for all, and what is wrong from a size on is found at the first size beyond it."""

from collections.abc import Callable, Iterator
from itertools import islice

import pytest
from torch import Tensor

from reference.bounds.accumulation import SAFETY
from strategies.case import Case
from strategies.cases import Space
from strategies.design import Design
from strategies.scales import scale_of
from tests.harness.law import law_named
from tests.harness.session.subject import AT_ONCE, drawn
from tests.harness.trial.judge import is_large
from tests.harness.trial.trial import LawBroken, Refused, Trial
from tests.unit.support import large

SMALL = Case(seqlen_q=33, seqlen_k=70, group=2, causal=True, seed=3)
OF_KEYS = Case(seqlen_q=8, seqlen_k=2**16 + 2, batch=2, group=2, dtype="float16", seed=0)
OF_MORE_KEYS = Case(seqlen_k=2**17 + 1, seed=1)
OF_ROWS = Case(seqlen_q=2**16 + 1, seqlen_k=5, dtype="bfloat16", seed=2)
OF_HEADS = Case(batch=2**12 + 1, heads_kv=8, group=2, seqlen_q=1, seqlen_k=3, dtype="float16", seed=4)
OF_BOTH = Case(seqlen_q=2049, seqlen_k=2113, causal=True, seed=6)
OF_MORE = Case(seqlen_q=4097, seqlen_k=4097, dtype="float16", seed=7)
OF_NONE = Case(batch=0, heads_kv=2, seqlen_q=5, seqlen_k=7, causal=True, seed=8)
CASES = (SMALL, OF_NONE, OF_KEYS, OF_MORE_KEYS, OF_ROWS, OF_HEADS, OF_BOTH, OF_MORE)
SHOWS = {
    "keys_of_16_bits": OF_KEYS,
    "keys_of_17_bits": OF_MORE_KEYS,
    "rows_of_a_grid": OF_ROWS,
    "heads_of_a_grid": OF_HEADS,
    "positions_of_float16": OF_BOTH,
    "sum_of_float16": OF_KEYS,
    "delta_of_1024_keys": OF_BOTH,
    "sums_of_4096_rows": OF_MORE,
    "largest_product": OF_NONE,
}
MOST = 60
"""Cases of a dtype within which a bug has to be found; a default run has more for a kernel of ordinary speed."""

Function = Callable[..., Tensor]


def failure(function: Function, case: Case) -> str:
    """Return the tensor that the law finds wrong; "" if it holds."""
    try:
        law_named("scale")(Trial(large.kernel(function), case, "cpu", SAFETY))
    except Refused:
        assert case.batch == 0
    except LawBroken as broken:
        return broken.finding.tensor or broken.finding.claim
    return ""


@pytest.mark.parametrize("case", CASES, ids=lambda case: scale_of(case) or "small")
@pytest.mark.parametrize("function", large.SOUND, ids=lambda function: function.__name__)
def test_a_sound_function_keeps_the_law_at_every_size(function: Function, case: Case) -> None:
    assert failure(function, case) == ""


@pytest.mark.parametrize("function", large.WRONG, ids=lambda function: function.__name__)
def test_a_size_shows_what_is_wrong_beyond_it_and_a_small_case_does_not(function: Function) -> None:
    assert failure(function, SHOWS[function.__name__])
    assert not failure(function, SMALL)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (Case(batch=2**13, heads_kv=8, seqlen_q=6, seqlen_k=2), True),  # few scores, but many columns of out
        (Case(batch=2, heads_kv=2, seqlen_k=2**16 + 33, head_dim=64), True),
        (Case(heads_kv=4, seqlen_q=513, seqlen_k=513), True),
        (Case(batch=3, heads_kv=4, group=8, seqlen_q=65, seqlen_k=129, head_dim=128), False),
    ],
)
def test_a_call_is_judged_in_part_if_its_scores_or_its_columns_are_many(case: Case, expected: bool) -> None:
    assert is_large(Trial(large.kernel(large.sound), case, "cpu", SAFETY).problem) == expected


def cases_of(seed: int) -> Iterator[Case]:
    """Yield the cases of a run, as its design steers them."""
    claims, law = large.kernel(large.sound).capabilities, law_named("scale")
    spaces = [Space(capabilities=claims, dtype=dtype, **law.draws) for dtype in claims.dtypes]
    design = Design(spaces, numbers=False, seed=seed)
    for number in range(MOST):
        chunk, place = divmod(number, AT_ONCE)
        for space in spaces:
            found = drawn(space.strategy(), f"{seed} {space.dtype} {chunk}")
            yield design.steered(number, found[place % len(found)])


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("function", large.WRONG, ids=lambda function: function.__name__)
def test_a_run_draws_a_case_that_shows_it(function: Function, seed: int) -> None:
    assert any(failure(function, case) for case in islice(cases_of(seed), MOST))
