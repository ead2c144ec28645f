"""Conditions that are restated as what they have in common: rows without a key, masks, slices, NaN, heads."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from strategies.case import Case, Spike
from strategies.features import (
    BLIND,
    MASKED,
    NAN,
    NO_KEYS,
    NONE,
    ONE,
    SCORES,
    SEEN,
    SEVERAL,
    SLICES,
    WORK,
    with_slices_as,
    with_value,
)
from tests.harness.bugs.bug import Condition
from tests.harness.diagnosis.generalisation import (
    generalise_to_blind_rows,
    generalise_to_heads,
    generalise_to_masks,
    generalise_to_nan,
    generalise_to_slices,
    generalise_to_work,
)
from tests.harness.report.wording import conditions_of
from tests.harness.verdict import Finding
from tests.unit.support.bugs import CASE, CAUSAL, CLAIMS, GROUP, LONG, bug, left


def without_keys(case: Case) -> bool:
    return case.seqlen_k == 0


def hidden(case: Case) -> bool:
    return case.causal and case.seqlen_q > case.seqlen_k > 0


def nothing(case: Case) -> None:
    """Find nothing in a case."""


HIDDEN_ROWS = replace(CASE, seqlen_q=90, seqlen_k=70)


NEEDS = [CAUSAL, Condition("lengths", ("more queries than keys",), ("equal",))]


@pytest.mark.parametrize(
    ("case", "shows", "holds"),
    [
        (HIDDEN_ROWS, lambda case: hidden(case) or without_keys(case), (SEEN,)),
        (replace(CASE, seqlen_k=0), lambda case: hidden(case) or without_keys(case), (SEEN,)),
        (HIDDEN_ROWS, hidden, (SEEN, NO_KEYS)),
        (
            replace(HIDDEN_ROWS, seqlen_q=2, seqlen_k=1),
            lambda case: hidden(case) and (case.seqlen_q - case.seqlen_k) % 32,
            (SEEN, NO_KEYS),
        ),
    ],
)
def test_rows_that_see_no_key_are_one_need_however_they_come_about(
    case: Case, shows: Callable[[Case], bool], holds: tuple[str, ...]
) -> None:
    needs = generalise_to_blind_rows([*NEEDS, GROUP], case, shows, nothing, CLAIMS)
    assert [(need.name, need.holds) for need in needs] == [("group", (1,)), (BLIND, holds)]
    blind = needs[-1]
    known = bug(case, ("out",), blind)
    wrong = {"out"}
    rest, blamed = left(lambda case: wrong if shows(case) else set(), replace(HIDDEN_ROWS, seed=3), known)
    assert (rest, blamed) == (None, [known])


@pytest.mark.parametrize(
    ("case", "shows"),
    [
        (HIDDEN_ROWS, lambda case: case.causal and case.seqlen_q != case.seqlen_k),
        (replace(CASE, seqlen_k=0), without_keys),
        (CASE, lambda case: case.causal),
        (replace(CASE, seqlen_q=2, seqlen_k=1), lambda case: case.causal and case.seqlen_q > 1),
        (HIDDEN_ROWS, lambda case: hidden(case) and (case.seqlen_q - case.seqlen_k) % 64 == 20),
        (replace(HIDDEN_ROWS, spikes=(Spike("k", (0, 0, 0, 0), "nan"),)), hidden),
    ],
)
def test_a_wrong_mask_or_no_keys_alone_are_told_by_their_fields(
    case: Case, shows: Callable[[Case], bool]
) -> None:
    assert generalise_to_blind_rows(NEEDS, case, shows, nothing, CLAIMS) == NEEDS


@pytest.mark.parametrize(("row", "wrong", "is_told"), [(2, 20, True), (2, 21, False), (20, 1, False)])
def test_what_other_lengths_show_tells_nothing_where_only_rows_without_a_key_are_wrong(
    row: int, wrong: int, is_told: bool
) -> None:
    def shows(case: Case) -> bool:
        return case.causal and case.seqlen_q != case.seqlen_k

    def look(case: Case) -> Finding:
        assert (case.seqlen_q, case.seqlen_k) == (98, 78)
        return Finding(claim="so", kind="error", tensor="lse", index=(0, 0, row), wrong=wrong, total=98)

    needs = generalise_to_blind_rows(NEEDS, HIDDEN_ROWS, shows, look, CLAIMS)
    assert (needs != NEEDS) == is_told


def test_one_slice_that_spoils_another_is_one_need_whether_they_are_heads_or_sequences() -> None:
    """The second slice is wrong if the first has an entry of q, as where the first decides for all of them."""

    def shows(case: Case) -> bool:
        slices = case.batch * case.heads_q
        in_first = any(x.index[0] % case.batch + x.index[1] % case.heads_q == 0 for x in case.spikes)
        return slices > 1 and in_first

    one = replace(CASE, group=1, heads_kv=1, spikes=(Spike("q", (0, 0, 1, 0), 1.0),))
    of_heads, of_batch = (Condition(name, (2,), (1,)) for name in ("heads_kv", "batch"))
    for name, need in (("heads_kv", of_heads), ("group", GROUP), ("batch", of_batch)):
        needs = generalise_to_slices([CAUSAL, need], with_value(one, name, 2), shows, CLAIMS)
        assert [(x.name, x.holds) for x in needs] == [("causal", (False,)), (SLICES, (ONE,))]
        assert conditions_of(bug(CASE, ("out",), *needs)) == f"only with causal True, {SEVERAL}"
        for met in (replace(one, batch=3), replace(one, group=2)):
            assert (
                left(lambda case: {"out"} if shows(case) else set(), met, bug(CASE, ("out",), needs[-1]))[0]
                is None
            )


QUERIES = WORK["tiles of 32 queries in all"]
FOUR_HEADS = (replace(CASE, group=4, heads_kv=1, seqlen_q=1), Condition("group", (4,), (1,)))
FOUR_TILES = (replace(CASE, group=1, heads_kv=1, seqlen_q=97), Condition("seqlen_q", (97,), (96,)))


@pytest.mark.parametrize(("case", "need"), [FOUR_HEADS, FOUR_TILES])
@pytest.mark.parametrize(
    ("decides", "words"),
    [
        (lambda tiles: tiles > 3, "more than 3 tiles of 32 queries in all"),
        (lambda tiles: tiles % 3, "4 tiles of 32 queries in all, say, not 3 or 6"),
    ],
)
def test_tiles_of_all_slices_are_one_need_whatever_makes_them_so_many(
    case: Case, need: Condition, decides: Callable[[int], bool], words: str
) -> None:
    """Programs that take several tiles in turn fail from the fourth tile on, or where these can't be shared evenly."""

    def shows(case: Case) -> bool:
        return bool(decides(QUERIES.count(case)))

    failure = bug(case, ("out",)).failure
    needs = generalise_to_work([CAUSAL, need], failure, shows, CLAIMS)
    assert conditions_of(bug(case, ("out",), *needs)) == f"only with {words}"
    for met in (replace(case, batch=2, seqlen_q=33, group=2), replace(case, seqlen_q=900)):
        rest, _ = left(lambda case: {"out"} if shows(case) else set(), met, bug(case, ("out",), *needs))
        assert (rest is None) is shows(met)


