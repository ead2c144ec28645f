"""Libraries of attention kernels for GPUs, and the servers of language models that have their own."""
