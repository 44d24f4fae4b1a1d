"""Exact ranks straight from the shards, and what is made of them. Begin with `ranker`."""