@pytest.mark.parametrize(("case", "need"), [FOUR_HEADS, FOUR_TILES])
@pytest.mark.parametrize(
    "shows",
    [
        lambda case: case.group > 3,
        lambda case: case.seqlen_q > 96,
        lambda case: case.batch * case.heads_q > 3 or case.seqlen_q > 96,
        lambda case: case.batch * case.heads_q * case.seqlen_q > 3,
        lambda case: True,
    ],
)
def test_heads_or_a_length_by_themselves_are_no_need_of_tiles(
    case: Case, need: Condition, shows: Callable[[Case], bool]
) -> None:
    assert generalise_to_work([CAUSAL, need], bug(case, ("out",)).failure, shows, CLAIMS) == [CAUSAL, need]


def test_no_endless_sequence_is_tried_in_place_of_very_many_heads() -> None:
    def shows(case: Case) -> bool:
        assert max(case.seqlen_q, case.seqlen_k) <= 2**15
        return case.heads_q > 2**16

    case, need = replace(CASE, group=1, heads_kv=2**16 + 1), Condition("heads_kv", (2**16 + 1,), (2**16,))
    assert generalise_to_work([need], bug(case, ("out",)).failure, shows, CLAIMS) == [need]


def test_what_many_tiles_need_besides_is_told() -> None:
    case, need = FOUR_TILES
    needs = generalise_to_work(
        [CAUSAL, need],
        bug(case, ("out",)).failure,
        lambda case: case.causal and QUERIES.count(case) > 3,
        CLAIMS,
    )
    assert [x.name for x in needs] == ["causal", QUERIES.name]


