"""The shapes that are timed: those of training, of grouped heads, of decoding, and small ones."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """One call, in bfloat16. ``series`` says which table and plot it belongs to."""

    series: str
    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    causal: bool = False

    @property
    def flops(self) -> float:
        """Operations of the forward: two products, each a multiply and an add per pair and column; half if causal."""
        pairs = self.batch * self.heads_q * self.seqlen_q * self.seqlen_k
        return 4.0 * pairs * self.head_dim * (0.5 if self.causal else 1.0)

    @property
    def sizes(self) -> str:
        """The sizes that the shapes of a series have in common."""
        heads = f"{self.heads_q}" if self.heads_q == self.heads_kv else f"{self.heads_q} on {self.heads_kv}"
        mask = "causal" if self.causal else "no mask"
        return f"batch {self.batch}, heads {heads}, head_dim {self.head_dim}, {mask}"

    @property
    def lengths(self) -> str:
        """The lengths, in which the shapes of a series differ."""
        return f"({self.seqlen_q}, {self.seqlen_k})"


BACKWARD_FLOPS = 2.5
"""Operations of a backward over those of a forward: five products (scores again, dP, dv, dk, dq) over two."""

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)


def shapes(*, quick: bool) -> list[Shape]:
    """Return all shapes or, if ``quick``, one or two of each series."""
    training = [
        Shape(f"head_dim {d}, {'causal' if causal else 'full'}", 4, 48, 48, n, n, d, causal)
        for d in ((64, 128) if quick else (16, 64, 128, 256))
        for causal in ((True,) if quick else (False, True))
        for n in ((1024, 4096) if quick else LENGTHS)
    ]
    large = [Shape("batch 8", 8, 32, 32, 4096, 4096, 128, causal) for causal in (False, True)]
    grouped = [
        Shape(f"grouped heads, {'causal' if causal else 'full'}", 4, 32, 8, n, n, 128, causal)
        for causal in (False, True)
        for n in ((4096,) if quick else LENGTHS)
    ]
    decode = [
        Shape(f"decode, batch {batch}", batch, 32, 8, 1, n, 128)
        for batch in ((1, 32) if quick else (1, 2, 4, 8, 16, 32))
        for n in ((4096,) if quick else (16, 64, 256, 1024, 4096, 16384))
    ]
    small = [
        Shape(f"small, seqlen_q {n_q}", 4, 48, 48, n_q, n_k, 64)
        for n_q in ((1, 1024) if quick else (1, 16, 64, 256, 1024))
        for n_k in ((1024,) if quick else (16, 64, 256, 1024))
    ]
    return [
        *training,
        *(large[1:] if quick else large),
        *(grouped[1:] if quick else grouped),
        *decode,
        *small,
    ]
