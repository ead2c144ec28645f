"""Each alternative is told by its words and its record, and what it computes is explained by it, not by attention."""

import itertools
import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.registry import load
from reference.alternatives import Alternative, candidates, changes_of, named
from reference.alternatives.declaration import BACKWARD, CONDITIONS, EVERY, KINDS, OUT_AND_LSE
from reference.alternatives.splits import SPLITS
from reference.alternatives.views import views
from reference.bounds.accumulation import SAFETY
from strategies.case import Case
from tests.harness.fitting.known import Known, values
from tests.harness.trial.judge import exact_of
from tests.harness.trial.problem import Outputs, as_changed, given_of
from tests.harness.trial.trial import Trial

CASES = (
    Case(batch=2, heads_kv=2, group=2, seqlen_q=45, seqlen_k=75, head_dim=32, causal=True, sm_scale=0.3),
    Case(batch=2, heads_kv=2, group=3, seqlen_q=45, seqlen_k=75, head_dim=32, sm_scale=0.3),
    Case(heads_kv=2, seqlen_q=70, seqlen_k=33, head_dim=20, causal=True, sm_scale=-0.5, q_layout="bnhd"),
    Case(heads_kv=1, seqlen_q=65, seqlen_k=129, head_dim=64, causal=True, seed=1),
    Case(seqlen_q=3, seqlen_k=128, seed=2),
)
"""Calls of which each alternative but those of ``OTHER_CALLS`` changes one at least."""

OTHER_CALLS = {
    "no_pattern": "a window",
    "pattern_off": "a window",
    "field_ignored": "a window and a prefix",
    "no_padding_mask": "a padding mask",
    "rule_ignored": "a bias or sinks",
    "rule_read": "a bias or sinks",
    "clamped": "large scores",
    "no_maximum": "large scores",
    "maximum_of_tile": "large scores",
    "maximum_of_others": "large scores",
    "maximum_of_hidden": "large scores",
    "minimum_subtracted": "large scores",
    "nan_score": "NaN in q or k",
    "nan_is_0": "NaN in an input",
    "alibi_from_row": "ALiBi slopes",
    "no_slope": "a soft-cap",
    "other_padding_mask": "a padding mask",
    "window_starts_late": "a window",
    "not_dropped": "dropout",
    "other_seed": "dropout",
    "kept_unscaled": "dropout",
    "mask_of_another": "dropout",
    "rounded_lse": "inputs of 16 bits",
    "rounded_places": "inputs in bfloat16, and more than 256 queries or keys",
    "keys_past": "more than 64 keys for each number that is tried",
}
"""Alternatives that plain calls of ordinary numbers do not show, with what shows them."""


def trial_of(case: Case) -> Trial:
    return Trial(load("tests.unit.support.toys:sound"), case, "cpu", SAFETY)


def right(trial: Trial) -> Outputs:
    """Return what attention gives, in float64, rounded to float32."""
    outputs = trial.gradients()
    given = given_of(trial.problem, outputs, trial.alignment)
    expected = values(given, exact_of(trial, trial.problem))
    return replace(outputs, **{name: x.float() for name, (x, _) in expected.items()})  # type: ignore[arg-type]


def made_by(told: Alternative, trial: Trial, outputs: Outputs) -> Outputs | None:
    """Return what a kernel gives that computes an alternative; None if it changes back what a kernel returned.

    Its gradients follow from its own out and lse.
    """
    for names in (OUT_AND_LSE, BACKWARD):
        for view in views(given_of(trial.problem, outputs, trial.alignment), (told,), names):
            if any(not torch.equal(view.changed[x], view.given[x]) for x in outputs.named()):
                return None
            changed, _ = as_changed(trial.problem, outputs, view.changed)
            e = exact_of(trial, changed, view.scores)
            of_view, moved = values(view.changed, view.rescaled(e)), view.moved(e)
            for name in view.names:
                value, _ = of_view[name]
                value = moved[name](value, torch.ones_like(value))[0] if name in moved else value
                outputs = replace(outputs, **{name: value.float()})  # type: ignore[arg-type]  # a tensor's name
    return outputs


