"""Plain functions that are wrong elsewhere than on a GPU's default stream, each after a public mistake, and sound ones.

None of them waits for the device but those that say so.
"""

import torch

from tests.unit.support.large import expanded, scores_of


def eager(q, k, v, *, causal, sm_scale):
    """Sound: plain PyTorch, with gradients by autograd."""
    p = torch.softmax(scores_of(q, k, causal, sm_scale), -1)
    p = torch.where(p.isnan(), 0.0, p) if causal or k.shape[2] == 0 else p  # rows that see no key
    return (p @ expanded(v, q)).to(q.dtype)


# Wrong on a side stream.


def on_the_default_stream(q, k, v, *, causal, sm_scale):
    """Launches on PyTorch's default stream, as an extension does that asks for it once."""
    with torch.cuda.stream(torch.cuda.default_stream()):
        return eager(q, k, v, causal=causal, sm_scale=sm_scale)


def on_stream_0(q, k, v, *, causal, sm_scale):
    """Launches on stream 0 by its raw handle, as ``kernel<<<grid, block>>>`` does."""
    with torch.cuda.stream(torch.cuda.ExternalStream(0)):
        return eager(q, k, v, causal=causal, sm_scale=sm_scale)


def scaled_on_the_default_stream(q, k, v, *, causal, sm_scale):
    """Scales out by a kernel of its own on the default stream, in place, which nothing waits for."""
    out = eager(q, k, v, causal=causal, sm_scale=sm_scale)
    if out.requires_grad:
        return out
    half = 0.5 * out
    with torch.cuda.stream(torch.cuda.default_stream()):
        half.mul_(2.0)
    return half


_STREAMS: dict = {}


def on_its_own_stream(q, k, v, *, causal, sm_scale):
    """Launches on a stream of its own, which the caller's waits for, and which does not wait for the caller's."""
    own = _STREAMS.setdefault(q.device, torch.cuda.Stream(q.device))
    with torch.cuda.stream(own):
        out = eager(q, k, v, causal=causal, sm_scale=sm_scale)
    torch.cuda.current_stream().wait_stream(own)
    return out


def keys_prepared_on_a_side_stream(q, k, v, *, causal, sm_scale):
    """Copies k on a stream that waits for the default stream alone, to overlap it with other work."""
    own = _STREAMS.setdefault((q.device, "k"), torch.cuda.Stream(q.device))
    event = torch.cuda.Event()
    with torch.cuda.stream(own):
        keys = k.clone()
        event.record(own)
    torch.cuda.current_stream().wait_event(event)
    return eager(q, keys, v, causal=causal, sm_scale=sm_scale)


# Wrong in a CUDA graph.

_KNOWN: dict = {}


def largest_of_the_last_call(q, k, v, *, causal, sm_scale):
    """Scales q by its largest number, which it reads from the device, and the last one where that may not be."""
    if not torch.cuda.is_current_stream_capturing():
        _KNOWN["largest"] = float(q.detach().float().abs().amax()) if q.numel() else 1.0
    largest = _KNOWN["largest"] or 1.0
    rounded = (q.float() / largest).clamp(-1.0, 1.0) * largest
    return eager(rounded, k, v, causal=causal, sm_scale=sm_scale).to(q.dtype)


def answer_of_the_warm_up(q, k, v, *, causal, sm_scale):
    """Keeps its last answer to be spared a call, and copies that into the graph."""
    if torch.cuda.is_current_stream_capturing() and not q.requires_grad:
        return _KNOWN["out"].clone()
    out = eager(q, k, v, causal=causal, sm_scale=sm_scale)
    _KNOWN["out"] = out.detach()
    return out


def inputs_copied_in_the_warm_up(q, k, v, *, causal, sm_scale):
    """Has keys in another layout for as long as it knows their address, which says nothing of what lies there."""
    key = (k.data_ptr(), k.shape)
    if torch.cuda.is_current_stream_capturing() and key in _KNOWN and not k.requires_grad:
        return eager(q, _KNOWN[key], v, causal=causal, sm_scale=sm_scale)
    _KNOWN[key] = k.detach().clone()
    return eager(q, k, v, causal=causal, sm_scale=sm_scale)


# Sound, but no graph can have it.


def waiting(q, k, v, *, causal, sm_scale):
    """Sound: reads a number of q from the device at each call."""
    float(q.detach().float().sum())
    return eager(q, k, v, causal=causal, sm_scale=sm_scale)


def uploading(q, k, v, *, causal, sm_scale):
    """Sound: makes a small tensor of Python numbers at each call."""
    torch.tensor([q.shape[2], k.shape[2]], device=q.device)
    torch.cuda.synchronize()
    return eager(q, k, v, causal=causal, sm_scale=sm_scale)


# Sound, and graphs can have it.


def workspace(q, k, v, *, causal, sm_scale):
    """Sound: allocates a workspace on the current stream, and sums in it."""
    space = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    space.copy_(q.detach())
    return eager(q, k, v, causal=causal, sm_scale=sm_scale)


def forked(q, k, v, *, causal, sm_scale):
    """Sound: works on a stream of its own, which waits for the caller's, and which the caller's waits for."""
    own = _STREAMS.setdefault((q.device, "forked"), torch.cuda.Stream(q.device))
    own.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(own):
        out = eager(q, k, v, causal=causal, sm_scale=sm_scale)
    torch.cuda.current_stream().wait_stream(own)
    out.record_stream(torch.cuda.current_stream())
    return out


SIDE_WRONG = (
    on_the_default_stream,
    on_stream_0,
    scaled_on_the_default_stream,
    on_its_own_stream,
    keys_prepared_on_a_side_stream,
)
GRAPH_WRONG = (largest_of_the_last_call, answer_of_the_warm_up, inputs_copied_in_the_warm_up)
NOT_CAPTURED = (waiting, uploading)
SOUND = (eager, workspace, forked)


# Of two GPUs.


def unguarded(q, k, v, *, causal, sm_scale):
    """Allocates its result on the current device, whichever that is."""
    out = eager(q, k, v, causal=causal, sm_scale=sm_scale)
    return out + torch.zeros(out.shape, dtype=out.dtype, device="cuda")


def guarded(q, k, v, *, causal, sm_scale):
    """Sound: makes the device of its tensors the current one."""
    with torch.cuda.device(q.device):
        return unguarded(q, k, v, causal=causal, sm_scale=sm_scale)
