"""What a training takes, told before anything is allocated: what is stored, what a step makes, what fits."""
