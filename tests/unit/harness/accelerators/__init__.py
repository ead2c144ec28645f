"""Tests of what is asked of accelerators."""
