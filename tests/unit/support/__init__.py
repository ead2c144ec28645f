"""What tests have in common: toy kernels, stubs, and functions that run the suite."""
