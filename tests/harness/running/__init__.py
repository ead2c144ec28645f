"""The parent's end of the child process: it is started, runs cases that are counted, and what it refuses is learned."""