def told_by(kind: str) -> Iterator[Alternative]:
    """Yield an alternative of a kind for each of its values, and of those that are fitted, one."""
    grid = {**KINDS[kind].grid, **({"value": (1.25,)} if KINDS[kind].fits else {})}
    for chosen in itertools.product(*grid.values()):
        yield Alternative(kind, max(KINDS[kind].scopes, key=len), tuple(zip(grid, chosen, strict=True)))


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - OTHER_CALLS.keys()))
def test_what_it_computes_is_explained_by_it_and_not_by_attention(kind: str) -> None:
    shown = tried = 0
    for case in CASES:
        trial = trial_of(case)
        outputs = right(trial)
        for told in itertools.islice(told_by(kind), 0, None, 3):
            try:
                made = made_by(told, trial, outputs)
            except LookupError:  # strides that leave the memory
                continue
            if made is None:
                pytest.skip(
                    "it changes back what a kernel returned: planted kernels show it in test_certificates.py"
                )
            tried += 1
            call = Known(trial, made, frozenset())
            if call.unexplained((), EVERY):
                shown += 1
                assert not call.unexplained((told,), EVERY), (told.words, case)
    assert shown, f"none of {tried} calls shows it"


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_words_and_records(kind: str) -> None:
    for told in told_by(kind):
        assert "{" not in told.words
        assert named(json.loads(json.dumps(told.record))).words == told.words


@pytest.mark.parametrize(
    ("record", "named_in"),
    [
        (["no_such", ["out"], {}], "'no_such', expected one of no_mask"),
        (
            ["mask_of_split", ["out"], {"tile": 32}],
            "mask_of_split: got {'tile': 32}, expected values of split",
        ),
        (["no_mask", ["out"], {"tile": 32}], "no_mask: got {'tile': 32}, expected no values"),
    ],
)
def test_a_record_of_another_version_is_refused_by_name(record: list[Any], named_in: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named_in)):
        named(record)


@pytest.mark.parametrize(
    ("split", "sizes"),
    [
        ("64 keys", (64, 64, 64)),
        ("equal numbers of keys, up to 64", (35, 60, 64)),
        ("equal numbers of keys, up to 64, in whole 16s", (48, 64, 64)),
        ("equal numbers of keys, up to 64, in no more than 8 splits", (35, 60, 88)),
    ],
)
def test_sizes_of_splits(split: str, sizes: tuple[int, ...]) -> None:
    assert tuple(SPLITS[split](count) for count in (70, 300, 704)) == sizes


def test_it_may_concern_sets_of_tensors_of_which_one_is_wrong() -> None:
    stored, masked = next(told_by("stored_by_strides_of")), next(told_by("no_mask"))
    assert stored.within(("dk", "dv"), ("dv",)) == ("dv",)
    assert masked.within(("out", "lse", "dv"), ("out",)) == OUT_AND_LSE
    assert next(told_by("one_head")).within(("out", "dv"), ("out",)) == ()


def test_one_that_is_restricted_concerns_calls_of_a_kind() -> None:
    given = [given_of(x.problem, x.gradients(), x.alignment) for x in map(trial_of, CASES[:2])]
    told = next(told_by("no_delta")).restricted("under the causal mask")
    assert told.words == "delta is left out of dq and dk, only under the causal mask"
    assert [told.concerns(g) for g in given] == [True, False]
    assert named(json.loads(json.dumps(told.record))) == told
    assert told.always == next(told_by("no_delta"))


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(ValueError, match="alternative: got 'no_such_thing', expected one of "):
        named(["no_such_thing", ["out"], {}])