def test_a_need_of_sequences_alone_or_of_heads_alone_stays() -> None:
    two = replace(CASE, group=1, heads_kv=1, batch=2)
    of_batch = [CAUSAL, Condition("batch", (2,), (1,))]
    assert generalise_to_slices(of_batch, two, lambda case: case.batch > 1, CLAIMS) == of_batch
    assert generalise_to_slices(of_batch, two, lambda case: True, CLAIMS) == of_batch
    assert generalise_to_slices([CAUSAL], two, lambda case: case.batch * case.heads_q > 1, CLAIMS) == [CAUSAL]


NEGATIVE = Condition("sm_scale", (-0.3,), (None, 1.0))


@pytest.mark.parametrize(
    ("case", "of_mask"),
    [
        (replace(CASE, causal=True, seqlen_q=2, seqlen_k=2, sm_scale=-0.3), (CAUSAL,)),
        (replace(CASE, causal=False, seqlen_k=65, sm_scale=-0.3), (Condition("seqlen_k", (65,), (64, 128)),)),
    ],
)
def test_masked_scores_are_one_need_whatever_masks_them(case: Case, of_mask: tuple[Condition, ...]) -> None:
    def shows(case: Case) -> bool:
        return (case.causal or case.seqlen_k % 64 > 0) and (case.sm_scale or 1.0) < 0

    needs = generalise_to_masks([*of_mask, NEGATIVE], case, shows, CLAIMS)
    assert [need.name for need in needs] == ["sm_scale", MASKED]
    assert conditions_of(bug(case, ("out",), *needs)) == "only with negative sm_scale, masked scores"
    assert needs[1].is_met(case)
    assert not needs[1].is_met(with_value(case, MASKED, NONE))


def test_each_mask_may_have_a_bug_of_its_own() -> None:
    case = replace(CASE, causal=True, seqlen_q=2, seqlen_k=2, sm_scale=-0.3)

    def two(case: Case) -> bool:
        return (case.causal and (case.sm_scale or 1.0) < 0) or case.seqlen_k % 64 > 0

    assert generalise_to_masks([CAUSAL, NEGATIVE], case, two, CLAIMS) == [CAUSAL, NEGATIVE]
    assert generalise_to_masks([CAUSAL], case, two, CLAIMS) == [CAUSAL]


def test_numbers_may_hide_what_one_slice_does_to_another() -> None:
    one = replace(CASE, batch=1, group=1, heads_kv=1, seed=4)

    def shows(case: Case) -> bool:
        return case.batch * case.heads_q > 1 and (case.heads_kv == 2 or case.seed % 4 == 3)

    (need,) = generalise_to_slices(
        [Condition("heads_kv", (2,), (1,))], replace(one, heads_kv=2), shows, CLAIMS
    )
    assert need.name == SLICES


def test_entries_stay_in_their_slices() -> None:
    of_q, of_k, of_none = (Spike(x, (i, j, 1, 2), 1.0) for x, i, j in (("q", 1, 5), ("k", 3, 1), ("v", 0, 0)))
    case = replace(CASE, batch=2, heads_kv=2, group=2, spikes=(of_q, of_k, of_none))
    for name, at in (("batch", lambda i: (i, 0, 1, 2)), ("heads_kv", lambda i: (0, i, 1, 2))):
        changed = with_slices_as(name, case)
        assert (getattr(changed, name), changed.batch * changed.heads_q) == (8, 8)
        assert [x.index for x in changed.spikes] == [at(i) for i in (5, 6, 7, 0, 1)]


OF_Q, OF_V_TOO = (replace(CASE, spikes=(Spike(x, (0, 0, 1, 0), "nan"),)) for x in ("q", "v"))


