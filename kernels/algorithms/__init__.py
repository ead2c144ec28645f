"""Our own kernels in Triton and Gluon: a module, or a package, for each algorithm."""
