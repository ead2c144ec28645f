"""Does the suite catch bugs? Planted ones, what operators make of a kernel, and other suites beside it."""
