"""The documentation page of claims is what ``kernels.contract.page`` makes of the declarations."""

import re
from dataclasses import dataclass

from kernels.contract import CLAIMS
from kernels.contract.page import attributes, page
from kernels.contract.parsing import ARITHMETIC, CAPABILITIES, PLAIN_FUNCTION, parse_claims
from tests.harness.files import ROOT

WRITTEN = ROOT / "docs" / "claims.md"


def test_the_page_is_current() -> None:
    assert WRITTEN.read_text() == page(), "python -m kernels.contract.page > docs/claims.md"


def test_every_claim_has_its_section() -> None:
    assert re.findall("^### `(.+)`$", page(), re.MULTILINE) == [
        *CAPABILITIES,
        *(name for name in CLAIMS if name not in CAPABILITIES),
        *ARITHMETIC,
    ]


def test_every_example_claims_something() -> None:
    examples = re.findall("^- Example: `--claims (.+)`$", page(), re.MULTILINE)
    assert len(examples) == len(CAPABILITIES) + len(ARITHMETIC)
    for example in examples:
        assert parse_claims(example.split(" --claims "), PLAIN_FUNCTION) != PLAIN_FUNCTION, example


def test_attributes_are_read_from_a_docstring() -> None:
    @dataclass
    class Documented:
        """Something.

        Attributes:
            one, other: what ``x``
                is: this.
            third: dS.

        No attribute: no.
        """

    assert attributes(Documented) == {
        "one": "What `x` is: this.",
        "other": "What `x` is: this.",
        "third": "dS.",
    }
