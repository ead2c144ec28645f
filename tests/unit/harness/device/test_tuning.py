"""A launch takes the configuration that is chosen, as far as pruning and the compiler leave it; none is timed."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.autotuner import Autotuner

from kernels.contract.tuners import AT_WORK
from kernels.tuners import settings_of, tuners_of
from tests.harness.device.tuning import MOST_TRIALS, Chosen, configured, take_over
from tests.unit.support.calling import DEVICE

SIZES = (16, 32, 64)
hooked: list[int] = []


@pytest.fixture(autouse=True)
def _tuners(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Autotuner, "run", Autotuner.run)
    take_over()
    hooked.clear()


def pruned(configs: list[Any], named_args: dict[str, Any], **kwargs: Any) -> list[Any]:
    """Leave out tiles of more numbers than there are."""
    return [config for config in configs if config.kwargs["SIZE"] <= named_args["count"]]


@triton.jit
def _add(x, out, count, SIZE: tl.constexpr, WIDE: tl.constexpr, TWICE: tl.constexpr):
    """Add x to out, and the size of a tile to the first number."""
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.static_assert(SIZE <= WIDE)
    tl.atomic_add(out + i, tl.load(x + i, mask=i < count) * TWICE, mask=i < count)


def note(args: dict[str, Any]) -> None:
    """Remember that a configuration was about to be run."""
    hooked.append(args["SIZE"])


def tuner(stages: tuple[int, ...] = (3,), **options: Any) -> Any:
    """Return the kernel with a tuner over a heuristic."""
    configs = [triton.Config({"SIZE": n}, num_stages=s, pre_hook=note) for n in SIZES for s in stages]
    heuristic = triton.heuristics({"TWICE": lambda args: 1 + (args["SIZE"] == 64)})
    return triton.autotune(configs, key=["count"], **options)(heuristic(_add))


def launched(kernel: Any, choice: str | None = None, *, count: int = 64, wide: int = 64, **more: Any) -> Any:
    """Launch a kernel on ones, and return out and what was taken; ``choice`` is a size, or ``AT_WORK``."""
    tuners = tuners_of(kernel) if choice else {}
    ((name, values),) = settings_of(tuners).items() or (("", ()),)
    launch = (
        {name: next(x for x in values if x == choice or x.startswith(f"SIZE={choice} "))} if tuners else {}
    )
    out = torch.zeros(count, device=DEVICE)
    with configured(tuners, launch, **more) as chosen:
        kernel[lambda meta: (triton.cdiv(count, meta["SIZE"]),)](
            torch.ones(count, device=DEVICE), out, count, WIDE=wide
        )
    return out[0].item(), chosen


@pytest.mark.parametrize("size", SIZES)
def test_the_chosen_configuration_is_run_once(size: int) -> None:
    kernel = tuner()
    found, chosen = launched(kernel, str(size))
    assert (found, hooked) == (2.0 if size == 64 else 1.0, [size])
    assert chosen.launched == {"_add.config": [f"SIZE={size} num_warps=4 num_stages=3"]}
    assert kernel.best_config.kwargs["SIZE"] == size
    assert len(kernel.configs) == len(SIZES)
    assert not chosen.notes
    assert not chosen.passed


def test_pruning_leaves_another_configuration() -> None:
    _, chosen = launched(tuner(prune_configs_by={"early_config_prune": pruned}), "64", count=40)
    assert hooked == [16]
    assert chosen.launched == {"_add.config": ["SIZE=16 num_warps=4 num_stages=3"]}
    with pytest.raises(Exception, match="No valid autotuner configs"):
        launched(tuner(prune_configs_by={"early_config_prune": pruned}), "64", count=8)


def test_a_configuration_that_does_not_compile_is_told_and_left_out() -> None:
    _, chosen = launched(tuner(), "64", wide=32)
    assert hooked[-1] == 16
    assert chosen.launched == {"_add.config": ["SIZE=16 num_warps=4 num_stages=3"]}
    (told,) = chosen.notes
    assert told.startswith("_add: the configuration SIZE=64 num_warps=4 num_stages=3 does not compile or fit")
    with pytest.raises(Exception, match=r"static_assert|SIZE <= WIDE|CompileTimeAssertion"):
        launched(tuner(), "64", wide=8)


def test_trial_runs_leave_their_results() -> None:
    found, chosen = launched(tuner(), AT_WORK)
    assert hooked == [16, 32, 64, 16]
    assert found == 1.0 + 1.0 + 2.0 + 1.0
    assert chosen.launched == {"_add.config": [AT_WORK]}
    assert launched(tuner(reset_to_zero=["out"]), AT_WORK)[0] == 1.0
    assert launched(tuner(restore_value=["out"]), AT_WORK)[0] == 1.0


def test_a_tuner_at_work_leaves_out_what_does_not_compile_and_tries_few() -> None:
    found, chosen = launched(tuner(), AT_WORK, wide=32)
    assert found == 1.0 + 1.0 + 1.0
    assert len(chosen.notes) == 1
    hooked.clear()
    launched(tuner(stages=(2, 3, 4)), AT_WORK)
    assert len(hooked) == MOST_TRIALS + 1


def test_an_unknown_tuner_takes_turns() -> None:
    taken = [launched(tuner(), turn=turn) for turn in range(4)]
    assert hooked == [16, 32, 64, 16]
    assert all("its 3 configurations took turns" in next(iter(chosen.notes)) for _, chosen in taken)


def test_a_key_that_names_no_argument_is_told() -> None:
    kernel = tuner()  # Triton from 3.9 refuses such a key where it is given
    kernel.keys = ["count", "seqlen"]
    _, chosen = launched(kernel, "16")
    (told,) = chosen.notes
    assert "_add: the tuner's key has 'seqlen', which names no argument" in told


def test_what_tuners_follow_is_not_passed() -> None:
    chosen = Chosen({"_add.config": None}, {"_add.config": "SIZE=16", "block_m": 16})
    assert chosen.passed == {"block_m": 16}


def test_heuristics_may_be_above_the_tuner() -> None:
    configs = [triton.Config({"SIZE": size}) for size in SIZES]
    above = triton.heuristics({"TWICE": lambda args: 2})(triton.autotune(configs, key=["count"])(_add))
    found, chosen = launched(above, "32")
    assert found == 2.0
    assert chosen.launched == {"_add.config": ["SIZE=32 num_warps=4 num_stages=3"]}
