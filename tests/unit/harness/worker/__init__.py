"""Tests of the program of the child process."""
