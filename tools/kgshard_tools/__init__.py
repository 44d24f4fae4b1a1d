"""What happens after training: merge, export, index, answers, and the command line."""
