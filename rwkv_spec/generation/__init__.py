"""From a model and prompts to new tokens."""
