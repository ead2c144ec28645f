"""Calls written down as Python: tensors that are written over between calls, and others in their memory, are too."""

from reference.bounds.accumulation import SAFETY
from strategies.case import Case
from tests.harness.law import law_named
from tests.harness.worker.source import WritingTrial
from tests.unit.support import stateful

CASE = Case(seqlen_q=1, seqlen_k=2, inference=True)


def calls_of(*earlier: str, ragged: str = "none") -> list[str]:
    """Return the arguments of the calls that the law ``sequences`` makes."""
    kernel = stateful.kernel(stateful.sound_lengths)
    fields = {**vars(CASE), "earlier": earlier, "ragged": ragged}
    trial = WritingTrial(kernel, Case(**fields), "cpu", SAFETY)
    law_named("sequences")(trial)
    return [", ".join(call) for call in trial.source.calls]


def test_the_same_call_has_the_same_names() -> None:
    first, last = calls_of("same")
    assert first == last
    assert "kernel, q0, k0, v0, dout0" in last


def test_numbers_that_are_written_over_are_written_down() -> None:
    first, last = calls_of("keys")
    assert "kernel, q0, k0, v0, dout0" in first
    assert "kernel, q0, holding(k0, window(" in last


def test_another_tensor_in_the_same_memory_is_another_one_in_the_script() -> None:
    _, last = calls_of("memory")
    assert "holding(q0[...], window(" in last


def test_a_tensor_in_memory_that_is_used_again_is_as_new_in_the_script() -> None:
    first, last = calls_of("freed")
    assert "kernel, q0.data, k0.data, v0.data, dout0.data" in first
    assert "holding(q0, window(" in last
    assert last.count(".data,") == 4


def test_a_table_that_is_written_over_has_a_name() -> None:
    first, last = calls_of("tables", ragged="cache")
    assert "cache_seqlens=cache_seqlens_0" in first
    assert "cache_seqlens=holding(cache_seqlens_0, torch.tensor([2]" in last


def test_a_call_that_may_raise_is_attempted() -> None:
    first, last = calls_of("refused")
    assert first.startswith("attempted, through_autograd, kernel")
    assert last.startswith("through_autograd, kernel")
