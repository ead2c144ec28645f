"""Tests of the documentation, of examples in it, and of what it says of the code."""
