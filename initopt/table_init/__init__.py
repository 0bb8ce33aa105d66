"""Tables of embeddings: allocated once, filled once, by as many threads as there are cores, with the same bytes."""
