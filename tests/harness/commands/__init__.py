"""The command `flashproof`: its subcommands, and how they reach pytest."""
