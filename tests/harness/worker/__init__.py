"""The program of the child process, in which kernels run, and the scripts that make its calls without it."""