def has_nan(case: Case) -> bool:
    return any(spike.value == "nan" for spike in case.spikes)


def test_nan_is_one_need_in_whatever_tensor_it_is() -> None:
    numbers = Condition("qk_values", ("set",), ("normal",))
    needs = generalise_to_nan([CAUSAL, numbers], OF_Q, has_nan)
    assert [(need.name, need.holds) for need in needs] == [("causal", (False,)), (NAN, (False,))]
    known = bug(OF_Q, ("out",), needs[-1])
    assert left(lambda case: {"out"} if has_nan(case) else set(), OF_V_TOO, known) == (None, [known])


def test_nan_in_one_tensor_alone_is_a_need_of_its_numbers() -> None:
    numbers = [Condition("qk_values", ("set",), ("normal",))]
    assert generalise_to_nan(numbers, OF_Q, lambda case: any(x.tensor == "q" for x in case.spikes)) == numbers
    assert generalise_to_nan(numbers, OF_Q, lambda case: True) == numbers
    assert generalise_to_nan(numbers, CASE, has_nan) == numbers


def test_large_scores_do_not_explain_what_nan_makes_wrong() -> None:
    scores = Condition(SCORES, ("other",), ("ordinary",))
    known = bug(replace(CASE, q_values="outliers"), ("out",), scores)
    rest, _ = left(lambda case: {"out"} if has_nan(case) else set(), OF_Q, known)
    assert rest is not None
    large = replace(OF_Q, q_values="outliers")
    assert left(lambda case: {"out"} if case.q_values == "outliers" else set(), large, known) == (
        None,
        [known],
    )


@pytest.mark.parametrize(("heads_kv", "group"), [(3, 1), (1, 3)])
def test_a_number_of_heads_is_one_need_grouped_or_not(heads_kv: int, group: int) -> None:
    """An odd last head is left out."""
    case = replace(CASE, heads_kv=heads_kv, group=group)
    sizes = {"heads_kv": heads_kv, "group": group}
    needs = [CAUSAL, *(Condition(name, (x,), (1 if x > 1 else 2,)) for name, x in sizes.items())]

    def is_odd(case: Case) -> bool:
        return case.heads_q > 1 and case.heads_q % 2 == 1

    causal_need, heads = generalise_to_heads(needs, case, is_odd, CLAIMS)
    assert (causal_need, heads.name, heads.fails) == (CAUSAL, "heads_q", (3,))
    assert 1 in heads.holds
    other = replace(CASE, heads_kv=group, group=heads_kv)
    known = bug(case, ("out",), heads)
    assert left(lambda case: {"out"} if is_odd(case) else set(), other, known) == (None, [known])


def test_heads_that_are_grouped_are_needs_of_their_own() -> None:
    needs = [Condition("heads_kv", (2,), (1,)), GROUP]
    assert (
        generalise_to_heads(needs, CASE, lambda case: case.heads_kv > 1 and case.group > 1, CLAIMS) == needs
    )
    assert generalise_to_heads(needs[1:], CASE, lambda case: case.group > 1, CLAIMS) == needs[1:]


def test_a_single_head_does_not_show_that_its_number_matters() -> None:
    """A path for heads that are not grouped is taken for any number of them."""
    needs = [Condition("group", (1,), (2,))]
    single = replace(CASE, heads_kv=1, group=1)
    assert generalise_to_heads(needs, single, lambda case: case.group == 1, CLAIMS) == needs


def test_ordinary_numbers_show_that_heads_are_alike_where_the_numbers_of_a_case_do_not() -> None:
    needs = [Condition("group", (2,), (1,)), LONG]
    case = replace(CASE, heads_kv=1, k_values="zeros")

    def of_query_heads(case: Case) -> bool:
        has_numbers = case.heads_kv == 1 or case.k_values == "normal"
        return case.heads_q > 1 and case.seqlen_k > 64 and has_numbers

    assert [need.name for need in generalise_to_heads(needs, case, of_query_heads, CLAIMS)] == [
        "seqlen_k",
        "heads_q",
    ]

    def with_another(case: Case) -> bool:
        return of_query_heads(case) or (case.heads_kv > 1 and case.k_values == "normal")

    assert generalise_to_heads(needs, case, with_another, CLAIMS) == needs
