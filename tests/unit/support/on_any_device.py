"""Plain functions for any type of accelerator: a sound one, and some with public mistakes."""

import torch

from tests.panel import eager


def sound(q, k, v, *, causal, sm_scale):
    """Sound: plain PyTorch, with gradients by autograd."""
    return eager.float32(q, k, v, causal=causal, sm_scale=sm_scale)[0]


def last_key_lost(q, k, v, *, causal, sm_scale):
    """Leaves the last key out of a call with several keys and no causal mask."""
    keys = k.shape[2] if causal or k.shape[2] < 2 else k.shape[2] - 1
    return sound(q, k[:, :, :keys], v[:, :, :keys], causal=causal, sm_scale=sm_scale)


def stream_left(q, k, v, *, causal, sm_scale):
    """Makes a stream of its own the current one, and leaves it so."""
    torch.accelerator.set_stream(torch.Stream(q.device))
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def device_left(q, k, v, *, causal, sm_scale):
    """Makes the other device the current one, and leaves it so."""
    out = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    torch.accelerator.set_device_index(1 - q.device.index)
    return out


_NUMBERS: dict = {}


def numbers_of_the_usual_stream(q, k, v, *, causal, sm_scale):
    """Returns what it returned on the usual stream for tensors at the same places, if the stream is another one."""
    out, key = sound(q, k, v, causal=causal, sm_scale=sm_scale), (q.data_ptr(), *q.shape, k.shape[2])
    if torch.accelerator.current_stream().stream_id == 0 or key not in _NUMBERS:
        _NUMBERS[key] = 2.0 * out.detach()
        return out
    return _NUMBERS[key]
