"""`bench SPEC`: how fast the very training loop runs here, where its time goes, and what others reach beside it."""
