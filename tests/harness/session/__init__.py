"""The pytest plugin: a run is planned, its time is shared, cases are drawn, and the results are summed up."""
