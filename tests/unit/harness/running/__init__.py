"""Tests of the parent's end of the child process."""
