"""Everything between a law and a kernel: a run is planned, cases are judged in child processes, bugs are told."""
