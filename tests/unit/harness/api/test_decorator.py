"""The decorator makes a test of a kernel, and the fixture gives it its time."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness.api import fixture, kernel
from tests.harness.api.fixture import flashproof_verify
from tests.harness.api.specs import spec_of


def attention(q: Any, k: Any, v: Any, *, causal: bool, sm_scale: float) -> Any:
    """Attend."""
    return q


test_of_attention = kernel(head_dims=(64, 128), minutes=2)(attention)
test_of_attention.__test__ = False


class Verify:
    """Takes the place of ``flashproof.verify``."""

    def __init__(self, *, held: bool) -> None:
        self.result = SimpleNamespace(held=held, score=0.25, __str__=lambda: "told")
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.calls.append((*arguments, options))
        return self.result


def test_the_test_has_the_name_and_text_of_the_function_and_the_function_itself() -> None:
    assert (test_of_attention.__name__, test_of_attention.__doc__) == ("attention", "Attend.")
    assert test_of_attention.kernel is attention
    assert spec_of(attention, "nowhere") == f"{__name__}:attention"


def test_it_passes_on_what_it_is_given() -> None:
    verify = Verify(held=True)
    test_of_attention(verify)
    kernel(attention)(verify)
    kernel({"causal": True})(attention)(verify)
    assert verify.calls == [
        (attention, None, {"head_dims": (64, 128), "minutes": 2}),
        (attention, None, {}),
        (attention, {"causal": True}, {}),
    ]


def test_it_fails_unless_the_kernel_holds() -> None:
    with pytest.raises(pytest.fail.Exception):
        test_of_attention(Verify(held=False))


def test_the_fixture_gives_the_time_of_the_command_line_unless_the_test_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verify = Verify(held=True)
    monkeypatch.setattr(fixture, "verify", verify)
    node = SimpleNamespace(user_properties=[])
    config = SimpleNamespace(getoption={"--flashproof-minutes": 0.5}.__getitem__)
    given = flashproof_verify.__wrapped__(SimpleNamespace(config=config, node=node))  # type: ignore[attr-defined]
    given(attention)
    given(attention, {"causal": True}, minutes=3, seed=1)
    assert verify.calls == [
        (attention, {"minutes": 0.5}),
        (attention, {"causal": True}, {"minutes": 3, "seed": 1}),
    ]
    assert node.user_properties == [("flashproof_score", 0.25)] * 2
