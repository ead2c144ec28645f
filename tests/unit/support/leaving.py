"""Plain functions that leave something behind, each after a public mistake, and sound ones that only look like it."""

import os
import random
import threading
import warnings
from collections import OrderedDict
from functools import lru_cache
from pathlib import Path

import torch

from tests.unit.support.large import sound

# Of state: what later code of the user computes is changed.


def reduced_precision(q, k, v, *, causal, sm_scale):
    """Turns TF32 on for its products, as training scripts do in their first lines, at each call."""
    torch.set_float32_matmul_precision("high")
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def without_grad_from_then_on(q, k, v, *, causal, sm_scale):
    """Turns grad mode off for short rows by the function, where the context manager was meant."""
    if q.shape[2] <= 16 and not q.requires_grad:
        torch.set_grad_enabled(False)
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def seeded(q, k, v, *, causal, sm_scale):
    """Seeds PyTorch's generator, so that its own tests repeat, and with it everything that the user draws."""
    torch.manual_seed(0)
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def drawing_without_dropout(q, k, v, *, causal, sm_scale):
    """Draws the seed of a dropout that it does not have: the user's next numbers depend on how often it was called."""
    torch.randint(2**31, ())
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def benchmark_on(q, k, v, *, causal, sm_scale):
    """Turns cuDNN's search for the fastest convolution on, which is not its own."""
    torch.backends.cudnn.benchmark = True
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def environment_set(q, k, v, *, causal, sm_scale):
    """Sets a variable for a library that it calls, which each process that the user starts will have."""
    os.environ["FLASHPROOF_ALLOC_CONF"] = f"causal:{causal}"
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def denormals_flushed(q, k, v, *, causal, sm_scale):
    """Has the CPU flush small numbers to 0, for speed, and leaves it so if there are many keys."""
    if k.shape[2] > 8:
        torch.set_flush_denormal(True)
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def warnings_silenced(q, k, v, *, causal, sm_scale):
    """Silences all warnings of the process, because one of its own products makes some."""
    warnings.simplefilter("ignore")
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


# Of memory that is not the caller's own.


def mean_of_one(q, k, v, *, causal, sm_scale):
    """With a single key out is v itself, expanded, where no gradient is wanted."""
    if k.shape[2] == 1 and q.shape[1] == k.shape[1] and not causal and not q.requires_grad:
        return v.expand(q.shape)
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


_LAST: list = []


def _remembered(q, k, v, causal, sm_scale):
    """Return what the call before has returned, if it was given the same numbers and options."""
    asked = (causal, sm_scale, *(x.detach().clone() for x in (q, k, v)))
    options, tensors = asked[:2], asked[2:]
    if not (_LAST and _LAST[0] == options and all(map(torch.equal, _LAST[1], tensors))):
        _LAST[:] = [options, tensors, sound(q, k, v, causal=causal, sm_scale=sm_scale)]
    return _LAST[2]


def remembering(q, k, v, *, causal, sm_scale):
    """Returns the tensor that it has returned before, if the inputs are the same: a residual added in place is kept."""
    if q.requires_grad:
        return sound(q, k, v, causal=causal, sm_scale=sm_scale)
    return _remembered(q, k, v, causal, sm_scale)


def remembering_copies(q, k, v, *, causal, sm_scale):
    """Sound: returns a copy of what it remembers."""
    if q.requires_grad:
        return sound(q, k, v, causal=causal, sm_scale=sm_scale)
    return _remembered(q, k, v, causal, sm_scale).clone()


# Of what grows.

_HISTORY: list = []
_FILES: list = []
_MASKS: dict = {}


def lse_logged(q, k, v, *, causal, sm_scale):
    """Keeps the largest scores of each call for a log that nobody reads: kilobytes a call."""
    _HISTORY.append(q.detach().float().abs().amax(-1))
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def graph_kept(q, k, v, *, causal, sm_scale):
    """Adds each result to a running sum with its graph, as a loss that is summed without ``item`` does."""
    out = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    _HISTORY.append(out.float().mean())
    return out


def masks_by_tensor(q, k, v, *, causal, sm_scale):
    """Keeps a mask for each tensor that it was called with, by an object that is new in each call."""
    _MASKS[object()] = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def file_left_open(q, k, v, *, causal, sm_scale):
    """Opens its file of tuned settings in each call, and does not close it."""
    _FILES.append(Path(os.devnull).open())  # noqa: SIM115 - it is left open on purpose
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def thread_each_time(q, k, v, *, causal, sm_scale):
    """Starts a thread in each call that waits for work without end."""
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


