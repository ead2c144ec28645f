"""Ordinary numbers in many rows tell what a bug surely needs, where few numbers and other bugs tell nothing."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from kernels.contract import Capabilities
from strategies.case import Case
from strategies.features import PARTIAL, WHOLE, tiles_of, value_of, with_value
from strategies.size_rules import ABOVE, ONE_ABOVE, Rule
from tests.harness.bugs.attribution import FailingExample, explain_by_known_bugs
from tests.harness.bugs.bug import COUNTS, Bug, Condition
from tests.harness.bugs.counterfactuals import counterfactuals
from tests.harness.bugs.duplicates import met_again, why_same
from tests.harness.clock import BudgetSpent
from tests.harness.diagnosis.confirmation import confirmed, refuted
from tests.harness.report.wording import conditions_of
from tests.harness.verdict import Finding
from tests.unit.support.bugs import CASE, CAUSAL, UNEQUAL, bug

CLAIMS = Capabilities(head_dims=(16, 64))
BATCH = Condition("batch", (2,), (1,))
FEW: Mapping[str, Any] = {f"{tensor}_values": "zeros" for tensor in ("q", "k", "v", "dout")}


def found(case: Case, fails: Callable[[Case], bool], *matter: Condition) -> dict[str, Condition]:
    """Return by name what is certain of a bug, given the fields that matter in its smallest case."""
    return {need.name: need for need in confirmed(matter, case, fails, CLAIMS) if need.holds}


def test_what_cures_ordinary_numbers_is_certain() -> None:
    case = Case(batch=2, seqlen_q=1, seqlen_k=2, **FEW)
    sure = found(case, lambda x: x.batch == 2 and x.seqlen_q != x.seqlen_k, BATCH, UNEQUAL, CAUSAL)
    assert [*sure] == ["lengths", "batch"]
    assert all(need.is_certain for need in sure.values())


def test_nothing_is_certain_of_what_ordinary_numbers_do_not_show() -> None:
    assert not found(Case(batch=2, **FEW), lambda case: case.v_values == "zeros" and case.batch == 2, BATCH)


def test_what_ordinary_numbers_refute_is_an_accident() -> None:
    """Of few numbers, that of q is needed, and the batch: in the first sequence it is hidden."""
    case = Case(batch=2, seqlen_q=2, seqlen_k=2, causal=True, **FEW)
    numbers = Condition("qk_values", ("set",), ("normal",))
    needs = (BATCH, numbers, CAUSAL)

    def fails(case: Case) -> bool:
        return case.causal and (case.batch == 2 or case.seqlen_k > 32)

    def of_another(case: Case) -> bool:
        return fails(case) or case.batch == 1

    def not_needed(sure: tuple[Condition, ...], fails: Callable[[Case], bool]) -> list[Condition]:
        return list(refuted(needs, sure, case, fails, CLAIMS))

    assert not_needed((CAUSAL,), fails) == [BATCH, numbers]
    assert not_needed((), fails) == []
    assert not_needed((CAUSAL,), of_another) == [numbers]
    assert not_needed((CAUSAL,), lambda x: fails(x) and x.q_values == "zeros") == []
    # At some lengths another bug is cured by what is sure of this one.
    assert not_needed((CAUSAL,), lambda x: x.causal and (x.batch == 2 or x.seqlen_k == 66)) == [numbers]


def test_where_a_scale_makes_other_scores_one_seed_tells_nothing() -> None:
    """With a softmax of few large weights, most seeds hide a bug that does not depend on the scale."""
    case, scale = Case(seqlen_q=2, seqlen_k=2, causal=True, **FEW), Condition("sm_scale", (None,), (1.0,))

    def hidden(case: Case) -> bool:
        return case.causal and (case.sm_scale is None or case.seed % 4 == 3)

    def of_scale(case: Case) -> bool:
        return case.causal and case.sm_scale is None

    assert [*found(case, hidden, CAUSAL, scale)] == ["causal"]
    assert list(refuted((scale,), (CAUSAL,), case, hidden, CLAIMS)) == [scale]
    assert [*found(case, of_scale, CAUSAL, scale)] == ["causal", "sm_scale"]
    assert not list(refuted((scale,), (CAUSAL,), case, of_scale, CLAIMS))


@pytest.mark.parametrize(
    ("keys", "fails", "rule"),
    [
        (35, lambda keys: keys > 32, "above 32"),
        (35, lambda keys: keys > 33, "above 33"),
        (300, lambda keys: keys > 128, "above 128"),
        (300, lambda keys: keys > 256, "above 256"),
        (1100, lambda keys: keys > 1024, "above 1024"),
        (9, lambda keys: keys <= 16, "at most 16"),
        (17, lambda keys: keys % 16 > 0, "no multiple of 16"),
        (17, lambda keys: keys % 240 > 0, "no multiple of 240"),
        (81, lambda keys: keys % 16 == 1, "one above a multiple of 16"),
        (257, lambda keys: keys % 64 == 1, "one above a multiple of 64"),
        (33, lambda keys: keys > 16 and keys % 16 > 0, "above and no multiple of 16"),
        (300, lambda keys: keys > 128 and keys % 128 > 0, "above and no multiple of 128"),
        (64, lambda keys: keys % 64 == 0, "a multiple of 64"),
        (3, lambda keys: keys > 32, None),  # its smallest case is another bug's
        # Two bugs make the same tensor wrong, each at lengths of its own; the smallest case shows one of them, or both.
        (17, lambda keys: keys > 64 or keys % 16 > 0, "no multiple of 16"),
        (128, lambda keys: keys > 64 or keys % 16 > 0, "above 64"),
        (97, lambda keys: keys > 64 or keys % 16 > 0, "above 64"),
        (2, lambda keys: keys <= 32, "at most 32"),
    ],
)
def test_a_border_of_one_length(keys: int, fails: Callable[[int], bool], rule: str | None) -> None:
    case = Case(seqlen_q=40, seqlen_k=keys, **FEW)
    sure = found(case, lambda x: fails(x.seqlen_k))
    assert [str(need.rule) for need in sure.values()] == ([rule] if rule else [])


def test_a_length_that_does_not_matter_has_no_values_that_hold() -> None:
    sure = confirmed((), Case(seqlen_q=40, seqlen_k=35, **FEW), lambda _: True, CLAIMS)
    assert [(need.name, need.holds) for need in sure] == [("seqlen_q", ()), ("seqlen_k", ())]


def test_a_border_that_is_the_other_length_is_of_unequal_lengths() -> None:
    assert "seqlen_k" not in found(Case(seqlen_q=40, seqlen_k=70, **FEW), lambda x: x.seqlen_k > x.seqlen_q)


def test_borders_of_kernels_that_decode() -> None:
    """The first is wrong with one query alone, and the second, which takes no more, in its second tile of keys."""
    of_one = found(Case(seqlen_q=1, seqlen_k=5, **FEW), lambda x: x.seqlen_q == 1)
    assert conditions_of(bug(CASE, ("out",), *of_one.values())) == "only with one query"
    claims = replace(CLAIMS, max_seqlen_q=1)
    (need,) = (
        x
        for x in confirmed((), Case(seqlen_q=1, seqlen_k=130, **FEW), lambda x: x.seqlen_k > 128, claims)
        if x.holds
    )
    assert conditions_of(bug(CASE, ("out",), need)) == "only with seqlen_k above 128"


@pytest.mark.parametrize(
    ("fails", "is_needless"),
    [
        (lambda x: x.seqlen_q == 1 < x.seqlen_k, True),  # one query and one key is all that is equal
        (lambda x: x.seqlen_k > 64, True),
        (lambda x: x.seqlen_k > 64 and x.seqlen_k != x.seqlen_q, False),
    ],
)
def test_unequal_lengths_are_needless_beside_a_rule_that_equal_ones_show(
    fails: Callable[[Case], bool], is_needless: bool
) -> None:
    needs = confirmed((UNEQUAL,), Case(seqlen_q=1, seqlen_k=66, **FEW), fails, CLAIMS)
    last = {need.name: need for need in needs}
    assert (not last[UNEQUAL.name].holds) == is_needless


def test_a_length_of_sequences_is_that_of_each() -> None:
    case = Case(ragged="paged", batch=2, seqlen_q=1, seqlen_k=90, seqlens_k=(7, 90), page_size=16)
    claims = replace(CLAIMS, ragged=("paged",))
    needs = confirmed((), case, lambda x: max(x.seqlens_k or (x.seqlen_k,)) > 80, claims)
    assert [f"{need.name} {need.rule}" for need in needs if need.holds] == ["seqlen_k above 80"]


@pytest.mark.parametrize("kind", ["no multiple of", "one above a multiple of", "above", "at most"])
def test_tiles_that_depend_on_head_dim_and_dtype_have_a_rule_each(kind: str) -> None:
    """Tiles have 64 rows, 32 of head_dim 64, and in float16 128."""

    def fails(case: Case) -> bool:
        tile = 128 if case.dtype == "float16" else 32 if case.head_dim == 64 else 64
        return Rule(kind, tile).shows_at(case.seqlen_k)

    own = 193 if kind in (ABOVE, ONE_ABOVE) else 7
    need = found(Case(seqlen_q=40, seqlen_k=own, **FEW), fails)["seqlen_k"]
    told = conditions_of(bug(CASE, ("out",), need))
    assert (
        told == f"only with seqlen_k {kind} 64 ({kind} 32 with head_dim 64 and {kind} 128 with dtype float16)"
    )
    for length, head_dim in product((1, 31, 32, 33, 63, 64, 65, 96, 128, 129), (16, 64)):
        case = Case(seqlen_q=70, seqlen_k=length, head_dim=head_dim)
        assert need.is_met(case) == fails(case)
        assert head_dim == 16 or not any(map(fails, counterfactuals(need, case, CLAIMS)))
    assert Bug.from_dict(bug(CASE, ("out",), need).to_dict()).needs == (need,)


def test_what_was_asked_too_little_is_told_so() -> None:
    asked: list[Case] = []

    def fails(case: Case) -> bool:
        if len(asked) > 10:
            raise BudgetSpent
        asked.append(case)
        return case.seqlen_q > 96

    sure: list[Condition] = []
    with suppress(BudgetSpent):
        sure.extend(confirmed((), Case(seqlen_q=97, seqlen_k=40, **FEW), fails, CLAIMS))
    (need,) = sure
    assert need.is_met(Case(seqlen_q=97))
    assert "asked too little" in conditions_of(bug(Case(seqlen_q=97), ("out",), need))


@pytest.mark.parametrize(
    ("name", "own", "claims", "shows", "told"),
    [
        ("page_size", 16, {"ragged": ("paged",)}, lambda n: n == 16, "page_size 16"),
        ("page_size", 128, {"ragged": ("paged",)}, lambda n: n > 64, "page_size above 64"),
        (
            "head_dim",
            80,
            {"head_dims": tuple(range(16, 129, 16))},
            lambda n: n % 32 > 0,
            "head_dim no multiple of 32",
        ),
        ("head_dim", 128, {"head_dims": (16, 32, 64, 128)}, lambda n: n > 64, "head_dim 128"),
        ("batch", 2, {}, lambda n: n > 1, "batch above 1"),
        ("group", 5, {}, lambda n: n > 4, "group above 4"),
        ("heads_kv", 3, {}, lambda n: n % 2 > 0, "heads_kv no multiple of 2"),
    ],
)
def test_a_border_of_another_size(
    name: str, own: int, claims: Mapping[str, Any], shows: Callable[[int], bool], told: str
) -> None:
    claimed = replace(CLAIMS, **claims)
    ragged: dict[str, Any] = {"ragged": "paged", "page_size": 16} if "ragged" in claims else {}
    case = replace(Case(seqlen_q=3, seqlen_k=5, **FEW), **{**ragged, name: own})
    matter = Condition(name, (own,), (1,) if name in COUNTS else tuple(getattr(claimed, f"{name}s")[:1]))
    sure = confirmed((matter,), case, lambda x: shows(getattr(x, name)), claimed)
    needs = [need for need in sure if need.holds]
    assert conditions_of(bug(case, ("out",), *needs)) == f"only with {told}"


def test_a_bug_of_a_last_tile_with_one_key_explains_no_other_tile_that_is_not_full() -> None:
    case = Case(seqlen_q=40, seqlen_k=81, **FEW)
    known = bug(case, ("out",), *found(case, lambda x: x.seqlen_k % 16 == 1).values())
    finding = Finding(claim="so", kind="error", tensor="out", tensors=("out",))

    def left(keys: int, fails: Callable[[Case], bool]) -> bool:
        broken = FailingExample("forward", replace(case, batch=2, seqlen_k=keys), finding)
        rest = explain_by_known_bugs(
            broken, [known], lambda law, x, _: finding if fails(x) else None, CLAIMS
        ).rest
        return rest is not None

    assert not left(33, lambda x: x.seqlen_k % 16 == 1)
    assert left(33, lambda x: x.seqlen_k % 16 > 0)
    assert left(37, lambda x: x.seqlen_k % 16 > 0)


def test_lengths_that_are_alike_for_any_tiles() -> None:
    """Keys are split into parts, as many as there are tiles of 16 keys, and what remains is left out."""

    def fails(case: Case) -> bool:
        return case.seqlen_k % min(8, -(-case.seqlen_k // 16)) > 0

    (need,) = found(Case(seqlen_k=17, **FEW), fails).values()
    assert (need.name, need.fails[0], need.is_irregular) == ("seqlen_k", 17, True)
    assert {35, 37, 41} <= {*need.fails}
    assert 39 in need.holds
    by_chance = found(Case(seqlen_k=17, **FEW), lambda case: fails(case) and case.seed % 2 == 0)
    assert "seqlen_k" not in by_chance


def test_a_bug_of_lengths_of_no_rule_explains_what_the_next_length_cures() -> None:
    """The keys of two sequences are split into two parts, and those of one into three, so that a remainder differs."""
    need = Condition("seqlen_k", (37, 35, 41), (39,), is_certain=True)
    case, finding = Case(batch=2, seqlen_k=39), Finding(claim="so", kind="error", tensor="out")

    def run(law: str, case: Case, ignored: frozenset[str]) -> Finding | None:
        return finding if case.seqlen_k % (2 if case.batch > 1 else 3) else None

    assert need.is_met(case)
    known = bug(Case(seqlen_k=37), ("out",), need)
    assert explain_by_known_bugs(FailingExample("forward", case, finding), [known], run, CLAIMS).rest is None


def test_bugs_that_show_at_lengths_of_no_rule_are_one() -> None:
    at_17, at_112 = (
        bug(Case(seqlen_k=x), ("out",), Condition("seqlen_k", (x, 35, 41), (39,), is_certain=True))
        for x in (17, 112)
    )
    other = bug(Case(seqlen_k=33), ("out",), Condition("seqlen_k", (33,), (32,), is_certain=True))

    def never(*_: object) -> None:
        pytest.fail("no case is run")

    assert why_same(at_17, at_112, never, CLAIMS)
    with pytest.raises(pytest.fail.Exception):
        why_same(at_17, other, never, CLAIMS)


def test_tiles_of_both_lengths() -> None:
    """Tiles of 16 that are not full are wrong, and so is, by another bug, any case with more queries than keys."""

    def fails(case: Case) -> bool:
        return bool(case.seqlen_q % 16 or case.seqlen_k % 16 or case.seqlen_q > case.seqlen_k)

    sure = found(Case(seqlen_q=17, seqlen_k=20, **FEW), fails)
    assert [*sure] == [tiles_of(16)]
    assert sure[tiles_of(16)].is_met(Case(seqlen_q=16, seqlen_k=17))
    assert not sure[tiles_of(16)].is_met(Case(seqlen_q=48, seqlen_k=16))
    assert not found(Case(seqlen_q=17, seqlen_k=17, **FEW), lambda x: 1 in (x.seqlen_q % 16, x.seqlen_k % 16))


def test_tiles_are_not_to_blame_where_whole_ones_fail_too() -> None:
    """Any case with more queries than keys is wrong; another bug, of tiles of 16, spoils the same tensor elsewhere."""

    def fails(case: Case) -> bool:
        return bool(case.seqlen_q > case.seqlen_k or case.seqlen_k % 16)

    assert tiles_of(16) not in found(Case(seqlen_q=33, seqlen_k=20, **FEW), fails)


def test_whole_tiles_are_no_shorter() -> None:
    case = Case(seqlen_q=17, seqlen_k=32)
    whole = with_value(case, tiles_of(16), WHOLE)
    assert (whole.seqlen_q, whole.seqlen_k) == (32, 32)
    assert [value_of(x, tiles_of(16)) for x in (case, whole)] == [PARTIAL, WHOLE]


def test_a_certain_need_is_kept_whatever_is_met_again() -> None:
    case = Case(batch=2, seqlen_q=1, seqlen_k=2)
    sure = Condition(UNEQUAL.name, UNEQUAL.fails, UNEQUAL.holds, is_certain=True)
    known, again = (
        bug(case, ("out",), sure, BATCH),
        bug(Case(batch=2, seqlen_q=2, seqlen_k=2), ("out",), BATCH),
    )
    assert met_again(known, again).needs == (sure, BATCH)
    assert Bug.from_dict(known.to_dict()).needs == known.needs
