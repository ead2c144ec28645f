"""The rules by which other suites decide whether a kernel is right, each on its own inputs, for comparison."""

from tests.mutation.rules.assert_close import AssertClose
from tests.mutation.rules.base import Rule, RuleBroken, RuleCase
from tests.mutation.rules.flash_attention import FlashAttention2
from tests.mutation.rules.kernelbench import KernelBench, KernelBenchHalf
from tests.mutation.rules.packages import GpuCheck, GpuEmu
from tests.mutation.rules.pytorch import FlexAttention, PyTorchSdpa
from tests.mutation.rules.triton_tutorial import TritonTutorial
from tests.mutation.rules.xformers import Xformers

RULES: tuple[Rule, ...] = (
    FlashAttention2(),
    TritonTutorial(),
    AssertClose(),
    PyTorchSdpa(),
    FlexAttention(),
    Xformers(),
    KernelBench(),
    KernelBenchHalf(),
    GpuCheck(),
    GpuEmu(),
)
"""All rules, in the order of the table."""

__all__ = ["RULES", "RuleCase", "Rule", "RuleBroken"]
