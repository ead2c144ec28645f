"""Tests of whether the suite catches bugs: planted ones, mutants made by operators, and other suites in comparison."""
