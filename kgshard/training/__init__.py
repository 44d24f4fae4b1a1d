"""A training on ranks: batches, losses, steps, records. Begin with `trainer`; `tasks` is what ranks run."""
