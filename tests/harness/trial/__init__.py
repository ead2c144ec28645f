"""One case on one kernel, as a law sees it: calls are made, and what they return is judged."""
