"""Known failures name laws and fields that exist, and their cases can be read."""

import json
from dataclasses import asdict, replace

import pytest

from kernels.adapters import known_failures as public
from kernels.contract import ANY_LAW, KnownFailure
from kernels.registry import REGISTERED, load
from strategies.case import Case, from_json, to_json
from tests.harness.kernel_record import known_failure, meets, stored_case
from tests.harness.law import LAWS, law_named

KNOWN = [
    pytest.param(known, id=f"{name}-{number}")
    for name, failures in (
        *((name, load(name).known_failures) for name in REGISTERED),
        *((name, value) for name, value in vars(public).items() if isinstance(value, tuple)),
    )
    for number, known in enumerate(failures)
]


@pytest.mark.parametrize("known", KNOWN)
def test_laws_are_those_that_there_are(known: KnownFailure) -> None:
    assert known.laws[0] in LAWS
    assert {*known.laws, *known.kept} <= {*LAWS, ANY_LAW}
    assert not known.kept or ANY_LAW in known.laws


@pytest.mark.parametrize("known", KNOWN)
def test_values_of_fields_are_such_as_a_case_has(known: KnownFailure) -> None:
    for name, values in known.where.items():
        for value in values:
            if isinstance(getattr(Case, name), property):
                assert type(value) is type(getattr(Case(), name))
            else:
                case = replace(Case(), **{name: value})
                assert from_json(to_json(case)) == case


@pytest.mark.parametrize("known", KNOWN)
def test_the_stored_case_is_one_of_those_that_fail(known: KnownFailure) -> None:
    if (case := stored_case(known)) is not None:
        assert from_json(to_json(case)) == case
        assert meets(case, known)


@pytest.mark.parametrize("known", KNOWN)
def test_one_that_was_sent_is_as_it_was(known: KnownFailure) -> None:
    sent = known_failure(json.loads(json.dumps(asdict(known))))
    assert replace(sent, case=None) == replace(known, case=None)
    assert stored_case(sent) == stored_case(known)


def test_any_law_is_none_whose_cases_are_not_claimed_nor_one_that_is_kept() -> None:
    known = KnownFailure(
        what="", laws=("backward", ANY_LAW), kept=("exact",), case=None, device="cpu", torch=("",)
    )
    assert {name for name in LAWS if not law_named(name).fails_by(known)} == {"exact", "rejection"}
    assert not replace(known, laws=("backward",)).breaks("forward")
    assert law_named("rejection").fails_by(replace(known, laws=("rejection",)))
