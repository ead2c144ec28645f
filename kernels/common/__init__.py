"""What our kernels share: steps on a tile, launches, and checks of a call."""
