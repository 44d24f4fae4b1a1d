"""kgshard."""
