"""HTTP: from the bytes of a request to the last event of its answer. Talks to the engine in typed messages only."""