def test_candidates_concern_a_wrong_tensor_and_fit_the_call() -> None:
    trial = trial_of(CASES[1])
    given = given_of(trial.problem, right(trial), trial.alignment)
    found = [*candidates(given, exact_of(trial, trial.problem), ["dq"])]
    assert all("dq" in x.tensors for x in found)
    assert not any(x.name == "no_mask" for x in found)  # the call has no causal mask
    assert any(x.name == "interleaved" for x in found)


def test_tensors_are_judged_together_if_the_same_alternatives_concern_them() -> None:
    lost, base = (
        Alternative("no_delta", ("dq", "dk")),
        Alternative("other_base", ("lse",), (("which", "in base 2"),)),
    )
    trial = trial_of(CASES[1])
    given = given_of(trial.problem, right(trial), trial.alignment)
    groups = {
        tuple(names): [x.name for x in told] for told, names in changes_of([lost, base], EVERY, given).items()
    }
    assert groups == {("out", "dv"): [], ("lse",): ["other_base"], ("dq", "dk"): ["no_delta"]}


def test_a_fitted_factor_is_that_of_the_kernel() -> None:
    trial = trial_of(CASES[1])
    outputs = right(trial)
    wrong = replace(outputs, dq=outputs.named()["dq"] * 1.125)
    given = given_of(trial.problem, wrong, trial.alignment)
    found = [x for x in candidates(given, exact_of(trial, trial.problem), ["dq"]) if x.name == "dq_times"]
    assert [math.isclose(dict(x.values)["value"], 1.125, rel_tol=1e-5) for x in found] == [True]


@pytest.mark.parametrize(
    ("name", "values_of"),
    [
        ("row_by_remainder", {"which": "row and head, is taken for its remainder by seqlen_q"}),
        ("key_within_split", {"split": "32 keys"}),
    ],
)
def test_errors_of_keys_that_an_alternative_shows_to_a_row_count(
    name: str, values_of: dict[str, str]
) -> None:
    """A product of large numbers that nearly cancel errs by much, also where the causal mask should hide it."""
    trial = trial_of(CASES[0])
    given = given_of(trial.problem, Outputs(out=trial.problem.q, lse=None), trial.alignment)
    (view,) = views(given, [named([name, ["out"], values_of])], ("out",))
    shown, hidden = (exact_of(trial, trial.problem, x) for x in (view.scores, None))
    whole = exact_of(trial, replace(trial.problem, causal=False))
    assert shown.seen is not None
    assert hidden.seen is not None
    assert bool((shown.seen & ~hidden.seen).any())
    torch.testing.assert_close(shown.score_size, whole.score_size.masked_fill(~shown.seen, 0.0))


LARGE = Case(
    heads_kv=2, seqlen_q=70, seqlen_k=40, head_dim=16, sm_scale=1.0, q_values="wide", k_values="wide"
)


@pytest.mark.parametrize(
    ("name", "values_of"),
    [
        ("no_maximum", {}),
        ("maximum_of_tile", {"rows": 64}),
        ("maximum_of_others", {"of": "heads at the same row"}),
        ("maximum_of_hidden", {}),
        ("minimum_subtracted", {}),
        ("clamped", {"limit": 50.0}),
    ],
)
def test_what_large_scores_show_is_explained(name: str, values_of: dict[str, Any]) -> None:
    """Weights in float32 overflow, or are 0 in rows far below others, as of a kernel that subtracts no maximum."""
    sm_scale = -1.0 if name == "minimum_subtracted" else 1.0
    trial = trial_of(replace(LARGE, causal=name == "maximum_of_hidden", seqlen_k=70, sm_scale=sm_scale))
    p, lse = trial.problem, right(trial).lse
    scores = (p.q.double() @ p.k.double().mT * p.sm_scale).float()
    if name == "clamped":
        scores = scores.clamp(-50.0, 50.0)
    top = {
        "no_maximum": torch.zeros(()),
        "maximum_of_others": scores.amax((1, -1), keepdim=True),
        "minimum_subtracted": scores.amin(-1, keepdim=True),
    }.get(name, scores.amax(-1, keepdim=True))
    if name == "maximum_of_tile":
        top = torch.cat([x.amax(-2, keepdim=True).expand_as(x) for x in top.split(64, -2)], -2)
    if p.causal:
        scores = scores.masked_fill(torch.ones(70, 70, dtype=torch.bool).triu(1), -math.inf)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    lse_of_it = (top + total.log())[..., 0]
    outputs = Outputs(out=weights / total @ p.v, lse=lse_of_it)
    assert lse is not None
    assert not torch.allclose(lse, lse_of_it)
    told = named([name, ["out", "lse"], values_of])
    call = Known(trial, outputs, frozenset({"out", "lse"}))
    assert not call.unexplained((told,), ("out", "lse"))
    assert not call.missed((told,), ("out", "lse"))
    assert call.unexplained((), ("out", "lse")) == {"out", "lse"}


