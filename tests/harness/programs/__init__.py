"""What other programs are told of a run: ``verdict.json``, its score, its schema, and how it reaches them."""
