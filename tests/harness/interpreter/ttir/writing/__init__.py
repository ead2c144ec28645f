"""Code that is made of a kernel: each kind of operation becomes lines of Python that call NumPy."""
