"""The shapes that are timed: those of training, of grouped heads, of decoding, and small ones."""

from dataclasses import dataclass

DIRECTIONS = ("forward", "backward")


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

    def flops(self, direction: str) -> float:
        """Return the operations of a call: each product has a multiply and an add per pair and column; half if causal.

        A forward has two products (scores, out), a backward five (scores again, dP, dv, dk, dq).
        """
        pairs = self.batch * self.heads_q * self.seqlen_q * self.seqlen_k
        products = 2 if direction == "forward" else 5
        return 2.0 * products * pairs * self.head_dim * (0.5 if self.causal else 1.0)

    def least_bytes(self, direction: str) -> int:
        """Return the bytes that a call moves from and to memory if each tensor is read or written once.

        A forward reads q, k and v, and writes out and lse. A backward reads q, k, v, out, dout and lse, and writes dq,
        dk and dv. The lse is in float32, all else in bfloat16. A causal mask changes nothing: where there are as many
        queries as keys, some query sees each key.
        """
        # Each query has a row in q, out, dout and dq, and an lse. Each key has a row in k, v, dk and dv.
        queries = self.batch * self.heads_q * self.seqlen_q
        keys = self.batch * self.heads_kv * self.seqlen_k
        of_each = 2 if direction == "forward" else 4
        return 2 * of_each * (queries + keys) * self.head_dim + 4 * queries

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


LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)


QUICK = (
    Shape("head_dim 128, causal", 4, 48, 48, 4096, 4096, 128, True),
    Shape("head_dim 128, causal", 4, 48, 48, 1024, 1024, 128, True),
    Shape("decode, batch 32", 32, 32, 8, 1, 4096, 128),
    Shape("grouped heads, causal", 4, 32, 8, 4096, 4096, 128, True),
    Shape("head_dim 64, causal", 4, 48, 48, 4096, 4096, 64, True),
    Shape("small, seqlen_q 64", 4, 48, 48, 64, 1024, 64),
)
"""A shape of each kind, the most useful first, because a run that ends early leaves out the last ones."""


def shapes() -> list[Shape]:
    """Return all shapes."""
    training = [
        Shape(f"head_dim {d}, {'causal' if causal else 'full'}", 4, 48, 48, n, n, d, causal)
        for d in (16, 64, 128, 256)
        for causal in (False, True)
        for n in LENGTHS
    ]
    large = [Shape("batch 8", 8, 32, 32, 4096, 4096, 128, causal) for causal in (False, True)]
    grouped = [
        Shape(f"grouped heads, {'causal' if causal else 'full'}", 4, 32, 8, n, n, 128, causal)
        for causal in (False, True)
        for n in LENGTHS
    ]
    decode = [
        Shape(f"decode, batch {batch}", batch, 32, 8, 1, n, 128)
        for batch in (1, 2, 4, 8, 16, 32)
        for n in (16, 64, 256, 1024, 4096, 16384, 65536)
    ]
    small = [
        Shape(f"small, seqlen_q {n_q}", 4, 48, 48, n_q, n_k, 64)
        for n_q in (1, 16, 64, 256, 1024)
        for n_k in (16, 64, 256, 1024)
    ]
    return [*training, *large, *grouped, *decode, *small]
