"""What explains calls of a kernel that are wrong: the search for alternatives to attention."""
