"""Our kernels compiled for GPUs that are not here: registers, spills and shared memory."""
