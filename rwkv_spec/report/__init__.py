"""What a person sees while a run goes on, and what it leaves to read."""
