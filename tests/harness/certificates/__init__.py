"""Bugs of which it is certified what the kernel computes instead of attention."""
