"""Triples in: readers, the prepared dataset, and the graphs that ship with kgshard."""
