"""The spec: its schema, reading, checking, planning."""