def test_a_mask_that_is_left_out_is_no_other_one() -> None:
    trial = trial_of(replace(CASES[1], key_padding="scattered"))
    given = given_of(trial.problem, Outputs(out=trial.problem.q, lse=None), trial.alignment)
    told = [
        named([name, ["out"], values_of])
        for name, values_of in (
            ("no_padding_mask", {}),
            ("other_padding_mask", {"which": "says which keys are hidden"}),
        )
    ]
    with pytest.raises(LookupError, match="leaves the mask out"):
        list(views(given, told, ("out",)))


def test_a_restriction_holds_for_calls_of_a_kind() -> None:
    lengths = {(4, 64), (8, 64), (9, 64), (9, 5), (64, 128)}

    def met(condition: str) -> set[tuple[int, int]]:
        given = {(m, n): {"q": torch.empty(1, 1, m, 8), "k": torch.empty(1, 1, n, 8)} for m, n in lengths}
        return {x for x, g in given.items() if CONDITIONS[condition](g)}

    assert met("for up to 8 queries") == {(4, 64), (8, 64)} == lengths - met("for more than 8 queries")
    assert (
        met("for up to 16 queries and keys") == {(9, 5)} == lengths - met("for more than 16 queries or keys")
    )
    assert met("if seqlen_q and seqlen_k are multiples of 64") == {(64, 128)}
    assert met("if seqlen_k is no multiple of 16") == {(9, 5)}


def test_nan_is_no_error_in_a_row_of_which_an_alternative_hides_all_keys() -> None:
    """A kernel that reads no key for a row divides 0 by 0; a row that sees no key by right is judged as always."""
    trial = trial_of(Case(seqlen_q=45, seqlen_k=33, causal=True))
    which = "its first row does not see to the end"
    told = named(["tiles_on_diagonal_lost", ["out", "lse"], {"tile": 16, "rows": 16, "which": which}])
    made = made_by(told, trial, right(trial))
    assert made is not None
    lost = (made.out == 0).all(-1)
    lost[:, :, :12] = False
    assert lost.any(), "some rows that see a key lose all"
    nan = replace(made, out=made.out.masked_fill(lost[..., None], math.nan))
    assert not Known(trial, nan, frozenset()).unexplained((told,), ("out",))
    nan.out[:, :, 0] = math.nan
    assert Known(trial, nan, frozenset()).unexplained((told,), ("out",)) == {"out"}


def test_a_kernel_without_lse_is_told_of_rows_that_lose_all_keys() -> None:
    trial = trial_of(Case(seqlen_q=45, seqlen_k=33, causal=True))
    which = "its first row does not see to the end"
    told = named(["tiles_on_diagonal_lost", ["out"], {"tile": 16, "rows": 16, "which": which}])
    made = made_by(told, trial, right(trial))
    assert made is not None
    alone = Outputs(out=made.out, lse=None)
    assert not Known(trial, alone, frozenset()).unexplained((told,), ("out",))
