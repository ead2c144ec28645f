"""Accelerators as processes use them: CUDA by its own interface, any other by that of ``torch.accelerator``."""
