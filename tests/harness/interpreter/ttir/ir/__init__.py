"""A kernel in Triton's intermediate representation: got from the front end, and read from its text."""
