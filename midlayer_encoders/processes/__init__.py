"""Share work among processes, or run it as jobs of a cluster."""
