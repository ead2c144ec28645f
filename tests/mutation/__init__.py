"""Does the suite catch bugs? The place of the mutation catalogue's runner, which is yet to come."""
