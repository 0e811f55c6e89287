"""What is minimised: each objective returns a weighted sum and its weight, never a mean."""
