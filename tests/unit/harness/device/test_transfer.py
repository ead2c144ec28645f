"""Copies of tensors for a kernel on another device: strides and surroundings stay, and what is written comes back."""

import math

import pytest
import torch

from kernels.registry import load
from reference.bounds.accumulation import SAFETY
from strategies.case import Case
from strategies.layouts import are_first_columns, bits, place
from strategies.tensors import tensors
from tests.harness.device.transfer import MOST_PRODUCTS, Copies, home_of, on_cpu
from tests.harness.law import law_named
from tests.harness.trial.trial import Trial
from tests.unit.support.calling import DEVICE

DATA = torch.arange(24.0).view(1, 2, 3, 4)


@pytest.mark.parametrize("layout", ["contiguous", "gap", "offset", "expanded", "expanded_rows"])
def test_a_copy_has_the_strides_and_the_surroundings_of_its_tensor(layout: str) -> None:
    window = place(DATA, layout)
    copy = Copies("cpu").of(window.tensor)
    assert (copy.stride(), copy.storage_offset()) == (window.tensor.stride(), window.tensor.storage_offset())
    assert copy.data_ptr() != window.tensor.data_ptr()
    assert torch.equal(copy, window.tensor)
    around = copy.as_strided(window.storage.shape, (1,), 0)
    assert torch.equal(bits(around), bits(window.storage))


def test_views_of_one_storage_are_views_of_one_copy() -> None:
    copies, whole = Copies("cpu"), DATA.clone()
    first, second = copies.of(whole[:, :1]), copies.of(whole[:, 1:])
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert second.data_ptr() - first.data_ptr() == 12 * DATA.element_size()


def test_what_is_written_to_a_copy_or_around_it_comes_back() -> None:
    copies, window = Copies("cpu"), place(DATA, "gap", margin_value=0.0)
    copy = copies.of(window.tensor)
    copy[0, 1, 2, 3] = -1.0
    copy.as_strided((1,), (1,), 0).fill_(7.0)
    assert torch.equal(window.tensor, DATA)
    copies.write_back()
    assert window.tensor[0, 1, 2, 3] == -1.0
    assert window.storage[0] == 7.0


@pytest.mark.parametrize("layout", ["gap", "packed"])
def test_of_a_window_only_the_tensor_is_copied_and_poison_lies_around_it(layout: str) -> None:
    whole, window = place(DATA, layout, margin_value=5.0), place(DATA, layout, margin_value=5.0, around=False)
    window.storage[0] = -2.0
    copies = Copies("cpu", [window], 5.0)
    copy = copies.of(window.tensor)
    around = copy.as_strided(whole.storage.shape, (1,), 0)
    assert torch.equal(around, whole.storage)
    around[0] = 7.0
    copy[0, 1, 2, 3] = -1.0
    copies.write_back()
    assert window.tensor[0, 1, 2, 3] == -1.0
    assert window.storage[0] == -2.0


def test_tensors_come_to_the_cpu_with_their_values() -> None:
    strided = DATA.to(DEVICE).mT
    back = on_cpu([strided, strided[:, :0]])
    assert [x.device.type for x in back] == ["cpu", "cpu"]
    assert torch.equal(back[0], DATA.mT)
    assert back[1].numel() == 0


@pytest.mark.parametrize(
    ("case", "home"),
    [
        (Case(seqlen_q=512, seqlen_k=MOST_PRODUCTS // 512 // 16), "cpu"),
        (Case(seqlen_q=512, seqlen_k=MOST_PRODUCTS // 512 // 16 + 1), "cuda:1"),
        (Case(batch=2, heads_kv=2, group=4, seqlen_q=256, seqlen_k=MOST_PRODUCTS // 256 // 256), "cpu"),
        (Case(batch=2, heads_kv=2, group=5, seqlen_q=256, seqlen_k=MOST_PRODUCTS // 256 // 256), "cuda:1"),
        (Case(v_layout="huge"), "cuda:1"),
    ],
)
def test_small_cases_are_judged_on_the_cpu(case: Case, home: str) -> None:
    assert home_of(case, "cuda:1") == home
    assert home_of(case, "cpu") == "cpu"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="copies to a GPU need one")
@pytest.mark.parametrize("name", ["forward", "backward", "exact", "special", "composition", "invariance"])
def test_a_law_tells_the_same_wherever_it_is_judged(name: str) -> None:
    case = Case(batch=2, group=2, seqlen_q=33, seqlen_k=40, dtype="float16", causal=True, k_layout="gap")
    worst = []
    for home in ("cpu", "cuda:0"):
        trial = Trial(load("tests.panel.eager:float32"), case, "cuda:0", SAFETY, home=home)
        law_named(name)(trial)
        assert trial.windows.q.tensor.device.type == torch.device(home).type
        worst.append(trial.worst)
    assert worst[0].keys() == worst[1].keys()
    assert all(math.isclose(worst[0][key], worst[1][key], rel_tol=1e-3, abs_tol=1e-6) for key in worst[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="copies to a GPU need one")
def test_an_input_that_a_kernel_on_a_gpu_changes_is_seen_on_the_cpu() -> None:
    case = Case(seqlen_q=4, seqlen_k=4, causal=True)
    trial = Trial(load("tests.faults.planted:corrupting"), case, "cuda:0", SAFETY, home="cpu")
    trial.forward()
    finding = trial.changed_input()
    assert finding is not None
    assert (finding.tensor, finding.wrong) == ("k", 1)


def test_a_v_that_is_the_first_columns_of_k_stays_so_in_a_copy_of_the_whole_k() -> None:
    windows = tensors(Case(seqlen_k=3, v_head_dim=5, v_in_k=True, k_layout="gap"), "cpu", around=False)
    copies = Copies("cpu", windows.own.values())
    k, v = (copies.of(x.tensor) for x in (windows.k, windows.v))
    assert are_first_columns(v, k)
    assert torch.equal(k, windows.k.tensor)