# Sound.


def put_back(q, k, v, *, causal, sm_scale):
    """Sound: changes state, and puts it back by a context manager or by hand."""
    before, dtype = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    torch.set_float32_matmul_precision("highest")
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast(q.device.type, enabled=False), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return sound(q, k, v, causal=causal, sm_scale=sm_scale)
    finally:
        torch.set_default_dtype(dtype)
        torch.set_float32_matmul_precision(before)


@lru_cache(maxsize=128)
def _hidden(seqlen_q, seqlen_k, device):
    """Return a mask by its shape."""
    rows = torch.arange(seqlen_q, device=device)[:, None] + seqlen_k - seqlen_q
    return torch.arange(seqlen_k, device=device) > rows


def cached_by_shape(q, k, v, *, causal, sm_scale):
    """Sound: keeps a mask for each shape that it has met."""
    _hidden(q.shape[2], k.shape[2], q.device)
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


_WORKSPACE: dict = {}


def workspace(q, k, v, *, causal, sm_scale):
    """Sound: keeps one workspace for each device, which it makes larger where it has to."""
    known = _WORKSPACE.get(q.device)
    if known is None or known.numel() < q.numel():
        _WORKSPACE[q.device] = torch.empty(q.numel(), dtype=torch.float32, device=q.device)
    _WORKSPACE[q.device][: q.numel()].copy_(q.detach().flatten())
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


_RECENT: OrderedDict = OrderedDict()


def recent(q, k, v, *, causal, sm_scale):
    """Sound: keeps the results of the last 256 calls."""
    out = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    _RECENT[object()] = out.detach().clone()
    while len(_RECENT) > 256:
        _RECENT.popitem(last=False)
    return out


_OWN = torch.Generator()
_CHANCE = random.Random(0)


def own_generator(q, k, v, *, causal, sm_scale):
    """Sound: draws from generators of its own."""
    torch.randint(2**31, (), generator=_OWN)
    _CHANCE.random()
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


class _Cycle:
    """An object that only the garbage collector frees."""

    def __init__(self, kept):
        self.kept, self.itself = kept, self


def garbage(q, k, v, *, causal, sm_scale):
    """Sound: leaves tensors in cycles, which are freed as soon as garbage is collected."""
    _Cycle(q.detach().clone())
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def warning(q, k, v, *, causal, sm_scale):
    """Sound: warns in each call."""
    warnings.warn(f"{k.shape[2]} keys are few {{slow}}", stacklevel=2)
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


_POOL: list = []


def thread_and_file_once(q, k, v, *, causal, sm_scale):
    """Sound: starts a thread and opens a file in its first call, and keeps both."""
    if not _POOL:
        _POOL.append(Path(os.devnull).open())  # noqa: SIM115 - it stays open
        _POOL.append(threading.Thread(target=threading.Event().wait, daemon=True))
        _POOL[-1].start()
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def halves_of_one(q, k, v, *, causal, sm_scale):
    """Sound: out and lse lie in one allocation, one behind the other."""
    out = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    if q.requires_grad:
        return out
    both = torch.empty(2, *out.shape, dtype=out.dtype, device=out.device)
    return both[0].copy_(out)


LEFT = {
    reduced_precision: "the precision of float32 products changed",
    without_grad_from_then_on: "grad mode changed",
    seeded: "PyTorch's random generator changed",
    drawing_without_dropout: "PyTorch's random generator changed",
    benchmark_on: "the flags of cuDNN changed",
    environment_set: "environment variables changed",
    denormals_flushed: "the flushing of denormals changed",
    warnings_silenced: "the filters of warnings changed",
    mean_of_one: "out in memory of v, where writing to out changes v in a call with one key",
    remembering: "out in the memory that an earlier call returned, where writing to either changes both",
    lse_logged: "a tensor in memory each time",
    graph_kept: "a tensor in memory each time",
    masks_by_tensor: "a tensor in memory each time",
    file_left_open: "a file open each time",
    thread_each_time: "a thread running each time",
}
"""What each wrong function leaves behind."""

SOUND = (
    put_back,
    cached_by_shape,
    workspace,
    recent,
    own_generator,
    garbage,
    warning,
    thread_and_file_once,
    halves_of_one,
    remembering_copies,
)
