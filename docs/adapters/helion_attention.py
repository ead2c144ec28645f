# flashproof verify helion_attention.py:attention --claims min_seqlen=1
import helion
import helion.language as hl
import torch


@helion.kernel(autotune_effort="none", static_shapes=False, dot_precision="ieee")
def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: hl.constexpr, sm_scale: float):
    (batch, heads, rows, head_dim), keys, group = q.shape, k.size(2), q.size(1) // k.size(1)
    head_dim = hl.specialize(head_dim)
    out, lse = torch.empty_like(q), torch.empty([batch, heads, rows], device=q.device)
    for b, h, i in hl.tile([batch, heads, rows], block_size=[1, 1, None]):
        top, total = hl.full([i], -1e30, dtype=torch.float32), hl.zeros([i])
        acc = hl.zeros([i, head_dim])
        for j in hl.tile(keys):
            k_tile, v_tile = k[b.begin, h.begin // group, j, :], v[b.begin, h.begin // group, j, :]
            scores = q[b.begin, h.begin, i, :].float() @ k_tile.float().T * sm_scale
            if causal:
                seen = j.index[None, :] <= i.index[:, None] + keys - rows
                scores = torch.where(seen, scores, -torch.inf)
            before, top = top, torch.maximum(top, torch.amax(scores, 1))
            weights, shrink = torch.exp(scores - top[:, None]), torch.exp(before - top)
            total = total * shrink + torch.sum(weights, 1)
            acc = acc * shrink[:, None] + weights @ v_tile.float()
        out[b.begin, h.begin, i, :] = (acc / torch.where(total == 0, 1, total)[:, None]).to(q.dtype)
        lse[b.begin, h.begin, i] = top + torch.log(total)
    return out, lse


def attention(q, k, v, *, causal, sm_scale):
    return forward(q, k, v, causal, sm_scale)
