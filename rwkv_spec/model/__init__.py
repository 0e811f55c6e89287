"""The models: shapes without torch, one generation a file, and the language model around them."""
