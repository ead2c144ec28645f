"""What the values of an alternative are called in its record, for who reads records alone."""

ONLY = "only"
"""The value that says which calls an alternative is restricted to."""
SIZES = ("tile", "split", "rows", "row", "most", "columns", "first", "parts")
"""The values that are sizes, such as a kernel chooses by head_dim and dtype."""
